"""PerfParams: the formula, what is read from the machine, what is measured, and its use."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import make_dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader, IterableDataset

from spdl_torch import DataLoader
from spdl_torch.autotune import Limits, PerfParams
from spdl_torch.io import transfer_tensor
from spdl_torch.machine.limits import read_limits
from spdl_torch.pipeline import PipelineBuilder

MIB = 2**20


@pytest.fixture
def estimate(monkeypatch, capsys):
    """On a machine of these cores, MiB and ranks, all of which may be used; and what is printed."""

    def found(target, num_cores=10, memory_bytes=100 * MIB, local_world_size=1, **options):
        machine = {"num_cores": num_cores, "memory_bytes": memory_bytes}
        limits = Limits(**machine, local_world_size=local_world_size)
        monkeypatch.setattr(Limits, "of_this_machine", lambda: limits)
        params = PerfParams.estimate(target, **{"cpu_util": 1.0, "memory_util": 1.0, **options})
        return params, capsys.readouterr().out

    return found


@pytest.mark.parametrize(
    ("num_cores", "ranks", "util", "workers"),
    [(100, 1, 0.29, 29), (16, 4, 1.0, 4), (1.5, 1, 1.0, 1), (2, 1, 0.4, 1), (0.5, 8, 0.4, 1)],
)
def test_workers_are_a_share_of_this_ranks_cores(num_cores, ranks, util, workers, estimate):
    """Rounded down, at least one."""
    options = {"num_cores": num_cores, "local_world_size": ranks, "cpu_util": util}
    params, _ = estimate([b"x"], batch_size=32, **options)
    assert (params.num_workers, params.prefetch_factor) == (workers, 2)


@pytest.mark.parametrize(
    ("batches", "expected"),
    [(13, (4, 2)), (12.99, (4, 1)), (8.99, (3, 1)), (5, (2, 1)), (4, (1, 2)), (0, (1, 1))],
)
def test_batches_in_flight_fit_into_memory(batches, expected, estimate):
    """Less memory has first fewer of them ahead, then fewer workers; to 1 and 1."""
    options = {"num_cores": 4, "memory_bytes": int(3200 * batches)}
    params, text = estimate([bytes(100)], batch_size=32, **options)
    assert (params.num_workers, params.prefetch_factor) == expected
    assert f" of {int(3200 * batches):,} bytes in flight, 100 an element: PerfParams(" in text


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


class Growing:
    """Sample n has n numbers, each drawn at random; knows what was asked for."""

    def __init__(self, length=100, bad=()):
        self.length, self.bad = length, bad
        self.asked = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.asked.append(index)
        if index in self.bad:
            raise OSError(f"cannot read {index}")
        random.random(), np.random.rand()  # as augmentations do
        return torch.rand(index, dtype=torch.float64), index


class ZerosStream(IterableDataset):
    """Like it, without places."""

    def __iter__(self):
        return iter([torch.zeros(n, dtype=torch.uint8) for n in range(1000)])


@pytest.mark.parametrize(
    ("target", "nbytes"),
    [
        *((Growing(), 552), (Growing(2), 16), (ZerosStream(), 2)),
        *(([memoryview(b"12345")], 5), (["label"], 5), ([7], 8), ([np.zeros((3, 4))], 96)),
        ([torch.zeros(3, 4, dtype=torch.int16)], 24),
        ([(torch.zeros(2), {"a": [b"123", 1.5, []], "b": None})], 19),
        ([make_dataclass("Pair", ["a", "b"])({b"12", b"345"}, torch.zeros(2))], 13),
    ],
)
def test_element_is_measured_on_samples(target, nbytes, estimate):
    """Evenly chosen where there are places. Nested containers are looked through."""
    _, text = estimate(target)
    assert f"bytes in flight, {nbytes} an element" in text


def test_random_numbers_are_as_before_when_samples_were_measured(estimate):
    """An estimate does not change what training draws."""
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    dataset = Growing()
    estimate(dataset)
    assert dataset.asked == [0, 34, 68]
    assert (torch.rand(1), random.random(), np.random.rand()) == expected


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (Growing(0), "there is no sample"),
        (Growing(bad=[34]), "OSError: cannot read 34"),
        ([(1, object())], "TypeError: the size of a object is not known"),
        (iter([1]), "TypeError: a list_iterator is an iterator, which runs once"),
    ],
)
def test_estimate_says_when_the_size_is_not_known(target, reason, estimate):
    """Cores alone decide then, and torch's own prefetch_factor is kept."""
    params, text = estimate(target)
    assert params == PerfParams.manual(num_workers=10, prefetch_factor=2)
    found = f"10 of 10 cores, memory sets no bound ({reason}): {params}"
    assert text == f"PerfParams.estimate: {found}\n"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: applied({"decode": 0}), "stage 'decode': concurrency must be >= 1, got 0"),
        (lambda: PerfParams.estimate([1], cpu_util=40), "cpu_util must be above 0, .* got 40"),
        (lambda: PerfParams.estimate([1], batch_size=0), "batch_size must be >= 1 or None, got 0"),
        (lambda: PerfParams.estimate(builder(), batch_size=4), "must be None for a pipeline"),
        (lambda: PerfParams.estimate(5), "expected a dataset, .* got int"),
        (lambda: PerfParams.manual().loader_options(), "num_workers must be given, got None"),
        (lambda: applied({"decod": 2}), "no stage 'decod'; it has 'read', 'parse', 'decode', 'agg"),
    ],
)
def test_argument_is_refused_when_it_cannot_be_meant(make, message):
    """The message has the argument's name and what was given."""
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.parametrize("loader_class", [DataLoader, TorchDataLoader])
def test_loader_is_asked_for_its_dataset_and_its_batch_size(loader_class, estimate):
    """Or for its batch sampler's: the loader itself says None then. What is given counts. Options
    are what torch takes: it refuses a prefetch_factor without workers."""
    dataset = [torch.full((3,), n) for n in range(20)]
    params, text = estimate(loader_class(dataset, batch_size=4), num_cores=2)
    assert "24 an element" in text
    assert params.loader_options() == {"num_workers": 2, "prefetch_factor": 2}
    alone = PerfParams.manual(num_workers=0, prefetch_factor=4)
    assert alone.loader_options() == {"num_workers": 0}
    sampler = torch.utils.data.BatchSampler(range(20), batch_size=5, drop_last=False)
    for options, expected in (({}, 5), ({"batch_size": 7}, 7)):
        _, text = estimate(loader_class(dataset, batch_sampler=sampler), num_cores=2, **options)
        assert f"{24 * expected * 7:,} of" in text


def applied(concurrency):
    """A pipeline with these concurrencies."""
    return PerfParams.manual(concurrency=concurrency).apply(builder())


def decode(number):
    return torch.full((1000,), number, dtype=torch.uint8)


def pairs(number):
    yield from (number, number)


def builder():
    """A pipeline with one of each."""
    plain = PipelineBuilder().add_source(range(40)).pipe(str, name="read", concurrency=5)
    plain.pipe(int, name="parse").pipe(decode, buffer_size=7).aggregate(4)
    return plain.pipe(torch.stack).add_sink(2)


def test_pipeline_gives_the_same_when_it_was_estimated(estimate):
    """In the same order, though stages run several calls at once."""
    plain = builder()
    params, text = estimate(plain, num_cores=3)
    assert params.concurrency == {"parse": 3, "decode": 3, "stack": 3}
    assert params.buffer_size == {"read": 6, "parse": 6, "aggregate(4)": 6, "stack": 6}
    assert params.build_options() == {"num_threads": 3 + 5 + 1}
    assert "1,000 an element" in text
    spec = params.apply(plain).get_config()
    assert [stage.concurrency for stage in spec.pipes] == [5, 3, 3, 1, 3]
    assert [stage.buffer_size for stage in spec.pipes] == [6, 6, 7, 6, 6]
    assert spec.pipes[0].output_order == "completion"  # as it was: not in order
    assert spec.pipes[1].output_order == "input"
    applied = params.apply(PipelineBuilder.from_config(spec))
    found = torch.cat([batch[:, 0] for batch in applied.build(**params.build_options())])
    assert sorted(found.tolist()) == list(range(40))


def test_stages_are_left_as_they_are_when_they_must_be(estimate):
    """Generators, coroutines, executors, transfers, given threads, and those of one name."""

    async def fetch(item):
        return item

    with ThreadPoolExecutor(1) as executor:
        plain = PipelineBuilder().add_source(range(4)).pipe(pairs).pipe(fetch)
        plain.pipe(str, name="elsewhere", executor=executor).pipe(int, name="given", concurrency=2)
        for name in ("free", "twin", "twin"):
            plain.pipe(abs, name=name)
        plain.pipe(partial(transfer_tensor, device="cpu"), name="send").add_sink()
        params, text = estimate(plain)
        assert params.concurrency == {"free": 10}
        assert params.num_threads == 10 + 1 + 2 + 2 + 1
        assert "8 an element" in text
        pipeline = params.apply(plain).build(**params.build_options())
        assert sorted(pipeline) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_aggregates_count_by_their_elements_from_there_on(estimate):
    """Less memory has smaller buffers first."""
    plain = PipelineBuilder().add_source([bytes(MIB)] * 2).pipe(bytes, name="a").aggregate(8)
    plain.disaggregate().pipe(bytes, name="b").add_sink(1)
    # Items and results of threads: 4 + 8 * 8; room of r after each: 25 r; sink and consumer 16.
    for room in (1, 3):
        memory_bytes = (84 + 25 * room) * MIB
        params, text = estimate(plain, num_cores=2, memory_bytes=memory_bytes)
        assert params.buffer_size == dict.fromkeys(["a", "aggregate(8)", "disaggregate", "b"], room)
        assert f"{memory_bytes:,} of {memory_bytes:,} bytes in flight" in text


def test_pipelines_size_is_not_known_where_the_source_or_a_form_tells_none(estimate):
    """No item of a source that can be iterated only once is lost to measuring."""
    plain = PipelineBuilder().add_source(iter(range(5))).pipe(abs).add_sink()
    params, text = estimate(plain)
    assert "memory sets no bound (TypeError: a range_iterator is an iterator" in text
    assert list(params.apply(plain).build()) == [0, 1, 2, 3, 4]
    known = PipelineBuilder().add_source([Path("a")]).pipe(lambda path: bytes(MIB), name="read")
    assert f"{MIB:,} an element" in estimate(known.add_sink())[1]
    plain = PipelineBuilder().add_source(["a.mp4"]).pipe(lambda path: object(), name="demux")
    assert "the size of a object is not known" in estimate(plain.aggregate(2).add_sink())[1]
