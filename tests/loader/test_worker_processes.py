"""Workers in several processes: the batches are those without workers, whoever is killed; each
worker alone in its process is what torch's worker is."""

from __future__ import annotations

import gc
import importlib
import inspect
import multiprocessing
import os
import random
import resource
import signal
import socket
import threading
from collections import Counter
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from _gates import num_fds, until
from _inside import are_up, children_of, crew_of
from _isolated import bits, epochs_of, nothing_left, release_what_has_ended
from _isolation_data import Coded, Crashing, Images, WhoAmI, as_list
from _loader_helpers import (
    PATIENCE_SECONDS,
    DataLoader,
    assert_threads_end,
    torch_loader,
)
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from torchvision import transforms as T
from torchvision.datasets.folder import pil_loader
from torchvision.transforms import functional as F, v2

from spdl_torch import DistributedSampler, ImageFolder
from spdl_torch.errors import UnsupportedOptionError
from spdl_torch.loader import opening as backends, vouching
from spdl_torch.loader.backends.processes import process as child_process, worker_process
from spdl_torch.loader.backends.processes.wire import LONG_BYTES, File, Wire, socket_pair
from spdl_torch.loader.known_parts import is_stateless
from spdl_torch.observe import tracing

__all__ = ["nothing_left"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="forks"),
]


def divided(dataset, *args, processes, **options):
    """A loader with so many worker processes."""
    return DataLoader(dataset, *args, num_workers=processes, isolation="process", **options)


def children():
    """The worker processes that live now."""
    return [each for each in multiprocessing.active_children() if each.name == "spdl-loader"]


class DiesOnce(Images):
    """The process that makes sample 13 first is killed by it."""

    def __init__(self, folder, signal_number=signal.SIGKILL):
        super().__init__()
        self.mark = Path(folder) / "died"
        self.signal = signal_number

    def __getitem__(self, index):
        if index == 13 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), self.signal)
        return super().__getitem__(index)


@pytest.mark.parametrize("processes", [2, 4])
def test_batches_of_a_child_that_is_killed_are_made_again(tmp_path, caplog, processes):
    """With equal bits; the log names the signal and the batches, the report counts it, and the next
    epoch knows nothing of it."""
    (tmp_path / "died").touch()
    expected = epochs_of(DataLoader(DiesOnce(tmp_path), 4, seed=1))
    (tmp_path / "died").unlink()
    options = {"seed": 1, "timeout": PATIENCE_SECONDS, "persistent_workers": True}
    loader = divided(DiesOnce(tmp_path), 4, processes=processes, **options)
    assert epochs_of(loader, 1) == expected[:1]
    (record,) = [each for each in caplog.records if "killed" in each.message]
    assert "was killed by SIGKILL" in record.message
    made_again = record.message.rpartition("its batches again: ")[2].rstrip(".").split(", ")
    assert "3" in made_again  # of samples 12 to 15
    assert "killed" in str(loader.report())
    assert epochs_of(loader, 1) == expected[1:]
    assert "killed" not in str(loader.report())


@pytest.fixture
def wires():
    """Both ends of a wire."""
    ours, theirs = map(Wire, socket_pair())
    yield ours, theirs
    ours.close()
    theirs.close()


def all_of(wire):
    """The messages that have come, with their files."""
    wire.read()
    return [(bytes(content), files) for content, files in iter(wire.next, None)]


SIZES = [0, 1, 70, LONG_BYTES, LONG_BYTES + 1, 100_000]


def test_messages_of_any_size_come_in_order_while_nobody_reads(wires):
    """Neither side ever waits until the other one reads."""
    ours, theirs = wires
    sent = [bytes([n % 256]) * SIZES[n % len(SIZES)] for n in range(60)]
    for content in sent:
        ours.send(content)
    found = []
    while len(found) < len(sent):
        found += all_of(theirs)
        ours.flush()
    assert found == [(content, []) for content in sent]
    assert not ours.has_unsent


@pytest.mark.parametrize("seed", range(3))
def test_messages_read_in_any_parts_have_their_own_files(seed, wires, tmp_path):
    """Files come apart from the bytes that they belong to."""
    ours, theirs = wires
    draws, sent, found = random.Random(seed), [], []
    for number in range(30):
        path = (tmp_path / str(number)).as_posix() if draws.random() < 0.3 else None
        sent.append((draws.choice(SIZES), path))
        files = [] if path is None else [File(os.open(path, os.O_CREAT | os.O_RDWR))]
        ours.send(bytes(sent[-1][0]), *files)
        if draws.random() < 0.3:
            found += all_of(theirs)
    while len(found) < len(sent):
        ours.flush()
        found += all_of(theirs)
    for (size, path), (content, files) in zip(sent, found, strict=True):
        assert (len(content), len(files)) == (size, path is not None)
        for file in files:
            assert os.path.samestat(os.fstat(file), os.stat(path))
            assert not os.get_inheritable(file)
    ours.close()
    assert all_of(theirs) == []
    assert theirs.is_over


def test_child_that_is_killed_before_it_read_a_job_is_gone_not_out_of_reach(wires):
    """The system then says "reset" where it else says that the wire has ended."""
    ours, theirs = wires
    ours.send(b"a job")
    theirs.close()
    assert all_of(ours) == []
    assert ours.is_over


def test_descriptor_that_this_process_has_no_room_for_is_an_error(wires):
    """That of any file that could not be opened."""
    ours, theirs = wires
    ours.send(bytes(LONG_BYTES + 1))
    os.close(first_free := os.dup(0))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            all_of(theirs)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_default_timeout_of_sockets_is_not_that_of_the_line(method):
    """Programs set one for their downloads; a forked child has it, too."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(60)
    try:
        loader = divided(Images(), 2, processes=2, seed=1, multiprocessing_context=method)
        assert epochs_of(loader, 1) == epochs_of(DataLoader(Images(), 2, seed=1), 1)
    finally:
        socket.setdefaulttimeout(before)


def test_batches_of_a_child_that_something_else_kills_are_made_again():
    """While it works or waits, by a signal that the system or a person sends."""
    expected = epochs_of(DataLoader(Images(), 2, seed=1), 1)[0]
    loader = divided(Images(), 2, processes=2, seed=1, timeout=PATIENCE_SECONDS)
    found = []
    for number, batch in enumerate(loader):
        if number in (0, 4):
            os.kill(children()[0].pid, signal.SIGKILL)
        found.append(bits(batch))
    assert found == expected


def test_others_make_the_batches_of_a_child_whose_successor_takes_long(monkeypatch, caplog):
    """One that is not forked may import for seconds. The loop gets all its batches meanwhile, in
    order and with equal bits, and the successor gets work once it is there."""
    expected = epochs_of(DataLoader(Images(40), 2, seed=1), 1)[0]
    options = {"seed": 1, "timeout": PATIENCE_SECONDS, "multiprocessing_context": "forkserver"}
    batches = iter(divided(Images(40), 2, processes=3, **options))
    found = [bits(next(batches)) for _ in range(3)]
    until(lambda: are_up(batches))
    begin, started = threading.Event(), child_process.start_child

    def late(*args):
        assert begin.wait(PATIENCE_SECONDS)
        return started(*args)

    monkeypatch.setattr(worker_process, "start_child", late)
    killed = children_of(batches)[1].pid
    os.kill(killed, signal.SIGKILL)
    found += [bits(next(batches)) for _ in range(10)]
    until(lambda: "The others make its batches again: " in caplog.text)
    successor = children_of(batches)[1]
    assert not successor.jobs
    assert crew_of(batches).roster.numbers_at_work() == [0, 2]
    begin.set()
    until(lambda: are_up(batches))
    assert crew_of(batches).roster.numbers_at_work() == [0, 1, 2]
    assert found + list(map(bits, batches)) == expected


def test_epoch_begins_while_a_killed_child_has_no_successor_yet(monkeypatch):
    """What the successor is told waits until it can be told: first what it begins with."""
    options = {"seed": 1, "timeout": PATIENCE_SECONDS, "multiprocessing_context": "forkserver"}
    loader = divided(Images(40), 2, processes=2, persistent_workers=True, **options)
    first = next(batches := iter(loader))
    begin, started = threading.Event(), child_process.start_child

    def late(*args):
        return begin.wait(PATIENCE_SECONDS) and started(*args)

    monkeypatch.setattr(worker_process, "start_child", late)
    os.kill(children_of(batches)[1].pid, signal.SIGKILL)
    found = [list(map(bits, (first, *batches)))]
    batches = iter(loader)
    begin.set()
    until(lambda: are_up(batches) or crew_of(batches)._look_after())
    assert [*found, list(map(bits, batches))] == epochs_of(DataLoader(Images(40), 2, seed=1), 2)


def test_close_waits_for_processes_of_a_loop_that_was_left():
    """And nothing of them stays: no zombie, no descriptor."""
    release_what_has_ended()
    loader, before = divided(Images(40), 4, processes=2), num_fds()
    next(iter(loader))
    loader.close()
    assert (children(), num_fds()) == ([], before)


def test_log_of_a_killed_child_without_batches_says_so(caplog):
    """Nothing is made again then, and no number is given."""
    options = {"processes": 2, "prefetch_factor": 1, "timeout": PATIENCE_SECONDS}
    batches = iter(divided(Images(40), 4, **options))
    killed = children_of(batches)[1]
    until(lambda: are_up(batches) and not killed.jobs)
    os.kill(killed.pid, signal.SIGKILL)
    until(lambda: len(children()) == 1)
    assert len(list(batches)) == 10
    assert " its place; it had no batch to make." in caplog.text


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_batch_that_always_kills_its_child_is_an_error(caplog, method):
    """After the second child, be it a new one or another, with the indices of the batch; asked
    again, the iterator has ended."""
    options = {"timeout": PATIENCE_SECONDS, "multiprocessing_context": method}
    loader = divided(Crashing(signal.SIGKILL), 1, processes=2, **options)
    batches = iter(loader)
    named = r"was killed by SIGKILL(.|\n)*next batch was batch 5, indices \[5\]"
    with pytest.raises(RuntimeError, match=named):
        list(batches)
    assert list(batches) == []
    # The other one may have been killed, too, before the first one's end was logged.
    until(lambda: "its batches again: 5" in caplog.text)
    assert caplog.text.count("its batches again: 5") == 1


@pytest.mark.parametrize("rng", ["sample", "worker"])
def test_child_whose_work_depends_on_its_past_is_not_replaced(rng, tmp_path):
    """An iterable's iterator, and a worker's random stream, are gone with it: an error, no other
    batches."""
    dataset = DiesOnce(tmp_path) if rng == "worker" else DyingStream()
    loader = divided(dataset, 4, processes=2, rng=rng)
    with pytest.raises(RuntimeError, match="was killed by SIGKILL"):
        list(loader)


class DyingStream(IterableDataset):
    """Its third item kills."""

    def __iter__(self):
        yield from range(2)
        os.kill(os.getpid(), signal.SIGKILL)


def failing_step(batch):
    """A training step."""
    return len(batch) / 0


def leave(loader, how):
    """End an epoch in one of the ways."""
    batches = iter(loader)
    next(batches)
    if how == "end":
        assert len(list(batches)) == 9
    elif how == "error":
        with pytest.raises(ZeroDivisionError, match="division"):
            sum(map(failing_step, batches))
    elif how == "break":
        for _ in batches:
            break
    # Else it is dropped.


@pytest.mark.parametrize("how", ["end", "error", "break", "drop"])
def test_nothing_is_left_however_the_loop_ends(how):
    """No child, thread or descriptor; of the default, and of persistent workers. Descriptors of
    processes that have ended go when the next loader begins."""
    for make in (
        lambda: DataLoader(Images(40), 4, num_workers=2),
        lambda: divided(Images(40), 4, processes=2, persistent_workers=True),
    ):
        leave(make(), "end")
        release_what_has_ended()
        before = num_fds()
        leave(make(), how)
        gc.collect()
        assert_threads_end()
        release_what_has_ended()
        assert num_fds() == before


@pytest.mark.parametrize("how", ["end", "drop"])
def test_trace_has_the_rows_of_processes_however_the_loop_ends(how, tmp_path):
    """Whoever leaves a loop need not keep its iterator; and the processes end all the same."""
    release_what_has_ended()
    before = num_fds()
    for make in (
        lambda: DataLoader(Images(40), 4, num_workers=2),
        lambda: divided(Images(40), 4, processes=2),
    ):
        with tracing(tmp_path / "trace.json", level="item"):
            leave(make(), how)
        text = (tmp_path / "trace.json").read_text(encoding="utf-8")
        assert '"worker process[' in text  # the other may not have begun
        gc.collect()
        assert_threads_end()
    release_what_has_ended()
    assert num_fds() == before


def test_loop_that_is_left_while_tracing_ends_a_process_that_is_stuck(tmp_path):
    """Its rows are not waited for."""
    with tracing(tmp_path / "trace.json"):
        loader = DataLoader(Stuck(), 1, num_workers=2)
        for _ in loader:
            break
        del loader
    assert_threads_end()
    until(lambda: children() == [])


class Stuck(Dataset):
    """Keeps the GIL for longer than anybody asks, from the third sample on."""

    def __len__(self):
        return 9

    def __getitem__(self, index):
        if index >= 2:
            sum(range(20_000_000))
        return index


class Declared(Images):
    """Says of itself whether threads may use it."""

    def __init__(self, thread_safe):
        super().__init__(8)
        self.thread_safe = thread_safe


def where(loader):
    """Load an epoch; whether there were processes, and the report's words on it."""
    before = children()  # of a loader that has ended, on a busy machine
    batches = iter(loader)
    next(batches)
    found = any(each not in before for each in children())
    placement = loader.report().placement
    list(batches)
    assert bool(placement.remedy) == bool(placement.num_processes)
    return found, str(placement) if placement.num_processes else ""


class SaysByProperty(Images):
    """As a wrapper may that asks what is inside."""

    @property
    def thread_safe(self):
        return True


class Later(Dataset):
    """A class of the package that was written after the table of known ones."""

    __module__ = "spdl_torch.data.later"

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index


class RaisesByProperty(Images):
    """A property that fails says nothing."""

    @property
    def thread_safe(self):
        raise KeyError("thread_safe")


X = torch.arange(8)
KNOWN = {
    "TensorDataset": lambda: TensorDataset(X, X),
    "Subset": lambda: Subset(TensorDataset(X), [1, 2, 3]),
    "ConcatDataset": lambda: ConcatDataset([TensorDataset(X), Subset(TensorDataset(X), [4])]),
    "list": lambda: list(range(8)),
    "range": lambda: range(8),
    "array": lambda: np.arange(8),
    "tensor": lambda: X,
    "declared": lambda: Declared(thread_safe=True),
    "Subset of declared": lambda: Subset(Declared(thread_safe=True), [1, 2, 3]),
    "ConcatDataset of declared": lambda: ConcatDataset([Declared(thread_safe=True)] * 2),
    "a property that says so": lambda: SaysByProperty(8),
}
UNKNOWN = {
    "a user's class": (lambda: Images(8), {}, "Images is not known to be safe on threads"),
    "Subset of it": (lambda: Subset(Images(8), [1, 2]), {}, "Images is not known to be safe"),
    "a later class of ours": (Later, {}, "Later is not known to be safe on threads"),
    "subclass of TensorDataset": (
        lambda: type("Mine", (TensorDataset,), {})(X),
        {},
        "Mine is not known to be safe on threads",
    ),
    "a property that fails": (lambda: RaisesByProperty(8), {}, "RaisesByProperty is not known"),
    "a part of a StackDataset": (
        lambda: StackDataset(a=TensorDataset(X), b=Images(8)),
        {},
        "Images is not known to be safe on threads",
    ),
    "declared unsafe": (lambda: Declared(thread_safe=False), {}, "says thread_safe = False"),
    "collate_fn": (lambda: range(8), {"collate_fn": as_list}, "collate_fn=as_list is not known"),
    "worker_init_fn": (lambda: range(8), {"worker_init_fn": id}, "worker_init_fn=id is not known"),
}


@pytest.mark.parametrize("kind", KNOWN)
def test_workers_are_threads_where_that_is_known_to_be_safe(kind):
    """The class is known, or the dataset says so."""
    assert where(DataLoader(KNOWN[kind](), num_workers=2)) == (False, "")


@pytest.mark.parametrize("kind", UNKNOWN)
def test_workers_are_processes_elsewhere(kind):
    """The report says why, and what would put them on threads; that does."""
    make, options, reason = UNKNOWN[kind]
    found, message = where(DataLoader(make(), num_workers=2, **options))
    assert found
    assert "in 2 processes: " in message
    assert reason in message
    if kind != "declared unsafe":
        assert 'thread_safe = True in the dataset or isolation="thread"' in message
    assert where(DataLoader(make(), num_workers=2, isolation="thread", **options)) == (False, "")


def test_our_own_datasets_load_on_threads(tmp_path):
    """They are made for it, with transforms that keep no state: torchvision's."""
    from PIL import Image
    from torchvision import transforms

    (tmp_path / "a").mkdir()
    for number in range(2):
        Image.new("RGB", (8, 8)).save(tmp_path / "a" / f"{number}.png")
    dataset = ImageFolder(str(tmp_path), transform=transforms.ToTensor())
    sampler = DistributedSampler(len(dataset), num_replicas=1, rank=0)
    assert where(DataLoader(dataset, sampler=sampler, num_workers=1)) == (False, "")
    dataset.transform = np.array
    found, message = where(DataLoader(Subset(dataset, [0, 1]), num_workers=1))
    assert found
    assert "transform=array is not known to be safe on threads" in message


def test_classes_in_the_table_of_known_ones_exist():
    """Under their names, and with the attributes that are looked at."""
    for name, parts in vouching.KNOWN.items():
        module, _, kind = name.rpartition(".")
        source = inspect.getsource(getattr(importlib.import_module(module), kind))
        bases = "samples transform target_transform loader"  # torchvision's, of ImageFolder
        for each in (parts.datasets, parts.collate, *parts.functions, *parts.containers):
            assert f"self.{each} " in source or f"self.{each}:" in source or each in bases


LABELS = {"labels": 1}
STATELESS = {
    "none": None,
    "a function of torchvision": F.pil_to_tensor,
    "a recipe": v2.Compose([v2.RandomResizedCrop(4), v2.ToDtype({torch.Tensor: torch.float32})]),
    "an older recipe": T.Compose([T.RandomApply([T.ColorJitter(0.1)]), T.Normalize([0.0], [1.0])]),
    "Sequential": torch.nn.Sequential(v2.AutoAugment(), v2.RandomChoice([v2.Identity()])),
    "labels found by torchvision": v2.SanitizeBoundingBoxes(),
    "torchvision's loader": pil_loader,
}
KEEPING = {
    "lambda": T.Lambda(len),
    "v2's lambda": v2.Compose([v2.RandomOrder([v2.Lambda(len)])]),
    "labels found by a function": v2.SanitizeBoundingBoxes(labels_getter=LABELS.get),
    "subclass of Sequential": type("Mine", (torch.nn.Sequential,), {})(v2.Identity()),
    "subclass of a transform": type("Mine", (v2.Identity,), {})(),
    "another module": torch.nn.Sequential(torch.nn.BatchNorm2d(3)),
    "a method": LABELS.get,
    "a wrapped loader": lru_cache(pil_loader),
    "partial": partial(F.resize, size=[4]),
    "forward replaced": v2.Identity(),
}
KEEPING["forward replaced"].forward = LABELS.get


@pytest.mark.parametrize("kind", [*STATELESS, *KEEPING])
def test_only_transforms_of_libraries_alone_keep_no_state(kind):
    """Whatever a function of the user's is inside of may keep some."""
    assert is_stateless((STATELESS | KEEPING)[kind]) is (kind in STATELESS)


@pytest.mark.parametrize("persistent", [False, True])
def test_torchs_own_processes_load_where_there_are_none_of_ours(monkeypatch, caplog, persistent):
    """As on Windows: the batches, and one line in the log that says what is missing."""
    monkeypatch.setattr(backends, "has_processes", False)
    backends._say_whose_processes.cache_clear()
    loader = divided(list(range(10)), 4, processes=2, persistent_workers=persistent)
    for _ in range(2):
        batches = iter(loader)
        assert type(batches) is _MultiProcessingDataLoaderIter
        assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    loader.close()
    (line,) = [each for each in caplog.messages if "Windows" in each]
    assert "without states within an epoch, statistics of the workers" in line


def test_what_torchs_own_processes_cannot_is_refused(monkeypatch):
    """At ``iter()``, and not in silence; threads and no workers are as everywhere."""
    monkeypatch.setattr(backends, "has_processes", False)
    resumed = divided(list(range(4)), processes=1)
    resumed.load_state_dict(resumed.state_dict())
    with pytest.raises(UnsupportedOptionError, match="a state that was loaded has no effect"):
        iter(resumed)
    with pytest.raises(UnsupportedOptionError, match='on_error="skip" has no effect on Windows'):
        iter(divided(list(range(4)), processes=1, on_error="skip"))
    for options in ({"num_workers": 0}, {"num_workers": 1, "isolation": "thread"}):
        assert len(list(DataLoader(list(range(4)), on_error="skip", **options))) == 4


class Unpicklable(Dataset):
    """Holds an open file, a lambda and a lock."""

    def __init__(self, path):
        self.file = open(path, "rb")  # noqa: SIM115
        self.transform = lambda data: int.from_bytes(data, "little")
        self.lock = threading.Lock()

    def __len__(self):
        return 8

    def __getitem__(self, index):
        with self.lock:
            return self.transform(os.pread(self.file.fileno(), 4, 4 * index))


def test_nothing_is_pickled_on_the_way_to_a_forked_worker(tmp_path):
    """As with torch's: an open file, a lambda and a lock, in the dataset and its functions."""
    path = tmp_path / "numbers"
    np.arange(8, dtype=np.int32).tofile(path)
    dataset, offset = Unpicklable(path), 100
    with dataset.file:
        loader = DataLoader(
            dataset, 2, num_workers=2, collate_fn=lambda samples: [n + offset for n in samples]
        )
        assert list(loader) == [[100, 101], [102, 103], [104, 105], [106, 107]]


class Introspective(Dataset):
    """What a worker can find out about itself, on its own thread and on one that it starts."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        before = signal.signal(signal.SIGALRM, signal.SIG_IGN)  # only a main thread may
        signal.signal(signal.SIGALRM, before)
        found = []
        thread = threading.Thread(target=lambda: found.append(self.about()))
        thread.start()
        thread.join()
        is_main = threading.current_thread() is threading.main_thread()
        return is_main, os.getppid(), self.about(), *found

    def about(self):
        info = get_worker_info()
        return info.id, info.num_workers, info.seed, info.dataset is self


def test_worker_finds_what_torchs_worker_finds():
    """It is the main thread of a child of the trainer, with torch's worker info and seed; so it is
    for a thread that the dataset starts."""
    found = []
    for make, options in ((DataLoader, {"rng": "worker"}), (torch_loader, {})):
        generator = torch.Generator().manual_seed(4)
        loader = make(
            Introspective(), num_workers=2, generator=generator, collate_fn=as_list, **options
        )
        found.append([sample for batch in loader for sample in batch])
    ours, theirs = found
    assert ours == theirs
    assert {sample[:2] for sample in ours} == {(True, os.getpid())}


def test_every_worker_has_a_process():
    """The one chosen, or asked for; with the id of its worker."""
    for options in ({}, {"isolation": "process"}):
        loader = DataLoader(WhoAmI(), 1, num_workers=3, collate_fn=as_list, rng="worker", **options)
        pids, ppids, names, nums, ids = zip(*(batch[0] for batch in loader), strict=True)
        assert len(set(pids)) == 3
        assert set(ppids) == {os.getpid()}
        assert set(nums) == {3}
        assert set(zip(ids, names, strict=True)) == {(n, f"spdl-worker-{n}") for n in range(3)}


def fails_on(number):
    """A worker_init_fn that raises on one worker."""

    def start(worker):
        if worker == number:
            raise Coded(worker, "init")

    return start


@pytest.mark.parametrize("processes", [2, 4])
def test_error_of_worker_init_fn_is_heard_whichever_worker_it_is(processes):
    """Once, with its type and a note; the batches that come are whole."""
    for number in range(processes):
        loader = divided(*(range(40), 4), processes=processes, worker_init_fn=fails_on(number))
        heard, batches = [], iter(loader)
        while True:
            try:
                assert len(next(batches)) == 4
            except StopIteration:
                break
            except Coded as error:
                heard.append(error)
        assert [error.args for error in heard] == [(number, "init")]
        assert f"in worker_init_fn({number})" in heard[0].__notes__[0]


class Gated(Dataset):
    """A batch in one call, of many indices; each batch but the first waits for a gate of its own,
    and says whether it was opened."""

    def __init__(self, num_batches):
        fork = multiprocessing.get_context("fork")
        self.entered = [fork.Event() for _ in range(num_batches)]
        self.gates = [fork.Event() for _ in range(num_batches)]

    def __getitems__(self, indices):
        number = indices[0] // LARGE
        self.entered[number].set()
        opened = number == 0 or self.gates[number].wait(PATIENCE_SECONDS)
        return [(opened, sum(indices))]


LARGE = 100_000  # indices, about 0.5 MB; the pipe takes 0.2 MB


class Large:
    """A batch sampler whose third index is there once a worker is at the second batch: the sampler
    is pulled on the trainer's thread, right before it gives out the job."""

    def __init__(self, dataset, num_batches):
        self.dataset, self.num_batches = dataset, num_batches

    def __iter__(self):
        for number in range(self.num_batches):
            if number >= 2:
                assert self.dataset.entered[number - 1].wait(PATIENCE_SECONDS)
            yield list(range(number * LARGE, (number + 1) * LARGE))


def test_trainer_does_not_wait_until_a_busy_worker_reads_a_large_job():
    """The worker is in its batch until the trainer, which has given out the next job, goes on."""
    dataset = Gated(6)
    loader = DataLoader(
        dataset, batch_sampler=Large(dataset, 6), num_workers=1, prefetch_factor=2, collate_fn=list
    )
    found = []
    for number, ((opened, total),) in enumerate(loader):
        found.append((opened, total))
        if number + 1 < 6:
            dataset.gates[number + 1].set()
    assert found == [(True, sum(range(n * LARGE, (n + 1) * LARGE))) for n in range(6)]


class Texts(Dataset):
    """Batches as large as their jobs, and pickled: their texts do not go through shared memory."""

    def __getitems__(self, indices):
        return [str(index) for index in indices]


def test_large_jobs_and_large_results_do_not_block_each_other():
    """The trainer writes jobs while the workers write results, each more than a pipe takes."""
    batches = [list(range(10**6 + n, 10**6 + n + LARGE // 2)) for n in range(10)]
    loader = DataLoader(
        Texts(), batch_sampler=batches, num_workers=2, prefetch_factor=3, collate_fn=list
    )
    for number, batch in enumerate(loader):
        assert batch == [str(index) for index in batches[number]]
    assert number == 9


class MakerOf(Dataset):
    """Sample i is the process that made it."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return os.getpid()


class Targets(Dataset):
    """As for detection: many small tensors."""

    def __len__(self):
        return 300

    def __getitem__(self, index):
        return [torch.full((4,), float(index + n)) for n in range(40)]


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_that_take_long_to_unpack_are_received_by_a_thread(persistent):
    """From the second epoch on, so that a loop that waits for its device need not do it."""
    options = {"batch_size": 30, "collate_fn": as_list, "persistent_workers": persistent}
    loader = divided(Targets(), processes=2, **options)
    found, has_thread = [], []
    for _ in range(3):
        epoch = []
        for batch in loader:
            epoch.append(bits(batch))
            has_thread.append("spdl-receive" in {each.name for each in threading.enumerate()})
        found.append(epoch)
    expected = list(map(bits, DataLoader(Targets(), 30, collate_fn=as_list)))
    assert found == [expected] * 3
    assert has_thread == [False] * 10 + [True] * 20


def test_children_get_equally_many_jobs_where_the_loop_is_slower():
    """Whenever it takes a batch they have made all others: then it is each one's turn in turn."""
    loader = divided(MakerOf(), processes=2, prefetch_factor=4)
    iterator, pids = iter(loader), []
    for _ in range(20):
        until(lambda: are_up(iterator) and not any(c.jobs for c in children_of(iterator).values()))
        pids.append(next(iterator).item())
    # The first 8 jobs were given out while the children began: whoever was quicker got more.
    assert sorted(Counter(pids[8:]).values()) == [6, 6]
