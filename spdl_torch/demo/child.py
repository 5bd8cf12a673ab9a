"""The process that does one job: ``python -m spdl_torch.demo.child JOB``, JOB being JSON.

It answers on standard output, in lines written by
:class:`~spdl_torch.measuring.reporter.Reporter`. Whatever else is printed goes to standard error.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..machine.limits import whole_cores
from ..measuring.lifeline import end_with_the_parent
from ..measuring.reporter import Reporter
from .jobs import AMOUNTS, POOL, Environment, Measure, Prepare, Smoke, decode_job, encode, spread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .jobs import Measurement


def main() -> None:
    """Do the job named on the command line."""
    end_with_the_parent()
    job = decode_job(sys.argv[1])
    with os.fdopen(os.dup(1), "w") as lines:
        os.dup2(2, 1)
        reporter = Reporter(lines)
        for answer in _do(job, reporter):
            reporter.write(answer=encode(answer))


def _do(job: Prepare | Measure | Smoke, reporter: Reporter) -> Iterator[Environment | Measurement]:
    if isinstance(job, Prepare):
        yield _prepare(job, reporter)
        return
    jobs = [job] if isinstance(job, Measure) else []
    if isinstance(job, Smoke):
        environment = _prepare(job.prepare, reporter)
        yield environment
        jobs = job.measures(environment)
    from .training import measure

    for each in jobs:
        yield measure(each, reporter)


def _prepare(job: Prepare, reporter: Reporter) -> Environment:
    if job.num_photographs:
        from ..measuring.photographs import write_photographs

        reporter.phase("writing photographs", job.num_photographs)
        write_photographs(
            Path(job.folder), job.num_photographs, seed=job.seed, progress=reporter.done
        )
    reporter.phase("importing torch", 0)
    import torch
    import torchvision

    from spdl_torch.io import image_codec

    from .training import intra_op_threads, make_dataset, resnet_seconds

    # By CPU time: what the first run reads from a disk, the later ones find in memory.
    start_seconds = time.thread_time()
    if job.num_threads is not None:
        torch.set_num_threads(job.num_threads)
    with intra_op_threads(1):  # as in a worker; several would spin
        image_seconds = {
            workload: _image_seconds(make_dataset(workload, "torch", job.folder, 1000))
            for workload in job.workloads
        }
    folder = torchvision.datasets.ImageFolder(job.folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Environment(
        python=platform.python_version(),
        torch=str(torch.__version__),
        torchvision=torchvision.__version__,
        device=device,
        device_name=torch.cuda.get_device_name() if device == "cuda" else "CPU",
        num_cores=whole_cores(),
        num_threads=torch.get_num_threads(),
        num_images=len(folder),
        num_classes=len(folder.classes),
        mean_bytes=_read([path for path, _ in folder.samples], reporter),
        codec=image_codec().partition(" ")[0],
        image_seconds=image_seconds,
        resnet_seconds={
            workload: resnet_seconds(AMOUNTS[workload, device, job.is_smoke][0], device)
            for workload in job.workloads
        },
        start_seconds=start_seconds,
    )


def _read(paths: list[str], reporter: Reporter) -> float:
    """Read the files to be measured into the page cache; return their mean size."""
    chosen = [paths[index] for index in spread(len(paths), min(POOL, len(paths)))]
    reporter.phase("reading the images once", len(chosen))
    num_bytes = 0
    for count, path in enumerate(chosen, 1):
        num_bytes += len(Path(path).read_bytes())
        reporter.done(count)
    return num_bytes / len(chosen)


_FEWEST_LOOKS, _MOST_LOOKS, _LOOK_SECONDS = 8, 200, 0.1
"""The number of images timed to find their cost, fewest and most: as many as take that long."""


def _image_seconds(dataset: Any) -> float:
    """Return the CPU seconds that one image takes, which other programs hardly affect."""
    indices = spread(len(dataset), _MOST_LOOKS)
    dataset[indices[0]]  # Pillow imports its plugins for the first image
    start = time.thread_time()
    for count, index in enumerate(indices, 1):
        dataset[index]
        seconds = time.thread_time() - start
        if count >= _FEWEST_LOOKS and seconds > _LOOK_SECONDS:
            break
    return seconds / count


if __name__ == "__main__":
    main()
