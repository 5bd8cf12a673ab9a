"""The tables, and the parts of one."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .report import Goal, Metric

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

TABLES = {
    "photographs": "photographs, resized to 224 x 224 as for validation",
    "crop": "photographs, RandomResizedCrop to 224 x 224 and flip as for training",
    "clips": "16 frames out of 2 seconds of a video",
    "array-functions": "npy and npz from bytes in memory, by the functions alone",
    "sources": "rows and photographs in Parquet files, and shards over HTTP with a cache",
    "step": "the training step beside a loader",
    "busy-step": "a trainer that wants the interpreter all the time, beside a loader in full swing",
    "hand-over": "the CPU time of the thread that trains, for each batch that is ready",
    "transfer": "copies to the GPU, beside a bare one from pinned memory; needs a GPU",
    "first-batch": "the wait for the first batch of photographs",
    "memory": "memory of photographs, and over 20 epochs of a dataset that holds Python objects",
    "engine": "stages that do nothing",
    "ordinary": "datasets as people write them, 0, 2 and 4 workers, over torch's loader",
    "program": "whole programs, from Python's start to its exit, over torch's loader",
}
"""Name of each table, and what is loaded; ``load_table`` imports its module."""

LOADER_METRICS = (
    Metric("per_second", "samples/s, steady"),
    Metric("end_to_end", "samples/s, end to end"),
    Metric("cpu_ms", "CPU ms/sample", 2),
    Metric("first_batch_ms", "first batch, ms"),
    Metric("peak_mib", "peak MiB"),
)
"""The columns of tables whose contenders are loaders. CPU and memory are the process tree's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """The command line."""

    table: str
    rounds: int | None = None
    """None = 5, or 1 with ``smoke``."""
    seconds: float = 2.0
    """About how long a pass of torch's DataLoader takes on two cores; sets everyone's samples."""
    workers: tuple[int, ...] = ()
    """Empty = the table's."""
    data: Path | None = None
    only: tuple[str, ...] = ()
    """Names of contenders, or prefixes of several; empty = all."""
    goals: bool = False
    """Only contenders that a goal compares."""
    full: bool = False
    """Whether to run the sizes that take long, too."""
    smoke: bool = False
    peer: str | None = None
    """The contender that the others are compared with; None = the table's own choice."""
    limit: float = 120.0
    """The seconds of one measurement; one that takes longer has failed."""
    json: Path | None = None


@dataclass(frozen=True, slots=True)
class Contender:
    """One thing that is measured, in a process of its own."""

    name: str
    run: Callable[..., Any]
    """Called by the table's ``measure``, in its own way."""
    needs: tuple[str, ...] = ()
    """Modules of peers."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    smoke: bool = False
    """Whether a smoke run measures it too."""
    is_usual: bool = True
    """Whether it is measured where neither ``--full`` nor ``--only`` asks for it."""
    decodes_with_spdl: bool = False
    """Whether SPDL's own decoder must work."""


# What a table's contenders share: numbers, strings and paths, since they travel as JSON.
Settings = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One command."""

    name: str
    title: str
    metrics: tuple[Metric, ...]
    contenders: tuple[Contender, ...]
    prepare: Callable[[BenchOptions, Path], Settings]
    """Makes or finds the data; the folder is removed at the end."""
    measure: Callable[[Contender, Settings], Mapping[str, float]]
    """In the child; returns values by metric."""
    peer: str | None = None
    goals: tuple[Goal, ...] = ()
    conclude: Callable[[Any], list[str]] | None = None
    """Makes remarks on the report, at the end."""
    seconds: tuple[float, float] = (1.0, 4.0)
    """What a measurement takes: passes of ``--seconds``, and the time before it measures."""
    is_strict: bool = False
    """Whether a row that fails makes the exit status 1: here a row is also a check."""
    workers: tuple[int, ...] = (2,)
    """The numbers of workers, unless others are given."""
    with_workers: Callable[[tuple[int, ...]], Table] | None = None
    """Makes the table for several numbers of workers; None = it takes one."""

    def contender(self, name: str) -> Contender:
        """Return the contender of that name. Raises: KeyError: there is none."""
        return {contender.name: contender for contender in self.contenders}[name]


def load_table(name: str) -> Table:
    """Return the table of that name. Raises: ValueError: there is none."""
    if name not in TABLES:
        raise ValueError(f"there is no table {name!r}; there are {', '.join(TABLES)}.")
    module = {"crop": "photographs"}.get(name, name.replace("-", "_"))
    found = importlib.import_module(f"{__package__}.table_{module}")
    table: Table = found.CROP if name == "crop" else found.TABLE
    return table
