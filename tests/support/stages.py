"""Random stages for pipelines, and what a plain loop makes of the same items."""

from dataclasses import dataclass

from hypothesis import strategies as st

from support.gates import Boom


@dataclass(frozen=True)
class Plan:
    """One random stage (or an aggregate with its disaggregate)."""

    kind: str
    concurrency: int
    input_order: bool
    buffer_size: int | None
    group: int

    @property
    def output_order(self):
        in_order = self.input_order and self.kind != "async generator"
        return "input" if in_order else "completion"

    @property
    def keeps_order(self):
        return self.concurrency == 1 or self.output_order == "input"


# Every op is a pure function of its item; items are ints. What an op does with an item:


def plus(item):
    return item * 7 + 1


def drop_some(item):
    return None if item % 3 == 0 else item + 1


def fail_some(item):
    if item % 4 == 1:
        raise Boom(item)
    return item * 2


def spread(item):
    for n in range(item % 4):
        yield item * 5 + n if n != 1 else None


def spread_then_fail(item):
    yield item + 3
    if item % 3 == 1:
        raise Boom(item)
    yield item + 4


def plus_list(items):
    return [plus(item) for item in items]


def as_async(function):
    async def op(item):
        return function(item)

    return op


async def aspread(item):
    for output in spread(item):
        yield output


def outputs_of(kind, item):
    """What an op of this kind makes of an item, one by one; None is dropped."""
    if kind in ("failing generator", "executor generator"):
        return spread_then_fail(item)
    if "generator" in kind:
        return spread(item)
    function = drop_some if "dropping" in kind else fail_some if "failing" in kind else plus
    return [function(item)]


def evaluate(plan, items):
    """What one stage makes of ``items``, in order, and how many calls fail."""
    outputs, num_failures = [], 0
    if plan.kind.startswith("aggregate dropping"):
        return items[: len(items) // plan.group * plan.group], 0
    if plan.kind.startswith("aggregate"):
        return (plus_list(items) if "function" in plan.kind else list(items)), 0
    for item in items:
        made = []
        try:
            made.extend(outputs_of(plan.kind, item))  # up to the failure
        except Boom:
            num_failures += 1
            if plan.kind != "failing generator":  # of which what came before has left already
                continue
        outputs += [output for output in made if output is not None]
    return outputs, num_failures


def num_dropped(plan, items):
    """How many outputs, or items of an incomplete group, are left out."""
    if "dropping the last" in plan.kind:
        return len(items) % plan.group
    if "dropping" in plan.kind:
        return sum(drop_some(item) is None for item in items)
    return sum(item % 4 > 1 for item in items) * (plan.kind in ("generator", "async generator"))


OPS = {
    "function": plus,
    "dropping": drop_some,
    "async dropping": as_async(drop_some),
    "executor dropping": drop_some,
    "failing": fail_some,
    "generator": spread,
    "failing generator": spread_then_fail,
    "async function": as_async(plus),
    "async failing": as_async(fail_some),
    "async generator": aspread,
    "executor function": plus,
    "executor failing": fail_some,
    "executor generator": spread_then_fail,
}
AGGREGATES = (
    "aggregate, disaggregate",
    "aggregate, function, disaggregate",
    "aggregate dropping the last, disaggregate",
)


def add(builder, plan, pool, **named):
    """Pipe the stages of ``plan``; ``name``: of the one that is no aggregate."""
    options = {
        **named,
        "concurrency": plan.concurrency,
        "output_order": plan.output_order,
        "buffer_size": plan.buffer_size,
    }
    if plan.kind.startswith("aggregate"):
        builder.aggregate(plan.group, drop_last="dropping" in plan.kind)
        if "function" in plan.kind:
            builder.pipe(plus_list, **options)
        builder.disaggregate()
        return
    executor = pool if plan.kind.startswith("executor") else None
    builder.pipe(OPS[plan.kind], executor=executor, **options)


plans = st.builds(
    Plan,
    kind=st.sampled_from([*OPS, *AGGREGATES]),
    concurrency=st.integers(1, 4),
    input_order=st.booleans(),
    buffer_size=st.none() | st.integers(1, 4),
    group=st.integers(1, 5),
)
