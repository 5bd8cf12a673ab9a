"""What the DataLoader tests share: datasets, torch's worker protocol as a model, thread checks."""

from __future__ import annotations

import copy
import gc
import importlib
import itertools
import json
import os
import textwrap
import warnings
from collections import deque
from time import monotonic
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.utils.data as torch_data
from torch.utils.data import dataloader as torch_dataloader
from torch.utils.data._utils import worker as torch_worker

from spdl_torch import DataLoader
from support import warm
from support.gates import PATIENCE_SECONDS, spdl_threads as loader_threads

_COLLECTED_AGAIN_SECONDS = 0.5


def library(name: str) -> Any:
    """Import a library; where it is missing the test is skipped, or fails if it may not be."""
    if os.environ.get("SPDL_TORCH_REQUIRE_LIBRARIES") == "1":
        return importlib.import_module(name)
    return pytest.importorskip(name, exc_type=ImportError)


class ThreadLoader(DataLoader):
    """A loader whose workers are threads, whatever its dataset: for tests about threads, and for
    datasets that share gates, events or counters with the test."""

    def __init__(self, *args: Any, isolation: Any = "thread", **options: Any) -> None:
        super().__init__(*args, isolation=isolation, **options)


def frozen(value: Any) -> Any:
    """A batch as nested tuples that compare by type, dtype, shape and every bit."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().resolve_neg().flatten().view(torch.uint8)
        return (kind, str(value.dtype), tuple(value.shape), plain.numpy().tobytes())
    if hasattr(value, "dtype"):
        return (kind, str(value.dtype), value.shape, repr(value.tolist()))
    if isinstance(value, dict):
        return (kind, *((key, frozen(entry)) for key, entry in value.items()))
    if isinstance(value, list | tuple):
        return (kind, *(frozen(entry) for entry in value))
    return (kind, repr(value))


def epoch_of(loader: Any, batch: Any = frozen, error: Any = type) -> list[Any]:
    """One epoch as the training loop sees it: what these make of each batch, and of each error that
    came instead."""
    events: list[Any] = []
    batches = iter(loader)
    while True:
        assert len(events) < 1000, "the epoch does not end"
        try:
            events.append(batch(next(batches)))
        except StopIteration:
            return events
        except Exception as raised:
            events.append(error(raised))


def batches_of(batches: Any) -> list[Any]:
    """What a loader or an iterator gives, as plain numbers."""
    return [batch.tolist() if hasattr(batch, "tolist") else batch for batch in batches]


def stored(loader: Any) -> Any:
    """The loader's state, as it comes back from JSON."""
    return json.loads(json.dumps(loader.state_dict(), allow_nan=False))


def resumed(loader: Any, state: Any) -> Any:
    """The loader, which goes on where the state says."""
    loader.load_state_dict(state)
    return loader


class ModelLoader(torch_data.DataLoader):
    """torch's DataLoader with its worker processes played in turn by the calling thread.

    The oracle for ``num_workers > 0``: exact, and cheap enough for hundreds of examples.
    ``test_model_agrees_with_torch`` holds it against torch's real processes.
    """

    def _get_iterator(self):
        return super()._get_iterator() if self.num_workers == 0 else _PlayedWorkers(self)

    def check_worker_number_rationality(self):
        """No process is started: nothing to warn of."""


class _PlayedWorkers(torch_dataloader._BaseDataLoaderIter):
    def __init__(self, loader: ModelLoader) -> None:
        super().__init__(loader)
        self._prefetched = loader.prefetch_factor * loader.num_workers
        self._infos = [
            torch_worker.WorkerInfo(
                id=worker,
                num_workers=loader.num_workers,
                seed=self._base_seed + worker,
                dataset=copy.copy(loader.dataset),
            )
            for worker in range(loader.num_workers)
        ]
        self._reset(loader, first_iter=True)

    def _reset(self, loader, first_iter=False):
        super()._reset(loader, first_iter)
        self._fetchers: list[Any] = [None] * self._num_workers
        self._active = [True] * self._num_workers
        self._turns = itertools.cycle(range(self._num_workers))
        self._tasks: deque[tuple[int, Any]] = deque()
        for _ in range(self._prefetched):
            self._send()

    def _send(self):
        try:
            index = self._next_index()
        except StopIteration:
            return
        for worker in itertools.islice(self._turns, self._num_workers):
            if self._active[worker]:
                self._tasks.append((worker, index))
                return

    def _next_data(self):
        while self._tasks:
            worker, index = self._tasks.popleft()
            if not self._active[worker]:
                continue
            try:
                samples = self._fetch(worker, index)
            except StopIteration:
                self._active[worker] = False
                self._send()
                continue
            except Exception:
                self._send()
                raise
            self._send()
            return self._collate_fn(samples)
        raise StopIteration

    def _fetch(self, worker, index):
        # Samples are collated by the caller: under a worker info torch's collate goes through
        # shared memory.
        with patch.object(torch_worker, "_worker_info", self._infos[worker]):
            if self._fetchers[worker] is None:
                self._fetchers[worker] = torch_dataloader._DatasetKind.create_fetcher(
                    self._dataset_kind,
                    self._infos[worker].dataset,
                    self._auto_collation,
                    lambda samples: samples,
                    self._drop_last,
                )
            return self._fetchers[worker].fetch(index)


def torch_loader(*args: Any, **kwargs: Any) -> torch_data.DataLoader:
    """torch's own DataLoader, without its advice on how many processes this machine bears."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        return torch_data.DataLoader(*args, **kwargs)


def assert_threads_end(threads: list[Any] | None = None) -> None:
    """Every loader thread (or each of ``threads``) ends, with no help but collections of garbage.

    One may come too early for an iterator that an error's traceback keeps: the worker that has
    just delivered the error still refers to it, or another thread's collection is under way, which
    makes this one do nothing. A program that goes on collects again.
    """
    gc.collect()
    until = monotonic() + PATIENCE_SECONDS
    for thread in loader_threads() if threads is None else threads:
        thread.join(_COLLECTED_AGAIN_SECONDS)
        while thread.is_alive():
            assert monotonic() < until, f"{thread.name} is still alive"
            gc.collect()
            thread.join(_COLLECTED_AGAIN_SECONDS)


def run_script(body: str, **environment: str) -> Any:
    """Run ``body`` in a process of its own; end it if it hangs."""
    options = {"timeout": 4 * PATIENCE_SECONDS, "ends_whole": True}
    return warm.run(["-c", script(body)], env={**os.environ, **environment}, **options)


def script(body: str) -> str:
    """A program text: the import every script here needs, then ``body``. It forks, as tests do."""
    head = (
        f"from {DataLoader.__module__} import DataLoader\n"
        'import multiprocessing; multiprocessing.set_start_method("fork")\n'
    )
    return head + textwrap.dedent(body)
