"""Every random operator of torch draws from the sample's stream, and from nothing else."""

import functools
import re
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import ways_of_draws
from support.datasets import Drawing, Made
from torch import rand as rand_imported_early
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from spdl_torch import DataLoader
from spdl_torch.loader.rng import dispatch
from spdl_torch.loader.rng.keys import StreamKey, epoch_seed
from spdl_torch.loader.rng.patches import of_thread


def schemas_with_generator():
    """Every operator of torch that takes a generator, by its full name; but not those that name the
    dimensions of tensors, which newer releases have no more."""
    for schema in torch._C._jit_get_all_schemas():
        names = {argument.name for argument in schema.arguments}
        takes = "generator" in names and "names" not in names
        name = schema.name.removeprefix("aten::")
        if takes and schema.name.startswith("aten::") and not name.startswith("_no_grad_"):
            yield f"{name}.{schema.overload_name}" if schema.overload_name else name, schema


SCHEMAS = dict(schemas_with_generator())
ONES = torch.ones(9)

# Values that suit an argument by its name, where its type says too little.
VALUES = {"size": [4], "replacement": False, "p": 0.5}
VALUES |= dict.fromkeys(("n", "num_samples"), 4) | dict.fromkeys(("low", "from"), 2)
VALUES |= dict.fromkeys(("high", "to"), 9) | dict.fromkeys(("median", "mean"), 0.0)
VALUES |= dict.fromkeys(("sigma", "lambd", "std"), 1.0)


def value_of(argument, schema, device):
    """A value; tensors lie between 0 and 1, where every distribution is defined."""
    if not isinstance(argument.type, torch.TensorType):
        return VALUES[argument.name]
    if argument.name == "high":
        return torch.tensor(9)
    whole = argument.name == "out" and schema.name in ("aten::randperm", "aten::multinomial")
    value = torch.full((4,), 0.5, dtype=torch.int64 if whole else torch.float32, device=device)
    return 20 * value if argument.name == "count" else value


def arguments_of(schema, device):
    """Arguments for one call."""
    args, kwargs = [], {}
    for argument in schema.arguments:
        is_left_out = argument.name == "generator" or argument.default_value is not None
        is_optional = str(argument.type).startswith("Optional") and argument.name not in VALUES
        if argument.name == "training":
            kwargs["training"] = True  # else rrelu draws nothing
        elif argument.name == "device":
            kwargs["device"] = torch.device(device)
        elif argument.kwarg_only and not (is_left_out or is_optional):
            kwargs[argument.name] = value_of(argument, schema, device)
        elif not (is_left_out or is_optional):
            args.append(value_of(argument, schema, device))
    return args, kwargs


def operator(name):
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def call(name, device="cpu", generator=None):
    args, kwargs = arguments_of(SCHEMAS[name], device)
    result = operator(name)(*args, **kwargs, generator=generator)
    return list(result) if isinstance(result, tuple) else [result]


def runs_here(name):
    """Whether the operator has a kernel for the CPU, of its own or made of others."""
    try:
        return bool(call(name, generator=torch.Generator()))
    except NotImplementedError:
        return False


RUNNING = [name for name in SCHEMAS if runs_here(name)]


def test_table_of_operators_is_what_torch_has():
    """Those that have a kernel of their own for the CPU; all others draw through them, as the test
    below shows of each.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert set(dispatch.DRAWING) == {n for n in SCHEMAS if has_kernel(f"aten::{n}", "CPU")}
    assert len(RUNNING) >= 69  # as in torch 2.9, which has the fewest


def on_meta(name, generator):
    """What an operator gives on the device meta, or how it fails: some are not there, and torch
    refuses some generators."""
    try:
        return [(part.device, part.shape, part.dtype) for part in call(name, "meta", generator)]
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        return str(error)


def drawn_by_all(generator=None):
    """What every operator draws, twice, and with a generator of its own; on another device they
    draw nothing from a stream, so that the next one draws what it would."""
    return {
        name: [
            *call(name, generator=generator),
            *call(name, generator=generator),
            *call(name, generator=torch.Generator().manual_seed(5)),
            *(on_meta(name, each) for each in (None, torch.Generator())),
        ]
        for name in RUNNING
    }


def same(ours, theirs):
    tensors = isinstance(ours, torch.Tensor)
    return torch.equal(ours, theirs) if tensors else ours == theirs


@pytest.mark.parametrize("way", ways_of_draws.WAYS)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_operator_draws_from_the_samples_stream(num_workers, way, monkeypatch):
    """The bits are those of a generator with the sample's seed, however draws are led. A generator
    that is named is used; the process's own stands still; other devices are left alone.
    """
    ways_of_draws.take(way, monkeypatch)
    if not num_workers:  # libraries leave threads here, beside which draws are always seen
        monkeypatch.setattr("spdl_torch.loader.rng.streams._others_may_draw", lambda: False)
    options = {"num_workers": num_workers, "isolation": "thread", "generator": torch.Generator()}
    dataset, process = Made(lambda _: drawn_by_all(), 3), torch.get_rng_state()
    key, generator = StreamKey(epoch_seed(7, 0)), torch.Generator()
    loader = DataLoader(dataset, seed=7, collate_fn=list, **options)
    for position, (found,) in enumerate(loader):
        expected = drawn_by_all(generator.manual_seed(key.seed(position)))
        for name, parts in found.items():
            assert all(map(same, parts, expected[name])), name
    assert position == 2
    assert sum(not isinstance(parts[-2], str) for parts in found.values()) > 60
    assert torch.equal(torch.get_rng_state(), process)


def test_torch_without_the_key_loads_in_processes_and_refuses_threads(monkeypatch, caplog):
    """In processes, and on the main thread, samples draw what they would; other threads say what to
    do instead of drawing other numbers.
    """
    # More samples than are made before the key is needed.
    dataset = Made(lambda _: torch.cat([torch.rand(2), functional.dropout(ONES)]), 2_100)
    dataset.thread_safe = True

    def drawn(num_workers, **options):
        return torch.cat(list(DataLoader(dataset, 100, seed=3, num_workers=num_workers, **options)))

    expected = drawn(2)
    monkeypatch.delattr(torch._C, "_dispatch_key_parse")
    assert not dispatch.install(of_thread)
    monkeypatch.setattr("spdl_torch.loader.rng.patches._is_led_by_key", False)
    assert torch.equal(drawn(0), expected)
    caplog.set_level("INFO", "spdl_torch.data")
    assert torch.equal(drawn(2), expected)
    cannot = f"torch {torch.__version__} cannot redirect the random draws of one thread"
    assert f"in 2 processes: {cannot}." in caplog.text
    with ThreadPoolExecutor(1, "there") as other:
        other.submit(int).result()
        assert torch.equal(drawn(0), expected)
        refused = "thread there_0, which is not the main one, makes samples"
        with pytest.raises(RuntimeError, match=refused):
            other.submit(drawn, 0).result()
    refused = 'its workers would be threads: isolation="thread" was given, but '
    with pytest.raises(RuntimeError, match=re.escape(refused + cannot)):
        drawn(2, isolation="thread")


def loaded_inside():
    """What a loader with a worker gives that a sample opens, in an order of its own, and what the
    sample draws after it."""
    numbers = Made(lambda number: torch.rand(2) + number, 4)
    inner = DataLoader(numbers, 2, shuffle=True, num_workers=1, isolation="thread")
    return torch.cat([torch.cat(list(inner)).flatten(), torch.rand(2)])


class Passing(TorchDispatchMode):
    """A mode that does what would be done without it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def drawn_beside_others():
    """What a sample draws into tensors that are there, under a mode, and after it has traced some
    code: tensors without data draw nothing."""
    with FakeTensorMode():
        functional.dropout(torch.rand(9).uniform_())
    with Passing():
        return torch.cat([torch.empty(2).uniform_(), functional.dropout(torch.ones(64))])


def drawn_by_functions():
    """What functions draw that take no generator."""
    drawn = (
        functional.dropout(torch.ones(64)),
        functional.dropout2d(torch.ones(1, 64, 2, 2)),
        functional.alpha_dropout(torch.ones(64), training=True),
        functional.rrelu(-torch.ones(16), training=True),
        functional.gumbel_softmax(torch.zeros(9)),
        functional.scaled_dot_product_attention(*torch.ones(3, 1, 2, 4, 8).unbind(), dropout_p=0.5),
    )
    return torch.cat([each.flatten() for each in drawn])


OUT_OF_SIGHT = {
    "functional": drawn_by_functions,
    "vmap": lambda: torch.vmap(lambda x: x + torch.rand(2), randomness="different")(torch.zeros(3)),
    "compiled": lambda: compiled(backend="aot_eager")(torch.zeros(64)),
    "by inductor": lambda: compiled()(torch.zeros(64)),
    "module": lambda: torch.nn.Linear(3, 2).weight.detach(),
    "scripted": lambda: SCRIPTED(torch.ones(64)),
    "imported by name": lambda: torch.cat([rand_imported_early(2), torch.randn(1)]),
    "loader inside": loaded_inside,
    "beside modes and fake tensors": drawn_beside_others,
}
SCRIPTED = torch.jit.CompilationUnit(
    "def draw(x: Tensor) -> Tensor:\n  return torch.dropout(x, 0.5, True) + torch.rand(64)\n"
).draw


@functools.cache
def compiled(**options):
    """A function, compiled. Not before a test wants it: the compiler is 2 s of imports."""
    with warnings.catch_warnings():  # of torch's own modules, in some releases
        warnings.simplefilter("ignore", DeprecationWarning)
        if options:  # what is compiled of one function's code is kept with it
            return torch.compile(lambda x: functional.dropout(x + 1), **options)
        return torch.compile(lambda x: functional.dropout(x + 1) + torch.rand(64))


NEEDS = {
    "by inductor": (
        pytest.mark.long,
        pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler of C++"),
    )
}
WORKERS = (
    *({"num_workers": 0}, {"num_workers": 0}, {"num_workers": 2}),
    *({"num_workers": number, "isolation": "thread"} for number in (2, 8)),
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=NEEDS.get(n, ())) for n in OUT_OF_SIGHT])
def test_draw_inside_torch_comes_from_the_samples_stream(name):
    """Draws made in C++, by compiled functions and under transformations of functions: the same
    for any number of workers, another for each sample, and none taken from the trainer. (Not while
    a function is compiled: torch does so again for threads with another number of their own, so
    each worker calls it once before.)
    """
    draw, process = OUT_OF_SIGHT[name], torch.get_rng_state()
    draw()
    torch.set_rng_state(process)
    epochs = []
    for workers in WORKERS:
        options = {"seed": 4, "worker_init_fn": lambda _: draw(), **workers}
        epochs.append(torch.cat(list(DataLoader(Drawing(draw, 8), 3, **options))).reshape(8, -1))
        torch.set_rng_state(process)  # what the order took from it
        assert torch.equal(epochs[0], epochs[-1]), workers
    assert torch.equal(torch.get_rng_state(), process)
    assert len(torch.unique(epochs[0], dim=0)) == 8
