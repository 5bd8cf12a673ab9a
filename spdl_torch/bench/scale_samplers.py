"""The memory of a sampler while an epoch runs: bytes beyond what the process had before it."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["measure_sampler"]

_TAKEN = 20_000


def measure_sampler(name: str, num_samples: int, num_ranks: int) -> dict[str, float]:
    """Begin an epoch, take up to 20,000 of its indices, look at the memory, drop it.

    name: ``torch, shuffle`` and ``ours, shuffle``: the sampler of a loader with shuffle=True;
    ``torch, distributed`` and ``ours, distributed``: the DistributedSampler of rank 0.
    Returns: ``begin_ms`` to the first index; ``per_second``: indices; ``held_mib``: with the last
        index in hand; ``most_mib``: the most that was seen meanwhile, sampled every 2 ms.
    """
    sampler = _make(name, num_samples, num_ranks)
    gc.collect()
    _give_back()
    before = _private_bytes()
    with _Peak() as peak:
        start = time.perf_counter()
        indices = iter(sampler)
        next(indices)
        first = time.perf_counter()
        count = sum(1 for _ in itertools.islice(indices, _TAKEN))
        last = time.perf_counter()
        _give_back()  # freed memory must not count as held
        held = _private_bytes()
    del indices
    figures = {
        "begin_ms": (first - start) * 1e3,
        "held_mib": max(0.0, held - before) / 2**20,
        "most_mib": max(0.0, max(peak.bytes, held) - before) / 2**20,
    }
    if count:
        figures["per_second"] = count / (last - first)
    return figures


def _make(name: str, num_samples: int, num_ranks: int) -> Iterable[int]:
    import torch

    import spdl_torch

    dataset: Any = range(num_samples)
    library, _, kind = name.partition(", ")
    if kind == "distributed":
        sampler_class: Any = torch.utils.data.DistributedSampler
        if library == "ours":
            sampler_class = spdl_torch.DistributedSampler
        made: Iterable[int] = sampler_class(dataset, num_replicas=num_ranks, rank=0)
        return made
    loader_class: Any = spdl_torch.DataLoader if library == "ours" else torch.utils.data.DataLoader
    loader = loader_class(dataset, batch_size=256, shuffle=True)
    return _Flat(loader.batch_sampler)


class _Flat:
    """The indices of batches, as a loader pulls them: its batch sampler."""

    def __init__(self, batch_sampler: Iterable[list[int]]) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self.batch_sampler)


class _Peak:
    """Looks at the memory again and again on a thread of its own."""

    _SECONDS = 0.002

    def __init__(self) -> None:
        self.bytes = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peak")

    def __enter__(self) -> _Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._SECONDS):
            self.bytes = max(self.bytes, _private_bytes())


def _private_bytes() -> float:
    """Return this process's anonymous memory; cheap, since the kernel keeps the count."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0.0  # not Linux: no number rather than a wrong one
    for line in text.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024.0
    return 0.0


def _give_back() -> None:
    """Have the C library return free memory to the system, if it is glibc."""
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
