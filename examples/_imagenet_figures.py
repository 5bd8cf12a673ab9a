"""The metrics that the ImageNet programs print: loss, accuracy, images a second, and waiting."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.utils.data import DataLoader


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Means over images."""

    num_images: int
    loss: float
    acc1: float
    """Percent."""
    acc5: float

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}  acc1 {self.acc1:.2f}  acc5 {self.acc5:.2f}"


class Meter:
    """Adds up loss and hits on the device, so that no step has to wait for its result."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)

    def add(self, logits: Tensor, targets: Tensor, loss: Tensor) -> None:
        """Add a batch: (N, classes), (N,) or (N, classes), and the mean loss."""
        labels = targets if targets.ndim == 1 else targets.argmax(1)
        best = logits.detach().topk(min(5, logits.shape[1]), 1).indices
        hits = best == labels[:, None]
        num_images = len(labels)
        for place, value in enumerate((loss.detach() * num_images, hits[:, 0].sum(), hits.sum())):
            self._sums[place] += value
        self._sums[3] += num_images

    def figures(self, total: Callable[[Tensor], Tensor] = lambda sums: sums) -> Figures:
        """Return the means so far; ``total`` adds up over ranks. Waits for the device."""
        loss, top1, top5, count = total(self._sums.clone()).tolist()
        images = max(count, 1)
        return Figures(
            num_images=int(count),
            loss=loss / images,
            acc1=100 * top1 / images,
            acc5=100 * top5 / images,
        )


class Clock:
    """Images a second, without the first ``skip`` batches."""

    def __init__(self, device: torch.device, skip: int) -> None:
        self.skip = skip
        self._device = device
        self._num_batches = self._num_images = 0
        self._begin = time.perf_counter()

    def step(self, num_images: int) -> None:
        """Count a batch that is done, or on its way through the device."""
        self._num_batches += 1
        if self._num_batches > self.skip:
            self._num_images += num_images
        elif self._num_batches == self.skip:
            self._wait_for_device()
            self._begin = time.perf_counter()

    def rate(self) -> float:
        """Return the images a second; 0 without any."""
        self._wait_for_device()
        return self._num_images / (time.perf_counter() - self._begin)

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Progress:
    """The lines that are printed during an epoch."""

    def __init__(self, epoch: str, meter: Meter, *, num_steps: int, images_per_step: int) -> None:
        self._epoch, self._meter = epoch, meter
        self._num_steps, self._images_per_step = num_steps, images_per_step
        self._step, self._time = 0, time.perf_counter()

    def line(
        self,
        step: int,
        learning_rate: float,
        waiting: float | None,
        total: Callable[[Tensor], Tensor],
    ) -> str:
        """Return the progress as a line; every rank calls it, because ``total`` adds up over them.

        Raises: FloatingPointError: the loss is not finite.
        """
        figures = self._meter.figures(total)
        if not figures.loss < float("inf"):
            raise FloatingPointError(
                f"the loss is {figures.loss} in {self._epoch}. Lower --lr, raise "
                "--lr-warmup-epochs, or leave out --amp fp16."
            )
        now = time.perf_counter()
        rate = (step - self._step) * self._images_per_step / (now - self._time)
        self._step, self._time = step, now
        waited = "" if waiting is None else f"  waiting for data {waiting:.0%}"
        return (
            f"{self._epoch}  step {step}/{self._num_steps}  {rate:.0f} images/s  {figures}  "
            f"lr {learning_rate:.4f}{waited}"
        )


class Waiting:
    """Iterates over a loader, and measures the share of the time spent waiting for it."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self._begin = time.perf_counter()
        self._waited = 0.0

    def __iter__(self) -> Iterator[Any]:
        asked = self._begin = time.perf_counter()
        for batch in self.loader:
            self._waited += time.perf_counter() - asked
            yield batch
            asked = time.perf_counter()

    def ratio(self) -> float:
        """Return the share, 0 to 1: ours by its own statistics, torch's by the clock around it."""
        if hasattr(self.loader, "snapshot"):
            return self.loader.snapshot().consumer_wait_ratio
        return self._waited / (time.perf_counter() - self._begin)


def describe_loading(loader: Any) -> str:
    """Describe what our loader's threads did in the epoch, one line a stage; empty for torch's."""
    if not hasattr(loader, "snapshot"):
        return ""
    return "".join(
        f"\n  {stage.name}: {stage.concurrency} thread(s) busy {stage.busy_ratio:.0%}, "
        f"CPU {stage.cpu_ratio:.0%} of that"
        for stage in loader.snapshot().stages
        if stage.tasks.num_tasks
    )
