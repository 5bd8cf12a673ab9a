"""A worker alone in its process is what torch's worker is; jobs of any size reach it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter

import numpy as np
import pytest
import torch
from _datasets import Made
from _gates import until
from _inside import are_up, children_of
from _isolated import bits, isolated, nothing_left
from _isolation_data import Coded, WhoAmI, as_list
from _loader_helpers import PATIENCE_SECONDS, DataLoader, torch_loader
from torch.utils.data import Dataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from spdl_torch.errors import UnsupportedOptionError
from spdl_torch.loader import opening

__all__ = ["nothing_left"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="forks"),
]


def test_torchs_own_processes_load_where_there_are_none_of_ours(monkeypatch, caplog):
    """As on Windows: the batches, and one line in the log that says what is missing."""
    monkeypatch.setattr(opening, "has_processes", False)
    opening._say_whose_processes.cache_clear()
    loader = isolated(list(range(10)), 4, persistent_workers=True)
    for _ in range(2):
        batches = iter(loader)
        assert type(batches) is _MultiProcessingDataLoaderIter
        assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    loader.close()
    (line,) = [each for each in caplog.messages if "Windows" in each]
    assert "without states within an epoch, statistics of the workers" in line


def test_what_torchs_own_processes_cannot_is_refused(monkeypatch):
    """At ``iter()``, and not in silence; threads and no workers are as everywhere."""
    monkeypatch.setattr(opening, "has_processes", False)
    resumed = isolated(list(range(4)), num_workers=1)
    resumed.load_state_dict(resumed.state_dict())
    with pytest.raises(UnsupportedOptionError, match="a state that was loaded has no effect"):
        iter(resumed)
    with pytest.raises(UnsupportedOptionError, match='on_error="skip" has no effect on Windows'):
        iter(isolated(list(range(4)), num_workers=1, on_error="skip"))
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
    """With the id of its worker."""
    loader = DataLoader(WhoAmI(), 1, num_workers=3, collate_fn=as_list, rng="worker")
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


@pytest.mark.parametrize("number", [0, 1])
def test_error_of_worker_init_fn_is_heard_whichever_worker_it_is(number):
    """Once, with its type and a note; the batches that come are whole."""
    heard, batches = [], iter(isolated(range(40), 4, worker_init_fn=fails_on(number)))
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
    batches = [list(range(10**6 + n, 10**6 + n + LARGE // 4)) for n in range(10)]
    loader = DataLoader(
        Texts(), batch_sampler=batches, num_workers=2, prefetch_factor=3, collate_fn=list
    )
    for number, batch in enumerate(loader):
        assert batch == [str(index) for index in batches[number]]
    assert number == 9


def targets(index):
    """As for detection: many small tensors."""
    return [torch.full((4,), float(index + n)) for n in range(20)]


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_that_take_long_to_unpack_are_received_by_a_thread(persistent):
    """From the second epoch on, so that a loop that waits for its device need not do it."""
    loader = isolated(Made(targets, 240), 30, collate_fn=as_list, persistent_workers=persistent)
    found, has_thread = [], []
    for _ in range(3):
        epoch = []
        for batch in loader:
            epoch.append(bits(batch))
            has_thread.append("spdl-receive" in {each.name for each in threading.enumerate()})
        found.append(epoch)
    expected = list(map(bits, DataLoader(Made(targets, 240), 30, collate_fn=as_list)))
    assert found == [expected] * 3
    assert has_thread == [False] * 8 + [True] * 16


def test_children_get_equally_many_jobs_where_the_loop_is_slower():
    """Whenever it takes a batch they have made all others: then it is each one's turn in turn."""
    loader = isolated(Made(lambda _: os.getpid(), 20), prefetch_factor=4)
    iterator, pids = iter(loader), []
    for _ in range(20):
        until(lambda: are_up(iterator) and not any(c.jobs for c in children_of(iterator).values()))
        pids.append(next(iterator).item())
    # The first 8 jobs were given out while the children began: whoever was quicker got more.
    assert sorted(Counter(pids[8:]).values()) == [6, 6]
