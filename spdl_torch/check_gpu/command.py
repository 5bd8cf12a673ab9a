"""The work of ``python -m spdl_torch check-gpu``."""

from __future__ import annotations

import faulthandler
import os
import shutil
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from .. import __version__
from ..machine.limits import usable_cores
from ..scopes import scope
from .sheet import Sheet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from .gpu import Gpu

    Check = tuple[str, Callable[[], None]]

MOST_SECONDS = 9 * 60.0
_GRACE_SECONDS = 5.0

CHECKS = ("correctness", "races", "exits", "capture", "memory", "rates")
"""The groups of checks, in their order."""

_NUM_PHOTOGRAPHS = 1024


class Extent(NamedTuple):
    """How much the checks load."""

    num_batches: int = 2000
    most_bytes: int = 64 << 20
    workers: Sequence[int] = (0, 4, 16)


class CheckOptions(NamedTuple):
    """The command's options."""

    data: Path | None = None
    json_path: Path | None = None
    only: Sequence[str] = ()
    """The groups to run; () = all."""
    resumes: bool = False
    """Whether to leave out the groups that the JSON file has whole."""


def run_check_gpu(
    options: CheckOptions,
    out: TextIO,
    errors: TextIO,
    *,
    gpu: Gpu | None = None,
    extent: Extent | None = None,
) -> int:
    """Run the checks; return 0 if every one passes, 1 if one fails, 2 if there is no GPU.

    gpu: None = the current CUDA device. extent: None = the whole.

    After 9 minutes the process ends, whatever hangs, with status 1; if what hangs never releases
    the GIL, it ends a few seconds later, and no line can say which check it was.
    """
    import torch

    if not torch.cuda.is_available():
        print(
            "spdl-torch check-gpu: torch finds no CUDA device here "
            "(torch.cuda.is_available() is False), so there is nothing to check.",
            file=errors,
        )
        return 2
    facts = {
        "spdl_torch": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(),
        "num_devices": torch.cuda.device_count(),
        "cores": usable_cores(),
    }
    for name, fact in facts.items():
        print(f"# {name}: {fact}", file=out, flush=True)
    sheet = Sheet(out, facts, options.json_path)
    if options.resumes:
        try:
            sheet.take_up()
        except (OSError, ValueError) as error:
            print(f"spdl-torch check-gpu: {error}.", file=errors)
            return 2
    with tempfile.TemporaryDirectory() as folder:
        groups = _groups(sheet, options.data, Path(folder), gpu, extent or Extent())
        chosen = chosen_checks(groups, sheet, options.only)
        with ended_by_force(MOST_SECONDS + _GRACE_SECONDS):
            run_checks(chosen, sheet, MOST_SECONDS, end=partial(_end_process, out, folder))
    for line in sheet.three_figures():
        print(f"# {line}", file=out, flush=True)
    return 0 if sheet.has_passed else 1


def chosen_checks(
    groups: Mapping[str, Sequence[Check]], sheet: Sheet, only: Sequence[str]
) -> list[Check]:
    """Return the checks of the groups that are asked for and not whole yet; at the end of each
    group the sheet is told."""
    chosen: list[Check] = []
    for group, checks in groups.items():
        if (not only or group in only) and not sheet.has_finished(group):
            chosen += [*checks, (group, partial(sheet.finish, group))]
    return chosen


def run_checks(
    checks: Sequence[Check], sheet: Sheet, most_seconds: float, *, end: Callable[[], None]
) -> None:
    """Run the checks in turn; if one raises, its line says so, and the others still run.

    end: called when the time is up, on another thread; it ends the process.
    """
    started, current = time.monotonic(), [name for name, _ in checks[:1]]

    def stop() -> None:
        sheet.fail(current[0], f"unfinished after {most_seconds:g} s in all")
        end()

    watchdog = threading.Timer(most_seconds, stop)
    watchdog.daemon = True
    watchdog.start()
    try:
        for name, check in checks:
            current[0] = name
            try:
                check()
            except Exception as error:
                sheet.fail(name, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    finally:
        watchdog.cancel()
    sheet.at_most("seconds", time.monotonic() - started, most_seconds)


@scope
def ended_by_force(seconds: float) -> Iterator[None]:
    """End the process with status 1 if the block takes this long, by a thread that needs no GIL: a
    thread in CUDA may wait forever while it holds the GIL, and then no Python runs. The stack of
    each thread goes to standard error.
    """
    file = sys.__stderr__
    if file is not None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=file)
    try:
        yield
    finally:
        if file is not None:
            faulthandler.cancel_dump_traceback_later()


def _end_process(out: TextIO, folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # nothing else runs any more
    out.flush()
    sys.stderr.flush()
    os._exit(1)


def _groups(
    sheet: Sheet, data: Path | None, folder: Path, gpu: Gpu | None, extent: Extent
) -> dict[str, list[Check]]:
    from . import allocators, correctness, devices, exits, races, rates, resources, ways
    from .gpu import CudaGpu

    gpu = gpu or CudaGpu()

    def train() -> None:
        photographs = data
        if photographs is None:
            from ..measuring.photographs import write_photographs

            photographs = folder / "photographs"
            write_photographs(photographs, _NUM_PHOTOGRAPHS)
        rates.check_training(sheet, photographs)

    def by_kernels(name: str, check: Callable[[], None]) -> Check:
        return name, check if gpu.launches else partial(sheet.skip, name, "it runs no kernels")

    # A share of what the races load, in batches of a sixteenth of their largest.
    few: dict[str, Any] = {
        "num_batches": extent.num_batches // 20,
        "num_bytes": extent.most_bytes // 16,
    }
    more = {**few, "num_batches": extent.num_batches // 10}
    far = {**few, "num_batches": extent.num_batches // 4}
    sizes = {"num_batches": extent.num_batches // 2, "most_bytes": extent.most_bytes // 4}
    return {
        "correctness": [
            ("devices", partial(devices.check_devices, sheet)),
            ("batches", partial(correctness.check_batches, gpu, sheet)),
            ("loaders", partial(correctness.check_loaders, gpu, sheet)),
            ("clips", partial(check_clips, gpu, sheet)),
        ],
        "races": [
            ("race_self_test", partial(races.check_self_test, gpu, sheet)),
            ("race_drop", partial(races.check_races, gpu, sheet, **extent._asdict())),
            ("race_isolation", partial(races.check_isolation, gpu, sheet, **more)),
            ("race_ways", partial(ways.check_ways, gpu, sheet, **few)),
            by_kernels("race_allocators", partial(allocators.check_allocators, sheet)),
            ("sizes", partial(resources.check_sizes, gpu, sheet, **sizes)),
        ],
        "exits": [by_kernels("exits", partial(exits.check_exits, sheet))],
        "capture": [
            by_kernels("capture", partial(resources.check_capture, sheet)),
            by_kernels("compiled", partial(resources.check_compiled, sheet)),
        ],
        "memory": [
            ("device_memory", partial(resources.check_memory, gpu, sheet, **far)),
            ("kept_memory", partial(ways.check_kept_memory, gpu, sheet)),
            ("full_device", partial(resources.check_full_device, sheet)),
        ],
        "rates": [
            by_kernels("launches", partial(rates.check_launches, sheet)),
            by_kernels("hand_over", partial(rates.check_hand_over, sheet)),
            by_kernels("copies", partial(rates.check_copies, sheet)),
            by_kernels("training", train),
        ],
    }


def check_clips(gpu: Gpu, sheet: Sheet) -> None:
    """Check clips, where PyAV is installed."""
    try:
        from . import clips
    except ModuleNotFoundError as error:
        if error.name != "av":
            raise
        sheet.skip("clips", "PyAV is not installed")
    else:
        clips.check_clips(gpu, sheet)
