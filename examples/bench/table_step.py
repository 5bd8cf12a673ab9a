"""``step``: what loading costs the training step when the loader is not the bottleneck.

``resnet18`` trains on photographs, cropped at random to 224 x 224 (a CPU sees 64 x 64 of them), and
with ``--full``, for a GPU, ``resnet50`` in bfloat16;
``transformer`` on padded texts. A measurement is one process in which blocks of steps alternate:
cached batches (headspace: what training could do if loading were free), and the loader, in full
swing. ``step / headspace`` is the median, over pairs of adjacent blocks, of the median step with
the loader, waiting for its batch included, over the median step without.

``p50`` and ``p99`` are of single steps, waiting not included: all steps of a run with the loader
over all without. The 99th percentile of fewer than 100 steps is the longest of them.
"""

from __future__ import annotations

import itertools
import time
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from . import images, table_photographs, table_tiny
from .hand_over import quantile
from .image_peers import spdl_decoding
from .loaders import Work, nothing, ours, spdl_batches, torch_loader
from .report import Goal, Metric, cost
from .tables import Contender, Table
from .trainers import make_trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .tables import BenchOptions

_MODELS = ("resnet18", "transformer", "resnet50")
_BATCH = {("resnet18", "cpu"): 16, ("transformer", "cpu"): 8, ("resnet18", "cuda"): 64}
_BATCH |= {("transformer", "cuda"): 64, ("resnet50", "cpu"): 4, ("resnet50", "cuda"): 256}
_TRAINED_PIXELS = 64
"""The size of pictures on a CPU, which would take a second to train on a batch of whole ones."""
METRICS = (
    cost("step_ratio", "step / headspace", 3),
    cost("step_p50_ratio", "p50 / idle", 3),
    cost("step_p99_ratio", "p99 / idle", 3),
    Metric("per_second", "samples/s"),
    cost("step_ms", "step, ms", 1),
    cost("headspace_ms", "headspace, ms", 1),
    cost("wait_ratio", "waiting for data, %", 1),
    cost("peak_mib", "peak MiB"),
)


def _prepare(options: BenchOptions, folder: Path) -> dict[str, Any]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {
        **images.photographs_for_all(options, folder),
        "crop": True,
        "device": device,
        "pairs": 2 if options.smoke else max(2, round(2 * options.seconds)),
        "steps": 2 if options.smoke else {"cpu": 5, "cuda": 40}[device],
        "smoke": options.smoke,
    }
    # The trainer has the other one of two cores.
    return {**found, "num_workers": 1} if device == "cpu" else found


def _work(settings: dict[str, Any], num_batches: int, model: str, data: str) -> Work:
    batch = 4 if settings["smoke"] else _BATCH[model, settings["device"]]
    num_samples = num_batches * batch
    if model != "transformer":
        one = {**settings, "batch_size": batch}
        return table_photographs.make_work(one, num_samples, data)
    return Work(
        dataset=table_tiny.Texts(num_samples),
        collate=table_tiny.pad_to_most,
        num_samples=num_samples,
        batch_size=batch,
        num_workers=settings["num_workers"],
    )


def measure(contender: Contender, settings: dict[str, Any]) -> dict[str, float]:
    """Measure pairs of blocks, every other pair the other way round, so that a drift cancels."""
    import torch

    torch.set_num_threads(1)
    model, device = contender.arguments["model"], settings["device"]
    pairs, steps = settings["pairs"], settings["steps"]
    train = _on_small(make_trainer(model, device), device)
    work = _work(settings, pairs * steps + _WARM_STEPS, **contender.arguments)
    loaded_batch = work.load_group(list(range(work.batch_size)))
    cached = _pictures(loaded_batch).to(device)
    batches = iter(_run_of(contender, settings)(work)())
    clock: Clock = DeviceClock() if device == "cuda" else Clock()
    for _ in range(_WARM_STEPS):
        train(cached)
        train(next(batches, cached))
    blocks: list[dict[bool, float]] = []
    singles: dict[bool, list[float]] = {False: [], True: []}
    waits = []
    for number in range(pairs):
        block: dict[bool, float] = {}
        for with_loader in (False, True) if number % 2 == 0 else (True, False):
            idle = not with_loader or contender.run is nothing
            source = itertools.repeat(cached) if idle else batches
            found = _block(train, cached, source, steps, clock)
            block[with_loader] = found.seconds / steps
            singles[with_loader] += found.singles
            if with_loader:
                waits.append(found.waited / found.seconds)
        blocks.append(block)
    return {
        "step_ratio": median(block[True] / block[False] for block in blocks),
        "step_p50_ratio": quantile(singles[True], 0.5) / quantile(singles[False], 0.5),
        "step_p99_ratio": quantile(singles[True], 0.99) / quantile(singles[False], 0.99),
        "per_second": work.batch_size / median(block[True] for block in blocks),
        "step_ms": median(block[True] for block in blocks) * 1e3,
        "headspace_ms": median(block[False] for block in blocks) * 1e3,
        "wait_ratio": median(waits) * 100,
    }


_WARM_STEPS = 3


class Block(NamedTuple):
    """The durations of consecutive steps, in seconds."""

    seconds: float
    """All of them together."""
    waited: float
    """Waiting for batches."""
    singles: list[float]
    """Each step, without waiting."""


def _block(
    train: Callable[[Any], None], cached: Any, source: Iterator[Any], steps: int, clock: Clock
) -> Block:
    waited, marks = 0.0, []
    train(cached)  # meanwhile the loader catches up on the batches of the previous block
    clock.settle()
    start = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        batch = next(source)
        waited += time.perf_counter() - asked
        before = clock.mark()
        train(batch)
        marks.append((before, clock.mark()))
    clock.settle()
    seconds = time.perf_counter() - start
    return Block(seconds, waited, [clock.between(*each) for each in marks])


class Clock:
    """The clock for a CPU, on which a step is done when the call returns."""

    def settle(self) -> None:
        """Wait for what was launched."""

    def mark(self) -> Any:
        """Return this point of the work."""
        return time.perf_counter()

    def between(self, one: Any, other: Any) -> float:
        """Return the seconds between two points that have passed."""
        return float(other - one)


class DeviceClock(Clock):
    """The clock for a GPU."""

    def settle(self) -> None:
        import torch

        torch.cuda.synchronize()

    def mark(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in torch
        event.record()
        return event

    def between(self, one: Any, other: Any) -> float:
        return float(one.elapsed_time(other)) / 1e3


def _pictures(batch: Any) -> Any:
    pictures = batch[0] if isinstance(batch, list | tuple) else batch
    if pictures.ndim == 4 and pictures.shape[-1] == 3:  # SPDL's are (N, H, W, 3)
        pictures = pictures.permute(0, 3, 1, 2)
    return pictures


def _on_small(train: Callable[[Any], None], device: str) -> Callable[[Any], None]:
    def step(batch: Any) -> None:
        inputs = _pictures(batch)
        if inputs.ndim == 4 and device == "cpu":
            inputs = inputs[:, :, :_TRAINED_PIXELS, :_TRAINED_PIXELS]
        train(inputs)

    return step


def _run_of(contender: Contender, settings: dict[str, Any]) -> Callable[..., Any]:
    """Return the loader, with what it needs on a GPU."""
    function = getattr(contender.run, "func", contender.run)
    extra: dict[str, Any] = {"crop": True} if function is spdl_decoding else {}
    if settings["device"] == "cuda" and function is ours:
        extra = {"device": "cuda"}
    if settings["device"] == "cuda" and function is torch_loader:
        extra = {"pin_memory": True}
    return partial(contender.run, **extra)


def _contenders(model: str) -> Iterator[Contender]:
    photographs = model != "transformer"
    for name, run, data, *needs in (
        ("cached batches", nothing, "folder"),
        ("ours, threads", ours, "folder"),
        ("ours, process", partial(ours, isolation="process"), "folder"),
        ("torch", torch_loader, "torchvision"),
        ("SPDL", spdl_decoding if photographs else spdl_batches, "pillow", "spdl"),
    ):
        yield Contender(
            f"{model}: {name}",
            run,
            tuple(needs),
            {"model": model, "data": data},
            smoke=model == "resnet18" and name == "ours, threads",
            is_usual=model != "resnet50",
            decodes_with_spdl=photographs and bool(needs),
        )


def _goals(model: str) -> Iterator[Goal]:
    row = f"{model}: ours, threads"
    yield Goal("step_ratio", row, at_most=1.05)
    yield Goal("step_p50_ratio", row, at_most=1.03)
    yield Goal("step_p99_ratio", row, at_most=1.10)
    yield Goal("step_ratio", f"{model}: ours, process", at_most=1.02)
    yield Goal("step_ratio", row, f"{model}: torch", at_most=1.0)
    yield Goal("step_ratio", row, f"{model}: SPDL")


TABLES = (
    Table(
        name="step",
        title="The training step beside a loader that is not the bottleneck",
        metrics=METRICS,
        contenders=tuple(one for model in _MODELS for one in _contenders(model)),
        prepare=_prepare,
        measure=measure,
        goals=tuple(one for model in _MODELS for one in _goals(model)),
    ),
)
