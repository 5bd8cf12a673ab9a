"""``first-batch``: how long training waits for its first batch of photographs, ImageNet's recipe.

The process imports what a training script imports and builds its dataset and its loader; the clock
runs from ``iter(loader)`` until the first batch is in hand. ``set up`` is what building the dataset
and the loader took, which is not in the first column. ``ours, threads`` has our ImageFolder,
``ours, processes`` torchvision's, which loads in processes by default.
"""

from __future__ import annotations

import gc
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from .recipe import BATCH, photographs, recipe_classes, recipe_loader
from .report import Goal, Metric
from .tables import Contender, Table

if TYPE_CHECKING:
    from .recipe import Arrangement


def measure(contender: Contender, settings: dict[str, Any]) -> dict[str, float]:
    """Measure from ``iter()`` to the first batch, in a process that has loaded nothing before."""
    arrangement = contender.arguments["arrangement"]
    recipe_classes(arrangement)
    before = time.perf_counter()
    loader = contender.run(
        settings["folder"], num_workers=settings["num_workers"], arrangement=arrangement
    )
    set_up = time.perf_counter() - before
    gc.collect()  # 100 ms after torch's imports, and else part of some rows' time by chance
    start = time.perf_counter()
    images, _ = next(iter(loader))
    seconds = time.perf_counter() - start
    assert images.shape[1:] == (3, 224, 224), images.shape
    return {"first_batch_ms": seconds * 1e3, "set_up_ms": set_up * 1e3}


def _contender(name: str, arrangement: Arrangement, *, smoke: bool = True) -> Contender:
    return Contender(name, recipe_loader, arguments={"arrangement": arrangement}, smoke=smoke)


_goal = partial(Goal, "first_batch_ms")
TABLE = Table(
    name="first-batch",
    title=f"Time to the first batch of {BATCH} photographs",
    metrics=(Metric("first_batch_ms", "first batch, ms"), Metric("set_up_ms", "set up, ms")),
    contenders=(
        _contender("ours, threads", "threads"),
        _contender("ours, processes", "processes"),
        _contender("torch, forked", "fork"),
        _contender("torch, spawned", "spawn", smoke=False),
    ),
    prepare=photographs,
    measure=measure,
    peer="torch, forked",
    goals=(
        _goal("ours, threads", "torch, forked", at_most=0.6),
        _goal("ours, processes", "torch, forked", at_most=1.0),
        _goal("ours, threads", "torch, spawned", at_most=1 / 30),
    ),
)
