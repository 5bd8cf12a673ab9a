"""``num_workers="auto"``: workers join and leave as an epoch runs."""

import gc
import os
import select
import signal
import threading
import weakref

import pytest
import torch
from _datasets import Indices
from _gates import num_fds, until
from _inside import backend_of, children_of, give_out, resize, tuning_of
from _isolated import children, nothing_left, release_what_has_ended
from _loader_helpers import PATIENCE_SECONDS, DataLoader, assert_threads_end
from _readings import shown
from _tuners import auto
from torch.utils.data import Dataset, get_worker_info

from spdl_torch.loader.backends.processes import process as child_process

__all__ = ["nothing_left"]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


class WhoWaits(Dataset):
    """A sample says which thread made it, the only one of its process or not, whether that has
    begun as a worker, and as which. The first five wait until ``open`` is called; pipes, because a
    process may be killed while it waits."""

    begun = None

    def __init__(self):
        self.gate, self.inside = os.pipe(), os.pipe()
        weakref.finalize(
            self, lambda ends: [os.close(end) for end in ends], self.gate + self.inside
        )

    def open(self):
        os.write(self.gate[1], b".")  # nobody reads it

    def wait_inside(self, number):
        for _ in range(number):
            assert select.select([self.inside[0]], [], [], PATIENCE_SECONDS)[0]
            os.read(self.inside[0], 1)

    def __len__(self):
        return 60

    def __getitem__(self, index):
        if index < 5:
            os.write(self.inside[1], b".")
            assert select.select([self.gate[0]], [], [], PATIENCE_SECONDS)[0]
        info, thread = get_worker_info(), threading.get_native_id()
        return torch.tensor([index, thread, self.begun == thread, info.id, info.num_workers])


def begin(number):
    """A ``worker_init_fn``."""
    get_worker_info().dataset.begun = threading.get_native_id()


@pytest.mark.parametrize(
    ("isolation", "kind"), [("thread", "worker"), ("process", "worker process")]
)
def test_workers_join_and_leave_in_an_epoch(isolation, kind):
    """Four samples are made at once after growth, by workers like any other: their ids are below
    the number that all see. Those that leave answer their jobs first, and end; figures and rows of
    all are kept."""
    list(DataLoader(Indices(4), num_workers=1, isolation="process"))  # opens what stays
    release_what_has_ended()
    before, dataset = num_fds(), WhoWaits()
    options = {"isolation": isolation, "worker_init_fn": begin}
    loader = DataLoader(dataset, num_workers=auto(1, max_threads=6), **options)
    batches = iter(loader)
    resize(batches, 4)
    give_out(batches)
    dataset.wait_inside(4)  # the first one has the second sample as well
    assert loader.num_workers == loader.snapshot().stages[0].concurrency == 4
    resize(batches, 1)
    dataset.open()
    made = torch.cat(list(batches)).tolist()
    assert [index for index, *_ in made] == list(range(60))
    assert len({thread for _, thread, *_ in made}) == 4
    assert {tuple(others) for _, _, *others in made} == {(1, number, 6) for number in range(4)}
    assert len({thread for index, thread, *_ in made if index >= 8}) == 1
    assert loader.snapshot().stages[0].tasks.num_tasks == 60
    assert loader.report().placement.num_processes == (isolation == "process")
    rows = [row.name for row in loader.profile().timelines[0].rows if row.role == "stage"]
    kind = "worker" if isolation == "thread" else "worker process"
    assert rows == [f"{kind}[{n}]" for n in range(4)]
    del loader, batches, dataset
    gc.collect()
    assert_threads_end()
    release_what_has_ended()
    assert num_fds() == before


def test_process_that_is_killed_while_it_leaves_loses_nothing(caplog):
    """Its jobs are made again, whoever is left."""
    dataset = WhoWaits()
    loader = DataLoader(dataset, num_workers=auto(3, max_threads=6))
    batches = iter(loader)
    resize(batches, 3)
    dataset.wait_inside(3)
    leaving = children_of(batches)[2].pid
    resize(batches, 1)
    os.kill(leaving, signal.SIGKILL)
    dataset.open()
    assert torch.cat(list(batches))[:, 0].tolist() == list(range(60))
    assert "was killed by SIGKILL" in caplog.text
    assert children() == []


def test_number_stays_where_no_more_processes_can_be_started(monkeypatch, caplog):
    """The log says so, and the others go on."""
    options = {"isolation": "process", "num_workers": auto(1, max_threads=6)}
    loader = DataLoader(Indices(150), **options)
    batches = iter(loader)
    resize(batches, 1)

    def refuse(*_, **__):
        raise OSError("no more processes")

    monkeypatch.setattr(child_process, "_start", refuse)
    assert backend_of(batches).resize(3, 6) == 1
    assert backend_of(batches).resize(2, 4) == 1
    assert "no more processes" in caplog.text
    assert len(list(batches)) == 150


class QuickInCompany(Indices):
    """Waits, as for storage, and so long for one process alone that it is busy, and a second one
    gains, whatever else the machine does."""

    def __init__(self):
        super().__init__(1_000_000)
        self.present = torch.zeros(4).share_memory_()

    def __getitem__(self, index):
        self.present[get_worker_info().id] = 1
        signal.sigtimedwait([], 0.05 if self.present.sum() < 2 else 0.001)
        return index


def test_number_settles(caplog):
    """From one process on, by the loop's speed; the report shows what was decided."""
    dataset, workers = QuickInCompany(), auto(1, max_threads=4, window_seconds=0.1)
    loader = DataLoader(dataset, num_workers=workers, batch_size=1)
    batches = iter(loader)
    for _ in batches:
        if tuning_of(loader).tuner.is_settled:
            break
        # A busy machine may start a process long after the window that is to judge it has begun.
        if dataset.present.sum() < loader.num_workers:
            give_out(batches)
            until(lambda: dataset.present.sum() >= loader.num_workers)
    assert loader.num_workers > 1
    assert f'num_workers="auto": {loader.decisions[-1]}' in shown(loader.report())
