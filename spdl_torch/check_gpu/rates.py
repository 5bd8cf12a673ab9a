"""Measure the rate at which batches arrive, and what loading costs training.

Contenders run in turns, so that a machine that slows down slows all of them down. Nothing that was
loaded before a clock starts counts: copies begin after the start, and loaders are drained first.
"""

from __future__ import annotations

import queue
import statistics
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchLoader, Dataset, RandomSampler

from ..data.folder import ImageFolder
from ..io._transfer import cuda
from ..io._transfer.transfer import Staged, Transfer
from ..loader.backends.transfer_stage import most_pieces
from ..loader.dataloader import DataLoader
from ..machine.limits import whole_cores
from ..measuring.hand_over import WARM_UP as HAND_OVER_WARM_UP, hand_overs, quantile
from ..nn import ToFloat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from .sheet import Sheet

BATCH = 256
PIXELS = 224
WARM_UP = 3
COPY_MEGABYTES = (9.6, 38.5, 154.0)
_LEAST_JUDGED_MEGABYTES = 38.5
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
OUTSTANDING = 3
"""Staged batches that wait for the loop or are in transit."""
_FULL_SPEED = 0.95
"""The share of the rate without loading at which training counts as not held back."""
_AHEAD = 1.1
"""The rate of loading alone over that of training without loading from which a loader can be asked
for full speed; below, the cores are the limit, whichever loader it is."""


def check_copies(sheet: Sheet, rounds: int = 3) -> None:
    """Compare transfers with a loop of bare pinned copies."""
    for megabytes in COPY_MEGABYTES:
        num_bytes = int(megabytes * 1e6)
        ways: dict[str, Callable[[], float]] = {
            "bare": partial(_bare_copies, num_bytes),
            **{
                name: partial(staged_copies, num_bytes, sources)
                for name, sources in SOURCES.items()
            },
        }
        rates = interleaved(ways, rounds)
        size = f"{megabytes:g}MB"
        sheet.note(f"copy_{size}_bare_gigabytes_per_second", num_bytes * rates["bare"] / 1e9)
        for name in SOURCES:
            ratio = rates[name] / rates["bare"]
            if megabytes >= _LEAST_JUDGED_MEGABYTES and name != "pageable":
                sheet.at_least(f"copy_{size}_{name}_over_bare", ratio, 0.95)
            else:
                sheet.note(f"copy_{size}_{name}_over_bare", ratio)


def _num_copies(num_bytes: int) -> int:
    return max(10 * OUTSTANDING, int(4e9 / num_bytes))


def _bare_copies(num_bytes: int) -> float:
    return bare_copies(torch.zeros(num_bytes, dtype=torch.uint8).pin_memory())


def bare_copies(source: Tensor) -> float:
    """Return copies per second of one pinned buffer on a stream that has nothing else."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # untyped in torch
    with torch.cuda.stream(stream):
        target = torch.empty_like(source, device="cuda")
        for _ in range(WARM_UP):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        count, start = _num_copies(source.nbytes), time.perf_counter()
        for _ in range(count):
            target.copy_(source, non_blocking=True)
        stream.synchronize()
        return count / (time.perf_counter() - start)


def _slots(transfer: Transfer, num_bytes: int) -> Callable[[], Tensor]:
    """Return a function that gives each batch the memory in which a loader would have made it."""
    memory = transfer.batch_memory(most_pieces(OUTSTANDING))

    def slot() -> Tensor:
        memory.begin()
        found = memory.room(num_bytes)
        memory.end()
        if found is None:
            raise RuntimeError(f"no pinned memory is free for {num_bytes} bytes")
        return found

    return slot


def _pinned(transfer: Transfer, num_bytes: int) -> Callable[[], Tensor]:
    """Return a function that gives each batch the same memory, pinned by torch."""
    source = torch.zeros(num_bytes, dtype=torch.uint8).pin_memory()
    return lambda: source


def _pageable(transfer: Transfer, num_bytes: int) -> Callable[[], Tensor]:
    """Return a function that gives each batch the same memory, from which it is packed."""
    source = torch.zeros(num_bytes, dtype=torch.uint8)
    return lambda: source


SOURCES: dict[str, Callable[[Transfer, int], Callable[[], Tensor]]] = {
    "slots": _slots,
    "pinned": _pinned,
    "pageable": _pageable,
}


def staged_copies(
    num_bytes: int, sources: Callable[[Transfer, int], Callable[[], Tensor]]
) -> float:
    """Return batches per second that one thread makes and stages, and this one receives."""
    staged: queue.SimpleQueue[Staged | BaseException] = queue.SimpleQueue()
    places, go = threading.Semaphore(OUTSTANDING), threading.Event()
    count, transfer = _num_copies(num_bytes), Transfer("cuda")
    source = sources(transfer, num_bytes)

    def stage() -> None:
        try:
            for number in range(WARM_UP + count):
                if number == WARM_UP:
                    go.wait()
                places.acquire()
                staged.put(transfer.stage(source()))
        except BaseException as error:
            staged.put(error)

    thread = threading.Thread(target=stage, name="check-gpu-stage", daemon=True)
    thread.start()
    start = 0.0
    for number in range(WARM_UP + count):
        if number == WARM_UP:
            torch.cuda.synchronize()
            start = time.perf_counter()
            go.set()
        batch = staged.get()
        if isinstance(batch, BaseException):
            raise batch
        batch.receive()
        places.release()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    thread.join()
    return count / seconds


def check_hand_over(sheet: Sheet, num_batches: int = 300) -> None:
    """Measure the CPU time that the loop's thread spends on a batch that is ready: receiving it,
    making its stream wait for the copy and guarding its memory; and requesting another one. Beside
    it that of a loop which moves the pinned batches of torch's loader.
    """
    data = _Pictures(8 * (HAND_OVER_WARM_UP + num_batches))
    theirs: Any = TorchLoader(data, 8, num_workers=2, pin_memory=True)
    torchs = _note_hand_over(sheet, "torch", iter(theirs), num_batches, _moved)
    for name, isolation in _PLACES.items():
        ours: Any = DataLoader(data, 8, num_workers=2, isolation=isolation, device="cuda")
        received = _note_hand_over(sheet, name, iter(ours), num_batches)
        sheet.at_most(f"hand_over_{name}_over_torch", received / torchs, 1.0)


def _note_hand_over(
    sheet: Sheet,
    name: str,
    batches: Iterator[Any],
    num_batches: int,
    move: Callable[[Any], Any] | None = None,
) -> float:
    """Note the medians; return that of receiving a batch, in microseconds."""
    took = hand_overs(batches, num_batches, _settle, move)
    receiving = statistics.median(each.receiving_us for each in took)
    sheet.note(f"hand_over_{name}_microseconds", receiving)
    sheet.note(f"asking_{name}_microseconds", statistics.median(each.asking_us for each in took))
    sheet.note(f"next_{name}_microseconds", statistics.median(each.total_us for each in took))
    return receiving


def _moved(batch: list[Tensor]) -> list[Tensor]:
    return [each.to("cuda", non_blocking=True) for each in batch]


def check_launches(sheet: Sheet, num_launches: int = 2000) -> None:
    """Measure how long launching a kernel takes, alone and while another thread locks memory."""
    place, backend = torch.zeros(1, device="cuda"), cuda.CudaBackend(torch.device("cuda", 0))
    is_over, megabytes = threading.Event(), 38.5

    def lock() -> None:
        while not is_over.is_set():
            backend.pinned(int(megabytes * 1e6))

    locking = threading.Thread(target=lock, name="check-gpu-lock", daemon=True)
    for name in ("idle", "while_locking"):
        if name == "while_locking":
            locking.start()
        took = list[float]()
        for _ in range(num_launches):
            start = time.perf_counter()
            place.add_(1)
            took.append((time.perf_counter() - start) * 1e6)
        torch.cuda.synchronize()
        for share in (0.5, 0.99):
            sheet.note(f"launch_{name}_p{share * 100:.0f}_microseconds", quantile(took, share))
        sheet.note(f"launch_{name}_longest_microseconds", max(took))
    is_over.set()
    locking.join()


_PLACES: dict[str, Literal["thread", "process"]] = {"threads": "thread", "processes": "process"}


def _settle() -> None:
    """Return when the next batch has arrived."""
    torch.cuda.synchronize()
    time.sleep(0.004)


class _Pictures(Dataset[Any]):
    """Small pictures that take no time to make; 8 of them are a batch of 1.2 MB."""

    thread_safe = True

    def __init__(self, num_samples: int) -> None:
        self._picture = torch.zeros(3, PIXELS, PIXELS, dtype=torch.uint8)
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._picture, index


def check_training(sheet: Sheet, folder: Path, *, rounds: int = 3, seconds: float = 8.0) -> None:
    """Train resnet50 in bfloat16 on photographs in ``folder``, and on a batch in device memory."""
    trainer, cores = _Trainer(), whole_cores()
    sources: dict[str, tuple[Callable[[], Iterable[Any]], int]] = {
        "synthetic": (_synthetic, 0),
        "ours": (partial(_our_batches, folder, min(16, cores)), 2 * min(16, cores)),
        "torch": (partial(_torchs_batches, folder, min(16, cores)), 2 * min(16, cores)),
    }
    ways: dict[str, Callable[[], float]] = {
        name: partial(trainer.rate, name, *source, seconds) for name, source in sources.items()
    }
    for name in ("ours", "torch"):
        ways[f"{name} alone"] = partial(_loading_rate, *sources[name], seconds / 2)
    judge_training(sheet, interleaved(ways, rounds))
    idle, busy = trainer.steps["synthetic"], trainer.steps["ours"]
    sheet.at_most("step_p50_busy_over_idle", quantile(busy, 0.5) / quantile(idle, 0.5), 1.03)
    sheet.at_most("step_p99_busy_over_idle", quantile(busy, 0.99) / quantile(idle, 0.99), 1.10)


def judge_training(sheet: Sheet, rates: dict[str, float]) -> None:
    """Judge training by its rates in batches a second: ``synthetic`` without loading, ``ours`` and
    ``torch`` with these loaders; ``ours alone`` and ``torch alone`` are of loading without
    training.
    """
    for name, rate in rates.items():
        kind = "load" if name.endswith(" alone") else "train"
        name = name.removesuffix(" alone")
        sheet.note(f"{kind}_{name}_images_per_second", rate * BATCH)
    share = rates["ours"] / rates["synthetic"]
    reach = rates["ours alone"] / rates["synthetic"]
    if reach >= _AHEAD:
        sheet.at_least("train_ours_over_synthetic", share, _FULL_SPEED)
    else:
        sheet.skip(
            "train_ours_over_synthetic",
            f"{share:.3g}; loading alone reaches {reach:.3g}, so the cores are the limit",
        )
    ratio = rates["ours"] / rates["torch"]
    if share >= _FULL_SPEED:  # the GPU is the limit, of torch's loader as well
        sheet.note("train_ours_over_torch", ratio)
    else:
        sheet.at_least("train_ours_over_torch", ratio, 1.0)
    sheet.at_least("load_ours_over_torch", rates["ours alone"] / rates["torch alone"], 1.0)


def _loading_rate(batches_of: Callable[[], Iterable[Any]], num_ahead: int, seconds: float) -> float:
    """Return the batches a second that a loader gives a loop which does nothing with them."""
    batches = iter(batches_of())
    _drain(batches, num_ahead)
    count, start = 0, time.perf_counter()
    while not count or time.perf_counter() - start < seconds:
        next(batches)
        count += 1
    torch.cuda.synchronize()
    return count / (time.perf_counter() - start)


def _drain(batches: Iterator[Any], num_ahead: int) -> None:
    """Take the batches that a loader may have ready, ``num_ahead`` and those on their way."""
    for _ in range(num_ahead + OUTSTANDING if num_ahead else 0):
        next(batches)
    torch.cuda.synchronize()


class _Trainer:
    """A model, and how long its steps took on the device."""

    def __init__(self) -> None:
        from torchvision.models import resnet50

        self._model = resnet50().to("cuda", memory_format=torch.channels_last).train()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        self._to_float = ToFloat(_MEAN, _STD).to("cuda")
        self.steps: dict[str, list[float]] = {}
        """Milliseconds of each step, by the name of the source of the batches."""

    def rate(
        self, name: str, batches_of: Callable[[], Iterable[Any]], num_ahead: int, seconds: float
    ) -> float:
        """Return steps per second.

        num_ahead: batches that a loader may have ready when the clock starts; they are thrown away.
        """
        batches = iter(batches_of())
        for _ in range(WARM_UP):
            self._step(*next(batches))
        torch.cuda.synchronize()
        _drain(batches, num_ahead)
        marks: list[Any] = []
        start = time.perf_counter()
        while not marks or time.perf_counter() - start < seconds:
            images, labels = next(batches)
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # untyped in torch
            before.record()  # after the wait for the copy, which is the loader's
            self._step(images, labels)
            after.record()
            marks.append((before, after))
        torch.cuda.synchronize()
        rate = len(marks) / (time.perf_counter() - start)
        self.steps.setdefault(name, []).extend(one.elapsed_time(two) for one, two in marks)
        return rate

    def _step(self, images: Tensor, labels: Tensor) -> None:
        images, labels = (each.to("cuda", non_blocking=True) for each in (images, labels))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(self._model(self._to_float(images)), labels)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        self._optimizer.step()


def _synthetic() -> Iterator[tuple[Tensor, Tensor]]:
    images = torch.randint(0, 256, (BATCH, 3, PIXELS, PIXELS), dtype=torch.uint8, device="cuda")
    labels = torch.zeros(BATCH, dtype=torch.int64, device="cuda")
    while True:
        yield images, labels


def _our_batches(folder: Path, workers: int) -> Iterable[Any]:
    """Return those of a loader which is told nothing but the device: it chooses where it works."""
    data = ImageFolder(folder, _augmentation())
    return DataLoader(data, BATCH, sampler=_endless(data), num_workers=workers, device="cuda")


def _torchs_batches(folder: Path, workers: int) -> Iterable[Any]:
    from torchvision.datasets import ImageFolder as TorchFolder

    data = TorchFolder(folder, _augmentation())
    return TorchLoader(data, BATCH, sampler=_endless(data), num_workers=workers, pin_memory=True)


def _endless(data: Any) -> RandomSampler:
    return RandomSampler(data, replacement=True, num_samples=10**7)


def _augmentation() -> Any:
    from torchvision import transforms

    return transforms.Compose(
        (
            transforms.RandomResizedCrop(PIXELS),
            transforms.RandomHorizontalFlip(),
            transforms.PILToTensor(),
        )
    )


def interleaved(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Return the median of each way's measurements, taken in turns."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, measure in ways.items():
            found[name].append(measure())
    return {name: statistics.median(figures) for name, figures in found.items()}
