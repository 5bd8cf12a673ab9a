"""``step``: what loading costs the training step when the loader is not the bottleneck.

``resnet18`` trains on photographs, cropped at random to 224 x 224 (a CPU sees 64 x 64 of them), and
with ``--full``, for a GPU, ``resnet50`` in bfloat16. A measurement is one process in which blocks
of steps alternate: cached batches (headspace: what training could do if loading were free), and the
loader, in full swing. ``step / headspace`` is the median, over pairs of adjacent blocks, of the
median step with the loader, waiting for its batch included, over the median step without.

``p50`` and ``p99`` are of single steps, waiting not included: all steps of a run with the loader
over all without.
"""

from __future__ import annotations

import itertools
import time
from functools import partial
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torchvision
from torch.nn.functional import cross_entropy

from .images import spdl_decoding
from .loaders import nothing, ours, torch_loader
from .recipe import photographs
from .report import Goal, Metric
from .table_photographs import make_work
from .tables import Contender, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .tables import BenchOptions

_MODELS = ("resnet18", "resnet50")
_BATCH = {("resnet18", "cpu"): 16, ("resnet18", "cuda"): 64}
_BATCH |= {("resnet50", "cpu"): 4, ("resnet50", "cuda"): 256}
_TRAINED_PIXELS = 64
"""The size of pictures on a CPU, which would take a second to train on a batch of whole ones."""
_WARM_STEPS = 3
METRICS = (
    Metric("step_ratio", "step / headspace", 3),
    Metric("step_p50_ratio", "p50 / idle", 3),
    Metric("step_p99_ratio", "p99 / idle", 3),
    Metric("per_second", "samples/s"),
    Metric("step_ms", "step, ms", 1),
    Metric("headspace_ms", "headspace, ms", 1),
    Metric("wait_ratio", "waiting for data, %", 1),
    Metric("peak_mib", "peak MiB"),
)


def _prepare(options: BenchOptions, folder: Path) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {
        **photographs(options, folder),
        "crop": True,
        "device": device,
        "pairs": 2 if options.smoke else max(2, round(2 * options.seconds)),
        "steps": 2 if options.smoke else {"cpu": 5, "cuda": 40}[device],
        "smoke": options.smoke,
    }
    # The trainer has the other one of two cores.
    return {**found, "num_workers": 1} if device == "cpu" else found


def measure(contender: Contender, settings: dict[str, Any]) -> dict[str, float]:
    """Measure pairs of blocks, every other pair the other way round, so that a drift cancels."""
    torch.set_num_threads(1)
    model, device = contender.arguments["model"], settings["device"]
    pairs, steps = settings["pairs"], settings["steps"]
    train, clock = make_trainer(model, device), clock_of(device)
    batch_size = 4 if settings["smoke"] else _BATCH[model, device]
    num_samples = (pairs * steps + _WARM_STEPS) * batch_size
    work = make_work(
        {**settings, "batch_size": batch_size}, num_samples, contender.arguments["data"]
    )
    cached = _pictures(work.load_group(list(range(batch_size)))).to(device)
    batches = _run_of(contender, device)(work)()
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
            seconds, waited, each = _block(train, cached, source, steps, clock)
            block[with_loader] = seconds / steps
            singles[with_loader] += each
            if with_loader:
                waits.append(waited / seconds)
        blocks.append(block)
    loaded, idle_ones = (
        quantiles(singles[with_loader], n=100, method="inclusive") for with_loader in (True, False)
    )
    return {
        "step_ratio": median(block[True] / block[False] for block in blocks),
        "step_p50_ratio": loaded[49] / idle_ones[49],
        "step_p99_ratio": loaded[98] / idle_ones[98],
        "per_second": batch_size / median(block[True] for block in blocks),
        "step_ms": median(block[True] for block in blocks) * 1e3,
        "headspace_ms": median(block[False] for block in blocks) * 1e3,
        "wait_ratio": median(waits) * 100,
    }


def make_trainer(name: str, device: str) -> Callable[[Any], None]:
    """Return a function that does one step (forward, backward, SGD) on a batch of the loader, on
    the host or on ``device``; it returns when its kernels are launched."""
    model = getattr(torchvision.models, name)().to(device).train()
    is_large = name == "resnet50"
    if is_large:
        model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(batch: Any) -> None:
        pictures = _pictures(batch)
        if device == "cpu":
            pictures = pictures[:, :, :_TRAINED_PIXELS, :_TRAINED_PIXELS]
        # Loaders differ in the memory format of their batches, on which convolutions depend.
        pictures = pictures.to(device, non_blocking=True).contiguous().float().div_(255)
        labels = torch.zeros(len(pictures), dtype=torch.int64, device=device)
        with torch.autocast(device, torch.bfloat16, enabled=is_large):
            loss = cross_entropy(model(pictures), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        optimizer.step()

    return step


def _pictures(batch: Any) -> Any:
    pictures = batch[0] if isinstance(batch, list | tuple) else batch
    if pictures.shape[-1] == 3:  # SPDL's are (N, H, W, 3)
        pictures = pictures.permute(0, 3, 1, 2)
    return pictures


def _block(
    train: Callable[[Any], None], cached: Any, source: Iterator[Any], steps: int, clock: Clock
) -> tuple[float, float, list[float]]:
    """Make consecutive steps; return the seconds of all, of waiting for batches, and of each step
    without waiting."""
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
    return seconds, waited, [clock.between(*each) for each in marks]


class Clock(NamedTuple):
    """The clock for a device."""

    settle: Callable[[], None]
    """Waits for what was launched."""
    mark: Callable[[], Any]
    """Returns this point of the work."""
    between: Callable[[Any, Any], float]
    """Returns the seconds between two points that have passed."""


def clock_of(device: str) -> Clock:
    """Return the clock; on a CPU a step is done when the call returns."""
    if device == "cpu":
        return Clock(lambda: None, time.perf_counter, lambda one, other: other - one)

    def mark() -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in torch
        event.record()
        return event

    return Clock(torch.cuda.synchronize, mark, lambda one, other: one.elapsed_time(other) / 1e3)


def _run_of(contender: Contender, device: str) -> Callable[..., Any]:
    """Return the loader, with what it needs on a GPU."""
    function = getattr(contender.run, "func", contender.run)
    extra: dict[str, Any] = {"crop": True} if function is spdl_decoding else {}
    if device == "cuda" and function is ours:
        extra = {"device": "cuda"}
    if device == "cuda" and function is torch_loader:
        extra = {"pin_memory": True}
    return partial(contender.run, **extra)


def _contenders(model: str) -> Iterator[Contender]:
    for name, run, data, *needs in (
        ("cached batches", nothing, "folder"),
        ("ours, threads", ours, "folder"),
        ("ours, process", partial(ours, isolation="process"), "folder"),
        ("torch", torch_loader, "torchvision"),
        ("SPDL", spdl_decoding, "pillow", "spdl"),
    ):
        yield Contender(
            f"{model}: {name}",
            run,
            tuple(needs),
            {"model": model, "data": data},
            smoke=model == "resnet18" and name == "ours, threads",
            is_usual=model != "resnet50",
            decodes_with_spdl=bool(needs),
        )


def _goals(model: str) -> Iterator[Goal]:
    row = f"{model}: ours, threads"
    yield Goal("step_ratio", row, at_most=1.05)
    yield Goal("step_p50_ratio", row, at_most=1.03)
    yield Goal("step_p99_ratio", row, at_most=1.10)
    yield Goal("step_ratio", f"{model}: ours, process", at_most=1.02)
    yield Goal("step_ratio", row, f"{model}: torch", at_most=1.0)
    yield Goal("step_ratio", row, f"{model}: SPDL")


TABLE = Table(
    name="step",
    title="The training step beside a loader that is not the bottleneck",
    metrics=METRICS,
    contenders=tuple(one for model in _MODELS for one in _contenders(model)),
    prepare=_prepare,
    measure=measure,
    goals=tuple(one for model in _MODELS for one in _goals(model)),
)
