"""What to do about a stage that holds training back, and the gain to expect.

The advice never claims more than the model of :mod:`what_if`: where that knows what more workers
would give, it decides; elsewhere the free cores are the bound.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from .causes import (
    Cause,
    is_inline,
    lacks_gil_probe,
    may_hide_the_gil,
    num_delivered,
    own_work,
    waits_for_others,
)
from .demands import THE_LOADER, NotKnown, demands_of
from .what_if import Question, estimate, limiting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...engine.statistics import PipelineStats, StageStats
    from ...machine.readings import Probes
    from .causes import Load
    from .finding import Finding
    from .what_if import Estimate

CACHED = " (cached(dataset, transform=what is random in it))"
AT_ONCE = " (whole batches in one call by __getitems__)"
AT_ONCE_OR_CACHED = f"{AT_ONCE[:-1]}, or{CACHED.replace('(', '', 1)}"
"""The ways to less work for a sample of a dataset with a length."""

_IDLE_CONSUMER = 0.95
"""Share of waiting above which the consumer works too little to predict its speed."""
_MOST_AT_ONCE = 4
"""Factor of concurrency beyond which a stage may behave differently: measure again there."""
_WORTH_IT = 0.05
"""The gain below which no change is advised: that much is noise."""
_NEAR = 0.02
"""The share of the best rate that may be given up for fewer workers."""
_THE_CORES = "the cores"
_NOTICED = 0.05
"""The share of waiting that is left, from which what it is for is named as the next limit."""


class Ceiling(NamedTuple):
    """The gain that the rest of the program allows, however fast the stage gets."""

    gain: float
    """0.45 = 45 %; infinite where nothing else limits it."""
    limit: str = ""
    """What limits the speed then; "" = the trainer, which no longer waits."""

    def at_most(self, gain: float, limit: str) -> Ceiling:
        """Return the lower of the two."""
        return Ceiling(gain, limit) if gain < self.gain else self


class Advice(NamedTuple):
    """What to do, and the gain."""

    action: str
    ceiling: Ceiling


class _Question(NamedTuple):
    """A stage that holds training back, with all that is known about it."""

    stats: PipelineStats
    probes: Probes
    pooled: Sequence[str]
    found: Finding
    load: Load

    @property
    def cause(self) -> Cause:
        """The cause that the verdict names."""
        return self.found.cause

    @property
    def is_workers(self) -> bool:
        """Whether it runs on a loader's workers, rather than on threads of its own."""
        return self.found.is_workers

    @property
    def threads(self) -> int:
        """The number of threads besides the trainer's."""
        return 0 if is_inline(self.stats, self.pooled) else self.load.threads

    @property
    def knob(self) -> str:
        """The name of the setting of that number."""
        return "num_workers" if self.is_workers else "its concurrency"

    @property
    def crew(self) -> str:
        """The word for those that work."""
        return self.found.crew

    @property
    def cores_used(self) -> float:
        """The number of cores in use, by the stage's threads alone where the rest is unknown."""
        used = self.probes.cores_used
        return self.load.cores + (self.load.helpers or 0.0) if used is None else used

    @property
    def free_cores(self) -> float:
        """The gain once all cores are in use, if every batch takes as much of them as now."""
        if self.probes.num_cores is None or self.cores_used <= 0:
            return math.inf
        return max(0.0, self.probes.num_cores / self.cores_used - 1)

    @property
    def collates(self) -> bool:
        """Whether it is what a loader's workers do with the samples of a batch, once they have
        them."""
        return self.is_workers and self.found.stage is not self.stats.stages[0]

    @property
    def less_work(self) -> str:
        """What would make an item cheaper."""
        if not self.is_workers:
            return "less work for each item"
        if self.collates:  # neither a cache of samples nor reading them together makes it shorter
            return "less work for each batch (in collate_fn)"
        made = num_delivered(self.stats.stages) or 0
        calls = self.stats.stages[0].tasks.num_tasks
        if calls <= 2 * (made + self.load.threads):  # a call is a batch already
            return f"less work for each item{CACHED}"
        return f"less work for each item{AT_ONCE_OR_CACHED}"

    def ask(self, question: Question) -> Estimate | None:
        """Return the model's answer; None = it does not know."""
        try:
            now = demands_of(self.stats, self.probes, self.cause, self.pooled, None)
            return estimate(question, now)
        except NotKnown:
            return None


def ceiling_of(
    stats: PipelineStats,
    probes: Probes,
    stage: StageStats,
    pooled: Sequence[str],
    *,
    all_waits: bool = False,
) -> Ceiling:
    """Return the gain if the consumer never waited, or as much of it as its own work in the loader
    and the stages other than ``stage`` allow. ``all_waits``: that work would be gone, too."""
    if all_waits:
        ceiling = _without_waits(stats.consumer_wait_ratio)
    else:
        left, limit = max(
            (probes.sampling_ratio or 0.0, "the sampler"),
            (own_work(stats, probes, pooled), THE_LOADER),
        )
        ceiling = _without_waits(waits_for_others(stats, pooled), limit, left)
    changed = pooled if stage.name in pooled else (stage.name,)
    others = [each for each in stats.stages if each.name not in changed]
    if not others:
        return ceiling
    busiest = max(others, key=lambda each: each.busy_ratio)
    return ceiling.at_most(1 / max(busiest.busy_ratio, 0.01) - 1, f"stage {busiest.name!r}")


def _without_waits(waits: float, limit: str = "", others: float = 0.0) -> Ceiling:
    """Return the gain without these waits; ``others``: those that stay, for this limit."""
    gain = 1 / (1 - waits) - 1 if waits < _IDLE_CONSUMER else math.inf
    return Ceiling(gain, limit if others >= _NOTICED else "")


def advise(stats: PipelineStats, probes: Probes, pooled: Sequence[str], found: Finding) -> Advice:
    """Return what to do about the finding; other arguments as for :func:`judge`."""
    if found.cause is Cause.SAMPLER:
        others, sampling = waits_for_others(stats, pooled), probes.sampling_ratio or 0.0
        return Advice(_CHEAPER_SAMPLER, _without_waits(sampling, "the dataset", others))
    if found.cause is Cause.HAND_OVER:
        return Advice(_without_stage(found), _without_waits(stats.consumer_wait_ratio))
    if found.stage is None or found.load is None:
        sampling = probes.sampling_ratio or 0.0
        waits = max(0.0, stats.consumer_wait_ratio - sampling)
        return Advice(_without_stage(found), _without_waits(waits, "the sampler", sampling))
    asked = _Question(stats, probes, pooled, found, found.load)
    ceiling = ceiling_of(stats, probes, found.stage, pooled)
    if found.cause is Cause.GIL:
        # What the loop does itself may be waits for the GIL, too.
        ceiling = ceiling_of(stats, probes, found.stage, pooled, all_waits=True)
        return _against_gil(asked, ceiling)
    if found.may_be_gil:
        return _perhaps_against_gil(asked, ceiling)
    more = _with_more(asked, ceiling)
    return more if isinstance(more, Advice) else Advice(_with_less_work(asked, more), ceiling)


_CHEAPER_SAMPLER = (
    "Make the sampler cheaper: more workers will not help, as they do not draw from it. Find the "
    "order before training, or for many indices at once, and let the dataset do the reading."
)


def _without_stage(found: Finding) -> str:
    if found.cause is Cause.UNKNOWN:
        return "Leave stats=False out, and look again."
    if found.cause is Cause.SOURCE:
        return "Make the source cheaper: let it yield paths or indices, and read in a stage."
    if found.cause is Cause.CPU and found.others_have_cores:
        return (
            "End other programs that take the cores, or use larger batches: a worker waits for "
            "a core once for each."
        )
    if found.cause is Cause.CPU:
        return "Use fewer workers, or larger batches: a worker waits for a core once for each."
    if found.cause is Cause.HAND_OVER and found.is_inline:
        return "Use larger batches: each takes the loop the same, whatever is in it."
    if found.cause is Cause.HAND_OVER and found.is_workers:
        return "Use larger batches, or num_workers=0, with which none is handed over."
    if found.cause is Cause.HAND_OVER:
        return "Hand over more at once: aggregate items, or let each op do the work of several."
    return f"Use longer epochs{' or persistent_workers=True' if found.is_workers else ''}."


def _against_gil(asked: _Question, ceiling: Ceiling) -> Advice:
    processes = _of_processes(asked, ceiling)
    action = f"More {asked.crew} will not help. "
    if processes.gain >= _WORTH_IT:
        action += _without_gil(asked)
    else:
        action += (
            f"{_in_few_calls(asked)}. Processes would not help either: {asked.cores_used:.1f} of "
            f"the {asked.probes.num_cores:g} cores are in use."
        )
    if asked.probes.could_go_without_gil:
        action += f" {_SWITCH_OFF}"
    return Advice(action, processes if processes.gain >= _WORTH_IT else ceiling)


def _of_processes(asked: _Question, ceiling: Ceiling) -> Ceiling:
    """Return the gain from a separate GIL for each worker, as far as it is known."""
    if asked.is_workers:
        found = asked.ask(Question(processes=max(2, asked.threads)))
        if found is not None:
            gain = found.gain if found.gain < _WORTH_IT else found.most
            return ceiling.at_most(gain, found.limit)
    return ceiling.at_most(asked.free_cores, _THE_CORES)


def _perhaps_against_gil(asked: _Question, ceiling: Ceiling) -> Advice:
    action = (
        f"Its {asked.threads} {asked.crew} use {asked.load.cores:.1f} cores together, as threads "
        f"do that take the GIL in turns; then more will not help. {_without_gil(asked)}"
    )
    if lacks_gil_probe(asked.probes):
        action += " Load for a few seconds to be sure."
    return Advice(action, ceiling.at_most(asked.free_cores, _THE_CORES))


def _with_more(asked: _Question, ceiling: Ceiling) -> Advice | str:
    """Return the advice to add threads, or what is the limit where they would not help."""
    wanted = math.ceil(max(1, asked.threads) * min(1 + ceiling.gain, _MOST_AT_ONCE))
    for each in sorted({wanted, asked.threads + 2, asked.threads + 1}, reverse=True):
        found = asked.ask(Question(num_workers=each))
        if found is None:
            continue
        if found.gain >= _WORTH_IT:
            number, found = _fewest(asked, each, found)
            most = ceiling.at_most(found.most, found.limit)
            return Advice(_raise(asked, number, wanted), most)
        if each >= wanted:
            return found.limit
    has_none = asked.cause is Cause.CPU or asked.found.others_have_cores
    number = int(min(wanted, _most_useful(asked)))
    if has_none or number <= asked.threads or asked.free_cores < _WORTH_IT:
        return _THE_CORES
    ceiling = ceiling.at_most(asked.free_cores, _THE_CORES)
    ceiling = ceiling.at_most(number / max(1, asked.threads) - 1, f"the {asked.crew}")
    return Advice(_raise(asked, number, wanted), ceiling)


def _most_useful(asked: _Question) -> float:
    """Return the number of threads above which there are no cores for more."""
    num_cores = asked.probes.num_cores
    if asked.cause is Cause.IO or num_cores is None:
        return math.inf  # threads that wait for storage use no core
    return max(num_cores, math.ceil(num_cores / max(0.01, asked.load.computing)))


def _fewest(asked: _Question, most: int, best: Estimate) -> tuple[int, Estimate]:
    """Return the least number of threads that comes near the rate of ``most``, with its rate."""
    low, high, found = asked.threads, most, best
    while high - low > 1:
        middle = (low + high) // 2
        each = asked.ask(Question(num_workers=middle))
        if each is not None and each.rate >= best.rate * (1 - _NEAR):
            high, found = middle, each
        else:
            low = middle
    return high, found


def _raise(asked: _Question, number: int, wanted: int) -> str:
    num_cores = asked.probes.num_cores
    action = f"Raise {asked.knob} from {asked.threads} to about {number}"
    if asked.cause is Cause.IO:
        return f"{action}: its {asked.crew} use no core while they wait."
    action += _unless_gil(asked)
    if num_cores is not None and wanted > num_cores and asked.cause is not Cause.UNKNOWN:
        action += f": that keeps the {num_cores:g} cores busy. For more, give it "
        return f"{action}{asked.less_work}."
    return f"{action}, as long as cores are idle."


def _with_less_work(asked: _Question, limit: str) -> str:
    """Return the advice where more threads would not help, since ``limit`` is the limit."""
    num_cores, used = asked.probes.num_cores, asked.cores_used
    start = f"More {asked.crew} will not help"
    if limit == _THE_CORES and asked.found.others_have_cores and num_cores is not None:
        return (
            f"{start}: this training uses {used:.1f} of the {num_cores:g} cores, and other "
            f"programs take the rest. End some of those, or give it {asked.less_work}."
        )
    if limit == _THE_CORES and asked.cause is Cause.CPU:
        return f"{start}. Give it more cores, or {asked.less_work}."
    if limit != _THE_CORES:
        return f"{start}: {limiting(limit)}. Give it {asked.less_work}."
    if num_cores is None:
        return f"{start}. Give it {asked.less_work}."
    why = f"{used:.1f} of the {num_cores:g} cores are in use"
    if asked.cause is Cause.IO:
        return f"{start}: {why}. Let it wait less for storage, or give it {asked.less_work}."
    if asked.cause is Cause.THREADS and asked.threads >= num_cores:
        why = f"they compute on all of the {num_cores:g} cores already"
    return f"{start}: {why}. Give it {asked.less_work}, or more cores."


_SWITCH_OFF = (
    "This Python can run without its GIL, which an extension module or PYTHON_GIL=1 has switched "
    "on: with PYTHON_GIL=0 it stays off."
)


def _in_few_calls(asked: _Question) -> str:
    calls = "Do its work in few calls that release the GIL"
    return calls if asked.collates else f"{calls}, best a batch at a time"


def _unless_gil(asked: _Question) -> str:
    """Return the caveat to the advice to add threads where the GIL may hold these up: nobody looked
    at it, or what they do lets go of it so often that the probe sees nothing.
    """
    if asked.probes.own_gil:
        return ""
    if not (lacks_gil_probe(asked.probes) or may_hide_the_gil(asked.load, asked.cause)):
        return ""
    elsewhere = "in processes" if asked.is_workers else "on a process pool (executor=)"
    return f", {elsewhere} if the work holds the GIL"


def _without_gil(asked: _Question) -> str:
    of_its_own = (
        'in processes (isolation="process")'
        if asked.is_workers
        else "on a process pool (executor=)"
    )
    return f"{_in_few_calls(asked)}, or run it {of_its_own}."
