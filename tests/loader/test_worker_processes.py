"""A worker alone in its process is what torch's worker is; jobs of any size reach it."""

import os
import signal
import threading

import pytest
import torch
from _datasets import Made
from _isolated import bits, isolated, nothing_left
from _isolation_data import as_list
from _loader_helpers import DataLoader, torch_loader
from torch.utils.data import Dataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from spdl_torch.errors import UnsupportedOptionError
from spdl_torch.loader import opening

__all__ = ["nothing_left"]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


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


LARGE = 100_000  # indices, about 0.5 MB; the pipe takes 0.2 MB


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
