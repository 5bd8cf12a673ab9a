"""PerfParams: the formula, what is read from the machine, what is measured, and its use."""

import logging
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from torch.utils.data import DataLoader as TorchDataLoader, IterableDataset

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.autotune import Limits, PerfParams
from spdl_torch.io import transfer_tensor
from spdl_torch.machine.limits import read_limits
from spdl_torch.pipeline import PipelineBuilder

MIB = 2**20


@pytest.mark.parametrize(
    ("num_cores", "ranks", "util", "workers"),
    [(100, 1, 0.29, 29), (16, 4, 1.0, 4), (1.5, 1, 1.0, 1), (2, 1, 0.4, 1), (0.5, 8, 0.4, 1)],
)
def test_workers_are_a_share_of_this_ranks_cores(num_cores, ranks, util, workers):
    """Rounded down, at least one."""
    options = {"num_cores": num_cores, "local_world_size": ranks, "cpu_util": util}
    params, _ = estimate([1], element_bytes=100, batch_size=32, **options)
    assert (params.num_workers, params.prefetch_factor) == (workers, 2)


@pytest.mark.parametrize(
    ("batches", "expected"),
    [(13, (4, 2)), (12.99, (4, 1)), (8.99, (3, 1)), (5, (2, 1)), (4, (1, 2)), (0, (1, 1))],
)
def test_batches_in_flight_fit_into_memory(batches, expected):
    """Less memory has first fewer of them ahead, then fewer workers; to 1 and 1."""
    options = {"num_cores": 4, "memory_bytes": int(3200 * batches)}
    params, text = estimate([1], element_bytes=100, batch_size=32, **options)
    assert (params.num_workers, params.prefetch_factor) == expected
    assert ("in flight: at most 9,600 bytes, more than that: one thread" in text) is (batches == 0)


def pipeline_of(stages, sink):
    """Stages of the given elements, concurrency and room; None = to be found."""
    plain, length = PipelineBuilder().add_source([1]), 1
    for number, (elements, concurrency, room) in enumerate(stages):
        if elements > length:
            plain.aggregate(elements // length)
            length = elements // length * length
        plain.pipe(abs, name=f"s{number}", concurrency=concurrency or 1, buffer_size=room)
    return plain.add_sink(sink)


shapes = st.lists(
    st.tuples(
        st.sampled_from([1, 4, 32]),
        st.none() | st.integers(2, 64),
        st.none() | st.integers(1, 200),
    ),
    max_size=4,
)


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(0, 2**36), st.integers(1, 10 * MIB), shapes)
def test_pipeline_stays_within_memory_and_grows_with_it(most, memory, element, stages):
    """Above the floor of 1 and 1; what was given is kept; more memory, more threads; room is no
    more than helps: twice the threads at either side, or 64 small items.
    """
    plain = pipeline_of(stages, 3)

    def found(most, memory):
        return estimate(plain, num_cores=most, memory_bytes=memory, element_bytes=element)

    params, text = found(most, memory)
    threads = max(params.concurrency.values(), default=1)
    assert 1 <= threads <= most
    assert all(1 <= room <= max(64, 2 * most, 128) for room in params.buffer_size.values())
    if "more than that" in text:
        assert threads == 1
        assert set(params.buffer_size.values()) <= {1}
    richer, _ = found(most, 2 * memory + 1)
    assert max(richer.concurrency.values(), default=1) >= threads


def tree(root, files=""):
    """A machine with 4000 kB of free memory, and these files: in a line a name and the content."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  4000 kB\n")
    for line in files.splitlines():
        name, _, text = line.strip().partition(" ")
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text.replace("|", "\n") + "\n")
    return root


FREE = 4000 * 1024
MACHINES = {
    "bare": ("", 8, FREE),
    "v2": (
        """proc/self/cgroup 0::/job/inner
        sys/fs/cgroup/job/cpu.max 150000 100000
        sys/fs/cgroup/job/inner/cpu.max max 100000
        sys/fs/cgroup/job/inner/memory.max 3000000
        sys/fs/cgroup/job/inner/memory.current 2500000
        sys/fs/cgroup/job/inner/memory.stat anon 1|inactive_file 500000
        sys/fs/cgroup/job/memory.max max""",
        *(1.5, 1_000_000),
    ),
    "v1": (
        """proc/self/cgroup 7:cpu,cpuacct:/docker/3f|4:memory:/docker/3f|1:pids:/|0::/
        sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us 200000
        sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us 100000
        sys/fs/cgroup/memory/memory.limit_in_bytes 2000000
        sys/fs/cgroup/memory/memory.usage_in_bytes 1900000
        sys/fs/cgroup/memory/memory.stat inactive_file 7|total_inactive_file 100000""",
        *(2, 200_000),
    ),
    "v1 without limits": (
        """proc/self/cgroup 7:cpu,cpuacct:/|4:memory:/
        sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us -1
        sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us 100000
        sys/fs/cgroup/memory/memory.limit_in_bytes 9223372036854771712
        sys/fs/cgroup/memory/memory.usage_in_bytes 1900000""",
        *(8, FREE),
    ),
    "more quota than cores, and full": (
        """proc/self/cgroup |nonsense|0::/
        sys/fs/cgroup/cpu.max 6400000 100000
        sys/fs/cgroup/memory.max 1000
        sys/fs/cgroup/memory.current 1200""",
        *(8, 0),
    ),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_limits_are_the_tightest_of_machine_and_cgroups(machine, tmp_path):
    """Both versions, also when a limit stands further out or the name is that of the host. The
    number of ranks is torchrun's LOCAL_WORLD_SIZE, or one."""
    files, cores, memory = MACHINES[machine]
    root = tree(tmp_path, files)
    for value, ranks in (("4", 4), ("", 1), ("0", 1), ("many", 1)):
        limits = read_limits(root, 8, {"LOCAL_WORLD_SIZE": value})
        expected = Limits(num_cores=cores, memory_bytes=memory, local_world_size=ranks)
        assert limits == expected


def test_limits_of_this_machine_and_of_one_without_proc(tmp_path):
    """At least a part of a core. Other systems tell pages, or nothing; never an error."""
    for limits in (Limits.of_this_machine(), read_limits(tmp_path, 4, {})):
        assert limits.num_cores > 0
        assert limits.memory_bytes is None or limits.memory_bytes > MIB


@dataclass
class Sample:
    """A user's own."""

    image: torch.Tensor
    label: int


ENDLESS = [b"123"]
ENDLESS.append(ENDLESS)


SIZES = [
    *[(ENDLESS, 3), (memoryview(b"12345"), 5), ("label", 5), (7, 8), (np.zeros((3, 4)), 96)],
    (torch.zeros(3, 4, dtype=torch.int16), 24),
    ((torch.zeros(2), {"a": [b"123", 1.5, []], "b": None}), 19),
    (Sample(torch.zeros(5), 3), 28),
    (Image.new("RGB", (4, 5)), 60),
]


class Growing:
    """Sample n has n numbers, each drawn at random; knows what was asked for, and by whom."""

    def __init__(self, length=100, bad=()):
        self.length, self.bad = length, bad
        self.asked = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.asked.append(index)
        assert threading.current_thread() is threading.main_thread()
        if index in self.bad:
            raise OSError(f"cannot read {index}")
        random.random(), np.random.rand()  # as augmentations do
        return torch.rand(index, dtype=torch.float64), index


class ZerosStream(IterableDataset):
    """Like it, without places."""

    def __iter__(self):
        return iter([torch.zeros(n, dtype=torch.uint8) for n in range(1000)])


def estimate(target, **options):
    """On a machine of 10 cores and 100 MiB, all of which may be used; and the text."""
    texts = []
    machine = {"num_cores": 10, "memory_bytes": 100 * MIB, "local_world_size": 1}
    shares = {"cpu_util": 1.0, "memory_util": 1.0}
    params = PerfParams.estimate(target, **{**machine, **shares, "write": texts.append, **options})
    (text,) = texts
    return params, text


@pytest.mark.parametrize(
    ("target", "found"),
    [
        (Growing(), "536 bytes (the largest of 3 samples)"),
        (Growing(2), "16 bytes (the largest of 2 samples)"),
        (Growing(bad=[66]), "272 bytes (the largest of 2 samples)"),
        (ZerosStream(), "2 bytes (the largest of 3 samples)"),
        *(([b"1", each], f"{nbytes} bytes (the largest of 2 samples)") for each, nbytes in SIZES),
    ],
)
def test_element_is_measured_on_samples(target, found):
    """Evenly chosen where there are places; the samples measured are reported. Nested containers
    are looked through."""
    _, text = estimate(target)
    assert f"element: {found}, 1 in a batch" in text.splitlines()


def test_random_numbers_are_as_before_when_samples_were_measured():
    """An estimate does not change what training draws; with a size nothing is loaded."""
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    dataset = Growing()
    params, text = estimate(dataset, element_bytes=MIB, batch_size=4)
    assert dataset.asked == []
    assert params == PerfParams.manual(num_workers=10, prefetch_factor=1)
    assert "element: 1,048,576 bytes (given), 4 in a batch" in text
    assert "in flight: at most 84.0 MiB" in text
    estimate(dataset)
    assert dataset.asked == [0, 33, 66]
    assert (torch.rand(1), random.random(), np.random.rand()) == expected


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (Growing(0), "there is no sample"),
        (Growing(bad=range(100)), r"no sample could be loaded \(OSError: cannot read 66\)"),
        ([(1, object())], "a sample has a object in it, whose size is not known"),
        (iter([1]), "the dataset, a list_iterator, is an iterator, which runs once"),
    ],
)
def test_estimate_warns_when_the_size_is_not_known(target, reason):
    """Cores alone decide then, and torch's own prefetch_factor is kept."""
    with pytest.warns(UserWarning, match=f"no bound: {reason}. Pass element_bytes"):
        params, text = estimate(target)
    assert params == PerfParams.manual(num_workers=10, prefetch_factor=2)
    assert "element: not known" in text
    assert "in flight" not in text


def test_every_figure_is_printed_or_logged(capsys, caplog):
    """With its origin and its effect, on stdout by default; else at INFO level, of the logger that
    has the package's name."""
    machine = {"num_cores": 16, "memory_bytes": 64 * MIB, "local_world_size": 2}
    options = {"batch_size": 2, "cpu_util": 0.5, "memory_util": 0.5, **machine}
    PerfParams.estimate(Growing(), **options)
    assert capsys.readouterr().out.splitlines() == [
        "cores: 16 * 0.5 / 2 ranks -> threads: 4",
        "memory: 64.0 MiB * 0.5 / 2 ranks -> 16.0 MiB",
        "element: 536 bytes (the largest of 3 samples), 2 in a batch",
        "in flight: at most 13,936 bytes",
        "PerfParams.manual(num_workers=4, prefetch_factor=2)",
    ]
    with caplog.at_level(logging.INFO, "spdl_torch.autotune"):
        PerfParams.estimate([b"x"], write=None)
    assert "PerfParams.manual(num_workers=" in caplog.text
    assert capsys.readouterr().out == ""


names = st.text(min_size=1, max_size=5) | st.sampled_from(
    ["decode", "class", "cls", "\u00aa", "__debug__"]
)
counts = st.dictionaries(names, st.integers(1, 99), max_size=3)


@settings(max_examples=10)
@given(
    concurrency=counts,
    buffer_size=counts,
    num_workers=st.none() | st.integers(0, 9),
    number=st.none() | st.integers(1, 9),
)
def test_repr_can_be_pasted(concurrency, buffer_size, num_workers, number):
    """It is the call of manual() that gives the same, whatever the stages are called."""
    options = {"num_workers": num_workers, "prefetch_factor": number, "num_threads": number}
    params = PerfParams.manual(concurrency, buffer_size=buffer_size, **options)
    assert eval(repr(params), {"PerfParams": PerfParams}) == params


def test_manual_takes_names_and_one_size_for_all():
    """The short form and the long one mean the same."""
    short = PerfParams.manual(decode=12, collate=2, buffer_size=24)
    assert short == PerfParams.manual(
        {"decode": 12}, collate=2, buffer_size={"decode": 24, "collate": 24}
    )
    assert repr(PerfParams.manual(decode=12)) == "PerfParams.manual(decode=12)"
    assert repr(PerfParams.manual({"<lambda>": 2})) == "PerfParams.manual({'<lambda>': 2})"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PerfParams.manual(decode=0), "concurrency of 'decode' must be >= 1"),
        (lambda: PerfParams.manual(decode="4"), "must be an int or None, got '4'"),
        (lambda: PerfParams.manual(num_workers=-1), "num_workers must be >= 0 or None, got -1"),
        (lambda: PerfParams.manual(num_threads=True), "num_threads must be an int"),
        (lambda: PerfParams.manual({"a": 1}, a=2), "stage 'a' is given twice"),
        (lambda: estimate([1], cpu_util=40), "cpu_util must be a share .* got 40"),
        (lambda: estimate([1], memory_util=0), "memory_util must be a share"),
        (lambda: estimate([1], batch_size=0), "batch_size must be >= 1 or None, got 0"),
        (lambda: estimate([1], element_bytes=1.5), "element_bytes must be an int"),
        (lambda: estimate([1], num_cores=0), "num_cores must be > 0, got 0"),
        (lambda: estimate([1], local_world_size=0), "local_world_size must be >= 1"),
        (lambda: estimate([1], memory_bytes=-1), "memory_bytes must be >= 0 or None, got -1"),
        (lambda: estimate([1], keep=["a"]), "keep is for a PipelineBuilder, got"),
        (lambda: estimate(builder(), keep=["x"]), "keep must name stages of the pipeline, got 'x'"),
        (lambda: estimate(builder(), batch_size=4), "must be None for a pipeline"),
        (lambda: estimate(7), "a DataLoader or a PipelineBuilder, got int"),
        (lambda: estimate(PipelineDataset(builder())), "got a PipelineDataset"),
        (lambda: PerfParams.manual(decode=2).loader_options(), "num_workers must be given, got No"),
        # A name that does not exist is an error that lists those that do.
        (
            lambda: PerfParams.manual(decod=2).apply(builder()),
            "no stage 'decod'; it has 'read', 'parse', 'decode', 'agg",
        ),
        (lambda: PerfParams.manual(buffer_size={"x": 2}).apply(builder()), "no stage 'x'"),
        (
            lambda: PerfParams.manual({"aggregate(4)": 2}).apply(builder()),
            "must be 1, got 2. An aggregate collects one",
        ),
    ],
)
def test_argument_is_refused_when_it_cannot_be_meant(make, message):
    """The message has the argument's name and what was given."""
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.parametrize("loader_class", [DataLoader, TorchDataLoader])
def test_loader_is_asked_for_its_dataset_and_its_batch_size(loader_class):
    """Or for its batch sampler's: the loader itself says None then. What is given counts."""
    dataset = [torch.full((3,), n) for n in range(20)]
    params, text = estimate(loader_class(dataset, batch_size=4), num_cores=2)
    assert "element: 24 bytes (the largest of 3 samples), 4 in a batch" in text
    assert params.loader_options() == {"num_workers": 2, "prefetch_factor": 2}
    sampler = torch.utils.data.BatchSampler(range(20), batch_size=5, drop_last=False)
    for options, expected in (({}, 5), ({"batch_size": 7}, 7)):
        _, text = estimate(loader_class(dataset, batch_sampler=sampler), **options)
        assert text.splitlines()[2].endswith(f"{expected} in a batch")


def test_loader_options_are_what_torch_takes():
    """It refuses a prefetch_factor without workers. Those for a pipeline are refused: with an empty
    dict everything would be loaded on the training thread."""
    options = PerfParams.manual(num_workers=0, prefetch_factor=4).loader_options()
    assert options == {"num_workers": 0}
    assert PerfParams.manual(num_workers=2).loader_options() == {"num_workers": 2}


def decode(number):
    return torch.full((1000,), number, dtype=torch.uint8)


def pairs(number):
    yield from (number, number)


def builder():
    """A pipeline with one of each."""
    plain = PipelineBuilder().add_source(range(40)).pipe(str, name="read", concurrency=5)
    plain.pipe(int, name="parse").pipe(decode, buffer_size=7).aggregate(4)
    return plain.pipe(torch.stack).add_sink(2)


def test_pipeline_gives_the_same_when_it_was_estimated():
    """In the same order, though stages run several calls at once."""
    plain = builder()
    params, text = estimate(plain, num_cores=3)
    assert params.concurrency == {"parse": 3, "decode": 3, "stack": 3}
    assert params.buffer_size == {"read": 64, "parse": 64, "aggregate(4)": 64, "stack": 64}
    assert params.build_options() == {"num_threads": 3 + 5 + 1}
    assert "element: 1,000 bytes (the largest of 3 samples)" in text
    spec = params.apply(plain).get_config()
    assert [stage.concurrency for stage in spec.pipes] == [5, 3, 3, 1, 3]
    assert [stage.buffer_size for stage in spec.pipes] == [64, 64, 7, 64, 64]
    assert spec.pipes[0].output_order == "completion"  # as it was: not in order
    assert spec.pipes[1].output_order == "input"
    applied = params.apply(PipelineBuilder.from_config(spec))
    with (pipeline := applied.build(**params.build_options())).auto_stop():
        found = torch.cat([batch[:, 0] for batch in pipeline])
        assert sorted(found.tolist()) == list(range(40))


def test_stages_are_left_as_they_are_when_they_must_be():
    """Generators, coroutines, executors, transfers, given threads, those that are to be kept, and
    those of one name.
    """

    async def fetch(item):
        return item

    with ThreadPoolExecutor(1) as executor:
        plain = PipelineBuilder().add_source(range(4)).pipe(pairs).pipe(fetch)
        plain.pipe(str, name="elsewhere", executor=executor).pipe(int, name="given", concurrency=2)
        for name in ("kept", "free", "twin", "twin"):
            plain.pipe(abs, name=name)
        plain.pipe(partial(transfer_tensor, device="cpu"), name="send").add_sink()
        params, text = estimate(plain, keep=["kept"])
        assert params.concurrency == {"free": 10}
        assert params.num_threads == 10 + 1 + 2 + 1 + 2 + 1
        assert "element: 8 bytes" in text
        with params.apply(plain).build(**params.build_options()).auto_stop() as pipeline:
            assert sorted(pipeline) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_aggregates_count_by_their_elements_until_they_are_taken_apart():
    """Room for 64 MiB of elements of 1 MiB: lists of 8 have less of it."""
    plain = PipelineBuilder().add_source([bytes(MIB)] * 2).pipe(bytes, name="a").aggregate(8)
    plain.disaggregate().pipe(bytes, name="b").add_sink(1)
    params, text = estimate(plain, num_cores=2, memory_bytes=2**40)
    assert params.buffer_size == {"a": 16, "aggregate(8)": 2, "disaggregate": 16, "b": 16}
    assert "in flight: at most 92.0 MiB" in text


def test_pipelines_size_is_not_known_where_the_source_or_the_last_form_tells_none():
    """No item of a source that can be iterated only once is lost to measuring; a short path says
    nothing of the packets that were read from it."""
    plain = PipelineBuilder().add_source(iter(range(5))).pipe(abs).add_sink()
    with pytest.warns(UserWarning, match="the source, a range_iterator, is an iterator"):
        params, _ = estimate(plain)
    with params.apply(plain).build().auto_stop() as pipeline:
        assert list(pipeline) == [0, 1, 2, 3, 4]
    plain = PipelineBuilder().add_source(["a.mp4"]).pipe(lambda path: object(), name="demux")
    with pytest.warns(UserWarning, match="has a object in it"):
        estimate(plain.aggregate(2).add_sink())
