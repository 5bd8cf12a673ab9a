"""Every random operator of torch draws from the sample's stream, and from nothing else."""

import functools
import re
import shutil
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import _ways_of_draws
import pytest
import torch
from _datasets import Drawing
from _loader_helpers import run_script
from torch import rand as rand_imported_early
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from spdl_torch import DataLoader
from spdl_torch.loader.rng import dispatch
from spdl_torch.loader.rng.keys import StreamKey
from spdl_torch.loader.rng.streams import SampleStreams

KEY = StreamKey(epoch_seed=1234)


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

# Values that suit an argument by its name, where its type says too little.
VALUES = {
    "size": [4],
    "n": 4,
    "low": 2,
    "high": 9,
    "from": 2,
    "to": 9,
    "num_samples": 4,
    "median": 0.0,
    "sigma": 1.0,
    "lambd": 1.0,
    "p": 0.5,
    "std": 1.0,
    "mean": 0.0,
    "replacement": False,
}


def arguments_of(schema, device):
    """Arguments for one call; tensors lie between 0 and 1, where every distribution is defined."""
    args, kwargs = [], {}
    for argument in schema.arguments:
        if argument.name == "training":
            kwargs["training"] = True  # else rrelu draws nothing
            continue
        if argument.name == "generator" or argument.default_value is not None:
            continue
        if str(argument.type).startswith("Optional") and argument.name not in VALUES:
            continue
        if isinstance(argument.type, torch.TensorType):
            whole = argument.name == "out" and schema.name in (
                "aten::randperm",
                "aten::multinomial",
            )
            value = torch.full((4,), 0.5, dtype=torch.int64 if whole else torch.float32)
            value = {"count": 20 * value, "high": torch.tensor(9)}.get(argument.name, value)
            value = value if argument.name == "high" else value.to(device)
        else:
            value = VALUES[argument.name]
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    if any(argument.name == "device" for argument in schema.arguments):
        kwargs["device"] = torch.device(device)
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
        call(name, generator=torch.Generator())
    except NotImplementedError:
        return False
    return True


RUNNING = [name for name in SCHEMAS if runs_here(name)]


def same(ours, theirs):
    return all(map(torch.equal, ours, theirs))


def test_table_of_operators_is_what_torch_has():
    """Those that have a kernel of their own for the CPU; all others draw through them, as the test
    below shows of each.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert set(dispatch.DRAWING) == {n for n in SCHEMAS if has_kernel(f"aten::{n}", "CPU")}
    assert len(RUNNING) >= 69  # as in torch 2.9, which has the fewest


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """The streams take the program for one without other threads: libraries leave some here."""
    monkeypatch.setattr("spdl_torch.loader.rng.streams._others_may_draw", lambda: False)


def drawn_by_samples(streams, draw):
    """What three samples of a batch draw, one after another."""
    with streams:
        streams.begin(KEY, 10)
        drawn = [draw() for _ in streams.over(iter([0, 1, 2]), 3)]
        streams.at_collate()
        return drawn


@pytest.mark.parametrize(
    ("name", "way"), [(n, "key") for n in RUNNING] + [(n, "unseen") for n in RUNNING[::8]]
)
def test_operator_draws_from_the_samples_stream(name, way, monkeypatch):
    """Watched and seeded, the bits are those of a generator with the sample's seed. A generator
    that is named is used; the process's own stands still; other devices are left alone.
    """
    _ways_of_draws.take(way, monkeypatch)
    expected = []
    for position in range(3):
        generator = torch.Generator().manual_seed(KEY.seed(10 + position))
        expected.append(call(name, generator=generator) + call(name, generator=generator))
    seeding, watching, process = SampleStreams(0), SampleStreams(0), torch.get_rng_state()
    drawn_by_samples(watching, lambda: None)  # nothing: from now on it watches for draws
    modes = []
    for streams in (seeding, seeding, watching):
        seeds = []

        def draw(seeds=seeds):
            seeds.append(torch.default_generator.initial_seed())
            return call(name) + call(name)

        assert all(map(same, drawn_by_samples(streams, draw), expected))
        modes.append(seeds == [KEY.seed(10 + position) for position in range(3)])
    assert modes[0], "the generator of the process was borrowed"
    assert modes[-1] is (way == "unseen"), "or draws were seen"
    again, watching = call(name, generator=torch.Generator().manual_seed(5)), SampleStreams(0)
    drawn_by_samples(watching, lambda: None)
    for named in drawn_by_samples(
        watching, lambda: call(name, generator=torch.Generator().manual_seed(5))
    ):
        assert same(named, again)
    assert torch.equal(torch.get_rng_state(), process)


class Counting(SampleStreams):
    """Streams that count how often a generator was asked for."""

    num_asked = 0

    def generator(self):
        self.num_asked += 1
        return super().generator()


def on_meta(name, generator):
    """What an operator gives on the device meta, or how it fails: some are not there, and torch
    refuses some generators."""
    try:
        return [(part.device, part.shape, part.dtype) for part in call(name, "meta", generator)]
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        return str(error)


def test_operators_on_another_device_are_left_alone():
    """What does not draw on the CPU goes on as it came, with a generator or without: no stream is
    asked for one.
    """
    streams, num_there = Counting(0), 0
    for name in RUNNING:
        for generator in (None, torch.Generator()):
            expected = on_meta(name, generator)
            with streams:
                assert on_meta(name, generator) == expected, name
        num_there += isinstance(on_meta(name, None), list)
    assert num_there > 60
    assert streams.num_asked == 0


@functools.cache
def loaded_by_torch(lacks):
    """What a program prints whose torch lacks a name, or none: batches and refusals."""
    program = """
        import logging, os, torch
        from concurrent.futures import ThreadPoolExecutor
        from functools import partial
        lacks = os.environ["LACKS"]
        if lacks:
            holder, _, last = lacks.rpartition(".")
            delattr(eval(holder), last)

        class Drawing(torch.utils.data.Dataset):
            thread_safe = True

            def __len__(self):
                return 2_100  # more than are made before the key is needed

            def __getitem__(self, index):
                return torch.cat([torch.rand(2), torch.dropout(torch.ones(9), 0.5, True)])

            def loader(self, num_workers, isolation="auto"):
                return DataLoader(
                    self, 100, seed=3, num_workers=num_workers, isolation=isolation,
                    multiprocessing_context="fork" if num_workers else None,
                )

        def drawn(num_workers, isolation="auto"):
            batches = [*Drawing().loader(num_workers, isolation), torch.rand(2)]
            return hash(tuple(number for b in batches for number in b.flatten().tolist()))

        def beside_a_thread():
            with ThreadPoolExecutor(1) as other:
                other.submit(int).result()
                return drawn(0)

        def there():
            with ThreadPoolExecutor(1, "there") as other:
                return other.submit(drawn, 0).result()

        ways = [partial(drawn, 0), partial(drawn, 2), partial(drawn, 2, "process")]
        ways += [partial(drawn, 0), beside_a_thread, partial(drawn, 2, "thread"), there]
        torch.manual_seed(1)
        process = torch.get_rng_state()
        logging.basicConfig(format="%(message)s", level=logging.INFO)
        for draw in ways:
            torch.set_rng_state(process)
            try:
                print(draw())
            except RuntimeError as error:
                print(error)
    """
    return run_script(program, ends_whole=False, LACKS=lacks)


def test_torch_without_the_key_loads_in_processes_and_refuses_threads():
    """In processes, and on the main thread, samples draw what they would; other threads say what to
    do instead of drawing other numbers.
    """
    whole, without = loaded_by_torch(""), loaded_by_torch("torch._C._dispatch_key_parse")
    *before, threads, there = without.stdout.splitlines()
    assert before == whole.stdout.splitlines()[:5]
    assert len(set(whole.stdout.splitlines())) == 1
    cannot = f"torch {torch.__version__} cannot redirect the random draws of one thread"
    assert re.fullmatch(
        r'DataLoader: its workers would be threads: isolation="thread" was given, but '
        rf"{re.escape(cannot)}, .*",
        threads,
    )
    assert there.startswith("DataLoader: thread there_0, which is not the main one, makes samples")
    assert f"in 2 processes: {cannot}." in without.stderr
    assert "on 2 threads of the training process: Drawing says thread_safe = True." in whole.stderr


def loaded_inside():
    """What a loader with a worker draws that a sample opens, and what the sample draws after it."""
    inner = DataLoader(Drawing(lambda: torch.rand(2), 4), 2, num_workers=1, isolation="thread")
    return torch.cat([torch.cat(list(inner)).flatten(), torch.rand(2)])


def drawn_beside_fakes():
    """What a sample draws that has also traced some code: tensors without data draw nothing."""
    first = torch.rand(1)
    with FakeTensorMode():
        functional.dropout(torch.rand(9).uniform_())
    return torch.cat([first, torch.rand(1)])


class Passing(TorchDispatchMode):
    """A mode that does what would be done without it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def drawn_under_a_mode():
    """What operators draw that write into a tensor which is there."""
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
    "beside fake tensors": drawn_beside_fakes,
    "under a mode": drawn_under_a_mode,
}
SCRIPTED = torch.jit.CompilationUnit(
    "def draw(x: Tensor) -> Tensor:\n  return torch.dropout(x, 0.5, True) + torch.rand(64)\n"
).draw


@functools.cache
def compiled(**options):
    """A function, compiled. Not before a test wants it: the compiler is 2 s of imports."""
    with warnings.catch_warnings():  # of torch's own modules, in some releases
        warnings.simplefilter("ignore", DeprecationWarning)
        if options:
            return torch.compile(lambda x: functional.dropout(x + 1), **options)
        return torch.compile(lambda x: functional.dropout(x + 1) + torch.rand(64))


NEEDS = {
    "by inductor": (
        pytest.mark.long,
        pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler of C++"),
    )
}


WORKERS = (
    *({"num_workers": 0}, {"num_workers": 0}),
    *({"num_workers": number, "isolation": "thread"} for number in (2, 8)),
    {"num_workers": 2},
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


@pytest.mark.parametrize("num_workers", [0, 2])
def test_error_in_the_middle_of_an_epoch_leaves_streams_and_trainer_alone(num_workers):
    """The batches before it, and those of the next epoch, are what they would have been."""
    bad = []

    def draw():
        drawn = torch.rand(2)
        if drawn.tolist() in bad:
            raise ValueError("bad sample")
        return drawn

    def loader():
        return DataLoader(
            Drawing(draw, 8), 2, seed=4, num_workers=num_workers, isolation="thread", rng="sample"
        )

    whole = loader()
    expected = [*whole, *whole]
    bad.append(expected[2][1].tolist())
    failing, got, process = loader(), [], torch.get_rng_state()
    with pytest.raises(ValueError, match="bad sample"):
        got.extend(iter(failing))
    assert len(got) == 2
    torch.set_rng_state(process)
    assert same([*got, *failing], [*expected[:2], *expected[4:]])
    assert not dispatch.is_led()


def test_thread_that_user_code_starts_draws_from_the_process():
    """It is not a thread of the loader's: on one of those, its draws are not the sample's."""
    numbers = []

    def draw():
        thread = threading.Thread(target=lambda: numbers.append(torch.rand(1).item()))
        thread.start()
        thread.join()
        return [torch.rand(1)]

    expected = drawn_by_samples(SampleStreams(0), lambda: [torch.rand(1)])
    torch.manual_seed(3)
    with ThreadPoolExecutor(1) as loaders_thread:
        drawn = loaders_thread.submit(drawn_by_samples, SampleStreams(0), draw).result()
    assert all(map(same, drawn, expected))
    assert numbers == torch.rand(3, generator=torch.Generator().manual_seed(3)).tolist()
