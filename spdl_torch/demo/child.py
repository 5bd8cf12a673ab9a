"""The process that does the job: ``python -m spdl_torch.demo.child JOB``, JOB being JSON.

It answers on standard output, in lines written by
:class:`~spdl_torch.measuring.reporter.Reporter`. Whatever else is printed goes to standard error.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..machine.limits import whole_cores
from ..measuring.reporter import Reporter, end_with_the_parent
from ..scopes import scope
from .jobs import POOL, Environment, decode_job, encode, resnet_amount, spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from .jobs import Comparison, Measurement, Prepare

_Answer = TypeVar("_Answer")


def main() -> None:
    """Do the job named on the command line."""
    end_with_the_parent()
    job = decode_job(sys.argv[1])
    with os.fdopen(os.dup(1), "w") as lines:
        os.dup2(2, 1)
        reporter = Reporter(lines)
        for answer in _do(job, reporter):
            reporter.write(answer=encode(answer))


def _do(job: Comparison, reporter: Reporter) -> Iterator[Environment | Measurement]:
    """Import once what all turns need; each has a process of its own, begun in a moment.

    Nothing is computed in this one: a fork has no intra-op threads, and no GPU, of its parent's.
    """
    with _apart(_write, job.prepare, reporter) as written:
        import torch

        from .training import measure

        written()
    # Several spin while they wait for each other, on the cores of the workers and of other
    # programs: resnet18 was seen to take ten times as long.
    torch.set_num_threads(1)
    # What torch's import leaves would be collected for 100 ms, in whichever row that falls.
    gc.collect()
    gc.freeze()
    with _apart(_prepare, job.prepare, reporter) as prepared:
        environment = prepared()
    yield environment
    for each in job.measures(environment):
        with _apart(measure, each, reporter) as measured:
            answer = measured()
        yield answer


@scope
def _apart(work: Callable[..., _Answer], *arguments: object) -> Iterator[Callable[[], _Answer]]:
    """Begin ``work`` in a process of its own, or where a fork is not safe do it here; yield what
    waits for its answer."""
    if sys.platform != "linux":
        answer = work(*arguments)
        yield lambda: answer
        return
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(writer, work, arguments))
    process.start()
    writer.close()

    def answer_of() -> _Answer:
        try:
            received: _Answer = reader.recv()
        except EOFError:
            process.join()
            sys.exit(1)  # it has printed why
        return received

    yield answer_of
    process.join()


def _send(writer: Connection, work: Callable[..., object], arguments: Sequence[object]) -> None:
    writer.send(work(*arguments))


def _write(job: Prepare, reporter: Reporter) -> None:
    if not job.num_photographs:
        return
    from ..measuring.photographs import write_photographs

    reporter.phase("writing photographs", job.num_photographs)
    write_photographs(Path(job.folder), job.num_photographs, seed=job.seed, progress=reporter.done)


def _prepare(job: Prepare, reporter: Reporter) -> Environment:
    import torch
    import torchvision

    from spdl_torch.io import image_codec

    from .training import make_dataset, resnet_seconds

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
        num_images=len(folder),
        num_classes=len(folder.classes),
        mean_bytes=_read([path for path, _ in folder.samples], reporter),
        codec=image_codec().partition(" ")[0],
        image_seconds=image_seconds,
        resnet_seconds={
            workload: resnet_seconds(resnet_amount(workload, device, smoke=job.is_smoke), device)
            for workload in job.workloads
        },
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
