"""On a machine of several sockets, what loads to a GPU is near it; on others nothing is bound."""

from __future__ import annotations

import gc
import json
import os
import threading
from functools import partial

import numpy as np
import pytest
import torch
from _gates import in_thread, result_of
from _lazy_device import LazyDevice, install, put_to_rest
from _lazy_gpu import Torch, as_torchs, gpu, lines_of
from _nodes import install_nodes, pci_address, two_cores, write_nodes
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.check_gpu import nodes as check_of_nodes
from spdl_torch.check_gpu import rates
from spdl_torch.data.child_process.shared_memory import SlabPool
from spdl_torch.io._transfer import near, region
from spdl_torch.io._transfer.near import Near, near_to
from spdl_torch.io._transfer.slabs import SMALL_BYTES
from spdl_torch.machine import numa
from spdl_torch.machine.limits import usable_cores
from spdl_torch.machine.numa import bind, call_near, node_of, nodes
from spdl_torch.pipeline import PipelineBuilder

__all__ = ["gpu"]

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

NUM_SAMPLES = 12

# -- the system's files ----------------------------------------------------------------------------

TREES = {
    "two": ({0: "0-3,8", 1: "4-7"}, {}, {0: {0, 1, 2, 3, 8}, 1: {4, 5, 6, 7}}),
    "one": ({0: "0-7"}, {}, {0: set(range(8))}),
    "numbers with holes": ({0: "0", 8: "1"}, {}, {0: {0}, 8: {1}}),
    "one is offline": ({0: "0", 1: "1"}, {"online": "0"}, {0: {0}}),
    "one without memory": ({0: "0", 1: "1", 2: "2"}, {"has_memory": "0,2"}, {0: {0}, 2: {2}}),
    "one without cores": ({0: "0-1", 1: ""}, {}, {0: {0, 1}}),
    "nobody says who has memory": ({0: "0", 1: "1"}, {"has_memory": False}, {0: {0}, 1: {1}}),
    "one does not say its cores": ({0: "0", 1: None}, {}, {0: {0}}),
    "nothing is said": ({}, {"online": False, "has_memory": False}, {}),
    "nobody says who is online": ({0: "0", 1: "1"}, {"online": False}, {}),
    "nonsense": ({0: "0-x,?", 1: "3-1"}, {}, {}),
}


@pytest.mark.parametrize("name", TREES)
def test_nodes_are_those_with_cores_and_memory(tmp_path, name):
    """By the numbers and cores that the system lists, whatever is not there."""
    lists, said, expected = TREES[name]
    assert nodes(write_nodes(tmp_path, lists, **said)) == expected


def listed(numbers):
    """As the system lists them: 0-3,8."""
    parts, ordered = [], sorted(numbers)
    for number in ordered:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


@given(numbers=st.sets(st.integers(0, 300), min_size=1))
def test_lists_of_cores_are_read_as_they_are_written(tmp_path_factory, numbers):
    """Of any cores."""
    folder = write_nodes(tmp_path_factory.mktemp("node"), {0: listed(numbers)})
    assert nodes(folder) == {0: numbers}


@pytest.mark.parametrize(("said", "expected"), [(0, 0), (12, 12), (-1, None), ("", None)])
def test_node_of_a_device_may_be_unknown(tmp_path, said, expected):
    """As in virtual machines; or there is no such device."""
    write_nodes(tmp_path, {}, gpus=[said])
    assert node_of(pci_address(0), tmp_path) == expected
    assert node_of(pci_address(1), tmp_path) is None


# -- what is near ----------------------------------------------------------------------------------

TWO = {0: "0-7", 1: "8-15"}


def found_near(tmp_path, monkeypatch, *, lists=TWO, gpus=(1,), allowed=range(16), ranks=1, seen=1):
    """What is near the first device."""
    monkeypatch.setattr(numa, "_ROOT", write_nodes(tmp_path, lists, gpus=gpus))
    monkeypatch.setattr(near, "allowed_cores", lambda: frozenset(allowed))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    return near_to(torch.device("cuda", 0), pci_address, lambda: seen)


@pytest.mark.parametrize(
    "case",
    [
        {"lists": {0: "0-15"}, "gpus": (0,)},
        {"lists": {}},
        {"gpus": (-1,)},
        {"gpus": ()},
        {"gpus": (3,)},
        {"allowed": range(8)},
        {"allowed": range(8, 12)},
    ],
    ids=repr,
)
def test_nothing_is_near_where_there_is_nothing_to_choose(tmp_path, monkeypatch, case):
    """One node, or none known; the device's is not known, or this process runs on one alone."""
    assert found_near(tmp_path, monkeypatch, **case) is None


def test_what_is_near_has_the_cores_that_this_process_may_use(tmp_path, monkeypatch):
    """Those of the device's node, and no others."""
    found = found_near(tmp_path, monkeypatch, allowed=range(2, 12))
    assert found.cores == {8, 9, 10, 11}
    assert (found.node, found.num_nodes, found.device) == (1, 2, "cuda:0")


@pytest.mark.parametrize(
    ("ranks", "seen", "gpus", "room"),
    [
        (1, 1, (1,), 7),  # of 8 cores one is left to others
        (2, 2, (1, 0), 7),
        (2, 2, (1, 1), 4),
        (4, 4, (1, 1, 0, 0), 4),
        (2, 4, (1, 0, 1, 1), 7),  # two of four devices are used
        (2, 1, (1,), 4),  # each rank sees its own: both may be here
        (16, 1, (1,), 0),
    ],
)
def test_ranks_share_the_cores_near_their_devices(tmp_path, monkeypatch, ranks, seen, gpus, room):
    """So that all of them together do not crowd a node while another one is idle."""
    found = found_near(tmp_path, monkeypatch, gpus=gpus, ranks=ranks, seen=seen)
    assert found.room == room


def affinity_in_a_thread(begin):
    """That of a new thread after it has called a function."""

    def run():
        begin()
        return os.sched_getaffinity(0)

    return result_of(in_thread(run))


def test_threads_are_bound_as_long_as_there_is_room():
    """The others stay free: more of them than cores would wait for one another there."""
    core, _ = two_cores()
    everything = os.sched_getaffinity(0)
    place = Near(device="cuda:0", node=0, num_nodes=2, cores=frozenset({core}))
    assert affinity_in_a_thread(partial(place.settle, 0)) == {core}
    assert affinity_in_a_thread(partial(place.settle, 1)) == everything
    settle = place.settle_each()
    assert [affinity_in_a_thread(settle) for _ in range(4)] == [{core}] * 2 + [everything] * 2
    assert os.sched_getaffinity(0) == everything


def place_of_work(cores):
    """Where it is done: the cores, and the thread."""
    found = []
    call_near(
        frozenset(cores), lambda: found.append((os.sched_getaffinity(0), threading.get_ident()))
    )
    return found[0]


def test_work_is_done_near_though_the_thread_is_not(monkeypatch):
    """By another one, so that the user's stays where it is; if none can be started, by itself."""
    core, _ = two_cores()
    everything, own = os.sched_getaffinity(0), threading.get_ident()
    cores, thread = place_of_work({core})
    assert (cores, thread != own) == ({core}, True)
    assert place_of_work(everything) == place_of_work(()) == (everything, own)
    monkeypatch.setattr(numa, "start", refuse_to_start)
    assert place_of_work({core}) == (everything, own)
    assert os.sched_getaffinity(0) == everything


def refuse_to_start(_):
    raise RuntimeError("can't start new thread")


def test_count_of_cores_is_the_same_on_a_bound_thread():
    """Report, tuner and budget count those of the process, and so does what a thread asks."""
    core, _ = two_cores()

    def count():
        assert bind(frozenset({core}))
        return usable_cores(), len(os.sched_getaffinity(0))

    assert result_of(in_thread(count)) == (usable_cores(), 1)


# -- loaders ---------------------------------------------------------------------------------------


class Cores(Dataset):
    """A sample says on how many cores the thread that makes it may run."""

    thread_safe = True

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        # Large, so that it is made in pinned memory.
        return torch.full((SMALL_BYTES,), len(os.sched_getaffinity(0)), dtype=torch.uint8)


@pytest.fixture
def device(monkeypatch):
    """In place of CUDA."""
    install(device := LazyDevice(is_prompt=True), monkeypatch.setattr)
    yield device
    put_to_rest()
    gc.collect()
    assert device.violations == []


def freed(worker):
    """A worker_init_fn that lets its worker run anywhere."""
    os.sched_setaffinity(0, range(os.cpu_count()))


def counts_of(batches):
    """On how many cores the threads were that made each batch, as often as there were."""
    return sorted(int(batch.flatten()[0]) for batch in batches)


def on_threads(num_workers, **options):
    return DataLoader(
        Cores(), num_workers=num_workers, isolation="thread", device="cuda", **options
    )


def in_processes(num_workers, **options):
    options = {"multiprocessing_context": "fork", "isolation": "process", **options}
    return DataLoader(Cores(), num_workers=num_workers, device="cuda", **options)


def in_stages(num_workers):
    stages = PipelineBuilder().add_source(range(NUM_SAMPLES))
    stages = stages.pipe(Cores().__getitem__, concurrency=num_workers, output_order="input")
    return PipelineDataset(stages.add_sink(1), device="cuda")


SEATS = pytest.mark.parametrize("make", [on_threads, in_processes, in_stages])


@SEATS
def test_what_loads_is_near_the_device(device, tmp_path, monkeypatch, make):
    """A worker on a thread, in a process, in a stage: each of its samples is made there. The
    thread that trains, and what it starts, is where it was."""
    install_nodes(monkeypatch, tmp_path)
    everything = os.sched_getaffinity(0)
    loader = make(1)
    for _ in range(2):
        assert counts_of(loader) == [1] * NUM_SAMPLES
    assert os.sched_getaffinity(0) == everything
    assert affinity_in_a_thread(int) == everything


@SEATS
@pytest.mark.parametrize("machine", [{"count": 1, "gpu": 0}, {"gpu": -1}], ids=repr)
def test_nothing_is_bound_where_there_is_nothing_to_choose(
    device, tmp_path, monkeypatch, make, machine
):
    """The test before can fail; and most machines have one node."""
    install_nodes(monkeypatch, tmp_path, **machine)
    loader = make(1)
    assert counts_of(loader) == [len(os.sched_getaffinity(0))] * NUM_SAMPLES
    assert "node" not in str(loader.report())


def test_threads_of_a_loader_are_bound_as_the_system_sees_it(device, tmp_path, monkeypatch):
    """As many workers as the node has cores for, and the transfer's thread; in each epoch, and
    the others of them nowhere."""
    core = install_nodes(monkeypatch, tmp_path)
    everything = os.sched_getaffinity(0)
    loader = on_threads(3, persistent_workers=True)
    for _ in range(2):
        batches = iter(loader)
        next(batches)
        threads = {thread.name: thread.native_id for thread in threading.enumerate()}
        ours = ["spdl-transfer", *(f"spdl-loader-{number}" for number in range(3))]
        seen = [os.sched_getaffinity(threads[name]) for name in ours]
        assert seen == [{core}, {core}, everything, everything]
        for _ in batches:
            pass


def test_processes_are_bound_as_long_as_there_is_room(device, tmp_path, monkeypatch):
    """The second of two is not; both begin where the process is that trains."""
    install_nodes(monkeypatch, tmp_path)
    assert {*counts_of(in_processes(2, rng="worker"))} == {1, len(os.sched_getaffinity(0))}


def test_spawned_process_is_near_the_device(device, tmp_path, monkeypatch):
    """It has nothing of the process that trains but what it is given."""
    install_nodes(monkeypatch, tmp_path)
    loader = in_processes(1, multiprocessing_context="forkserver")
    assert counts_of(loader) == [1] * NUM_SAMPLES


@pytest.mark.parametrize("make", [on_threads, in_processes])
def test_worker_init_fn_has_the_last_word(device, tmp_path, monkeypatch, make):
    """With it a user lets the workers run where they like."""
    install_nodes(monkeypatch, tmp_path)
    loader = make(1, worker_init_fn=freed)
    assert counts_of(loader) == [len(os.sched_getaffinity(0))] * NUM_SAMPLES


def refuse(*_):
    raise PermissionError("sandboxed")


@SEATS
def test_loader_goes_on_where_the_system_refuses(device, tmp_path, monkeypatch, make):
    """A sandbox may forbid it, and the report then says nothing of it."""
    install_nodes(monkeypatch, tmp_path)
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    loader = make(1)
    assert counts_of(loader) == [len(os.sched_getaffinity(0))] * NUM_SAMPLES
    assert "node" not in str(loader.report())


# -- memory ----------------------------------------------------------------------------------------


@pytest.fixture
def touches(monkeypatch):
    """The cores on which the thread might run that found the pages of each piece of memory."""
    found, frombuffer = [], np.frombuffer

    class Noting(np.ndarray):
        def fill(self, value):
            found.append(os.sched_getaffinity(0))
            super().fill(value)

    class Numpy:
        def __getattr__(self, name):
            return getattr(np, name)

        def frombuffer(self, *args):
            return frombuffer(*args).view(Noting)

    monkeypatch.setattr(region, "np", Numpy())
    return found


def without_workers(_):
    return DataLoader(Cores(), num_workers=0, device="cuda")


@pytest.mark.parametrize("make", [without_workers, on_threads, in_stages])
@pytest.mark.parametrize("count", [1, 2])
def test_pinned_memory_is_near_the_device(device, tmp_path, monkeypatch, touches, make, count):
    """All of it, whoever is the first to need it; memory is where it is first written to."""
    core = install_nodes(monkeypatch, tmp_path, count=count, gpu=count - 1)
    assert len(counts_of(make(3))) == NUM_SAMPLES
    assert len(touches) >= 1
    assert touches == [{core} if count == 2 else os.sched_getaffinity(0)] * len(touches)


def test_memory_of_processes_is_near_the_device(touches):
    """Also of those that are bound nowhere; without a device it waits for its first batch."""
    core, _ = two_cores()
    assert SlabPool(frozenset({core})).take(SMALL_BYTES).slab.size == SMALL_BYTES
    assert touches == [{core}]
    SlabPool().take(SMALL_BYTES)
    assert len(touches) == 1


# -- what is told ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (on_threads, " and 1 of 2 workers are"),
        (in_processes, " and 1 of 2 workers are"),
        (in_stages, " and 1 of 2 threads of stages are"),
        (without_workers, " is"),
    ],
)
def test_report_says_what_is_near(device, tmp_path, monkeypatch, make, said):
    """And for programs, too."""
    install_nodes(monkeypatch, tmp_path)
    loader = make(2)
    counts_of(loader)
    expected = f"transfer: pinned memory{said} near cuda:0: node 1 of the machine's 2, cores: 1."
    report = loader.report()
    assert f"note {expected}" in " ".join(str(report).split())  # whatever its width
    assert expected in json.loads(report.as_json())["verdict"]["remarks"]


def checked(gpu, monkeypatch):
    """The lines of check-gpu on it."""
    monkeypatch.setattr(rates, "_num_copies", lambda num_bytes: 5)
    monkeypatch.setattr(check_of_nodes, "torch", Torch(gpu.device))
    with as_torchs(gpu, monkeypatch, rates):
        return lines_of(check_of_nodes.check_nodes, num_bytes=1 << 16, rounds=1)


PROMPT = pytest.mark.parametrize("gpu", [{"is_prompt": True}], indirect=True)

WHOLE = [
    *("nodes", "nodes_gpu", "nodes_gpu_cores"),
    *("nodes_far_threads", "nodes_far_processes", "nodes_far_stages"),
    *("copy_near_gigabytes_per_second", "copy_far_gigabytes_per_second"),
]


@PROMPT
def test_check_of_a_machine_with_two_nodes(gpu, tmp_path, monkeypatch):
    """What is bound, and both copies."""
    install_nodes(monkeypatch, tmp_path)
    assert checked(gpu, monkeypatch) == [(name, "PASS") for name in WHOLE]


@PROMPT
def test_check_finds_what_is_not_bound(gpu, tmp_path, monkeypatch):
    """It can fail."""
    install_nodes(monkeypatch, tmp_path)
    monkeypatch.setattr(Near, "settle", lambda *_: None)
    failed = [name for name, outcome in checked(gpu, monkeypatch) if outcome == "FAIL"]
    assert failed == ["nodes_far_threads", "nodes_far_processes", "nodes_far_stages"]


@PROMPT
@pytest.mark.parametrize(
    ("machine", "lines"),
    [
        ({"count": 1}, [("nodes", "SKIP")]),
        ({"gpu": -1}, [("nodes", "PASS"), ("nodes_gpu", "SKIP")]),
    ],
    ids=repr,
)
def test_check_is_skipped_where_there_is_nothing_to_choose(
    gpu, tmp_path, monkeypatch, machine, lines
):
    """And says why."""
    install_nodes(monkeypatch, tmp_path, **machine)
    assert checked(gpu, monkeypatch) == lines
