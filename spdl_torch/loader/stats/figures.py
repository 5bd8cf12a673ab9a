"""The figures of an epoch, computed from what was counted in it once somebody asks for them; and
the remarks of its report on the dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.utils.data import IterableDataset

from ...engine.statistics import PipelineStats, StageStats
from ...machine.readings import Probes, probes_between
from ...objects.datasets import all_datasets

if TYPE_CHECKING:
    from ...observe.verdict.advice import Trait
    from ...observe.verdict.placement import Placement
    from ...observe.verdict.report import Report
    from .counts import Measured

_POOLED = ("fetch", "collate")


def report_of(measured: Measured | None) -> Report:
    """Return the report on what was measured; None = nothing has run yet."""
    # Statistics alone need none.
    from ...observe.verdict.report import make_report

    probes = Probes() if measured is None else _probes_of(measured)
    report = make_report(stats_of(measured), probes, pooled=_POOLED)
    if measured is None:
        return report
    if (placement := measured.placement) is not None:
        report = replace(report, placement=_with_workers(placement, measured.num_workers))
    return replace(report, notes=tuple(measured.remarks))


def stats_of(measured: Measured | None) -> PipelineStats:
    """Return the statistics alone."""
    if measured is None:
        return PipelineStats(0, 0, ())
    readings, queues = measured.readings, measured.queues
    elapsed_ns, thread_ns = measured.elapsed_ns, max(1, measured.thread_ns)
    stages = [
        StageStats.of(
            name,
            measured.num_workers,
            tasks._replace(elapsed_ns=elapsed_ns),
            queues.results,
            thread_ns=thread_ns,
            wait_in_ns=readings.jobs_wait_ns,
        )
        for name, tasks in (("fetch", readings.fetch), ("collate", readings.collate))
    ]
    if measured.has_transfer:
        transfer = StageStats.of(
            "transfer",
            1,
            queues.transfer,
            queues.outlet,
            thread_ns=max(1, queues.transfer.elapsed_ns),
            wait_in_ns=queues.results.get_wait[0],
            wait_out_ns=queues.outlet.put_wait[0],
        )
        stages.append(transfer)
    return PipelineStats(elapsed_ns, queues.waited_ns, tuple(stages), counts=readings.data)


def _probes_of(measured: Measured) -> Probes:
    """Return the probes' readings: of workers in processes of their own those are theirs, with the
    cores of the trainer and theirs together."""
    readings = measured.readings
    before, now = readings.probes_before, readings.probes_now
    probes = probes_between(before, now)
    elapsed_ns, sampling_ns = measured.elapsed_ns, measured.queues.sampling_ns
    probes = replace(probes, sampling_ratio=min(1.0, sampling_ns / max(1, elapsed_ns)))
    if measured.own_probes is None:
        return probes
    own = probes_between(*measured.own_probes)
    wall_ns = max(1, elapsed_ns)
    theirs = (now.cpu_ns - before.cpu_ns) / wall_ns
    helpers = max(0, now.helpers_ns - before.helpers_ns) / wall_ns
    return replace(
        probes,
        own_gil=True,  # each worker has its process
        helper_cores=None if probes.helper_cores is None else helpers,
        cores_used=None if own.cores_used is None else own.cores_used + max(0.0, theirs),
    )


def _with_workers(placement: Placement, count: int) -> Placement:
    """Return the placement with the number of workers that tuning has come to."""
    num_processes = count if placement.num_processes else 0
    return replace(placement, num_workers=count, num_processes=num_processes)


def with_remarks_of(
    dataset: object, report: Report, own: Iterable[Trait] = (), others: Iterable[str] = ()
) -> Report:
    """Return the report with what depends on the traits of the dataset, and on a loader's own; and
    with the remarks of ``loading_remarks()`` of the dataset and of those in it, and others."""
    remarks: dict[str, None] = {}  # each once: several datasets may say the same
    for each in all_datasets(dataset):
        # Ask the class: an object that answers to any attribute name would seem to have it.
        if hasattr(type(each), "loading_remarks"):
            remarks.update(dict.fromkeys(each.loading_remarks()))
    traits = *_traits_of(dataset), *own
    return replace(report, traits=traits, notes=(*report.notes, *remarks, *others))


def _traits_of(dataset: object) -> Iterator[Trait]:
    """Yield those on which advice depends."""
    if isinstance(dataset, IterableDataset):
        yield "a stream"
    if not hasattr(dataset, "__len__"):
        yield "no length"
    if _is_torchvisions_folder(dataset):
        yield "torchvision's folder"


def _is_torchvisions_folder(dataset: object) -> bool:
    """Return whether it reads images as ours does, one by one and with Pillow."""
    kind, loader = type(dataset), getattr(dataset, "loader", None)
    name = f"{kind.__module__}.{kind.__qualname__}"
    is_default = getattr(loader, "__qualname__", "") == "default_loader"
    return is_default and name == "torchvision.datasets.folder.ImageFolder"
