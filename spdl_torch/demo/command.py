"""The work of ``python -m spdl_torch demo``, from the arguments to the tables."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar

from ..machine.cpu_time import OtherPrograms
from ..machine.limits import whole_cores
from ..progress_bar import ProgressBar
from ..shown_text import counted, printable
from .table import VARIANTS, WORKLOADS, comparison_table, fastest_models, verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from .table import Measurement

_Answer = TypeVar("_Answer")

_NUM_PHOTOGRAPHS, _NUM_PHOTOGRAPHS_SMOKE = 96, 32
_MOST_DEFAULT_WORKERS = 8
_REPORT_TIMES = 8
"""For the report so many times the usual amount, as it has to load for two seconds."""


class _TurnFailed(Exception):
    """A process ended without an answer; it has printed why."""


class Demo:
    """One run of the command, with what has been measured so far."""

    def __init__(
        self,
        data: Path | None,
        num_workers: int | None,
        num_rounds: int,
        *,
        smoke: bool,
        out: TextIO,
        progress: TextIO,
    ) -> None:
        """``data``: a folder with one folder of images per class; None = small pictures, and
        photographs made for the occasion."""
        self._data = data
        self._num_workers = num_workers or min(whole_cores(), _MOST_DEFAULT_WORKERS)
        self._num_rounds = num_rounds
        self._smoke = smoke
        self._out = out
        self._bar = ProgressBar(progress)
        self._activity = "starting"
        self._others = OtherPrograms()
        self._results: dict[str, dict[str, list[Measurement]]] = {}

    def run(self) -> int:
        """Compare the loaders, show the tables and return the exit status.

        Ctrl-C ends the present turn, shows the tables of what was measured so far, and returns 130.
        Raises: CommandError: the data are no such folder.
        """
        status = 0
        try:
            with contextlib.ExitStack() as stack:
                folder = self._data
                if folder is None:
                    made = tempfile.TemporaryDirectory(prefix="spdl-torch-demo-")
                    folder = Path(stack.enter_context(made))
                    self._write_photographs(folder)
                self._measure(folder)
        except KeyboardInterrupt:
            status = 130
            self._say("Interrupted.")
        except _TurnFailed as failure:
            status = 1
            print(f"spdl-torch demo: {self._activity}: {failure}", file=sys.stderr)
        self._bar.end()
        self._show()
        return status

    def _write_photographs(self, folder: Path) -> None:
        from ..measuring.photographs import write_photographs

        count = _NUM_PHOTOGRAPHS_SMOKE if self._smoke else _NUM_PHOTOGRAPHS
        self._bar.begin("writing photographs", count)
        write_photographs(folder, count, seed=0, progress=self._bar.advance)

    def _measure(self, folder: Path) -> None:
        """Run every variant in turn, round after round, the other way round in every second one: a
        disturbance then hits all of them, and none is always the first."""
        self._begin("importing torch")
        from .training import Job, check_folder, check_gpu, describe, measure, report_of

        check_folder(folder)
        self._begin("reading the images once")
        self._say(_apart(describe, str(folder), self._data is None))
        rounds = counted(self._num_rounds, "round")
        self._say(f"{whole_cores()} cores, num_workers={self._num_workers}, {rounds}")
        workloads = list(WORKLOADS) if self._data is None else ["photographs"]
        turns = [
            (workload, variant)
            for number in range(self._num_rounds)
            for workload in workloads
            for variant in WORKLOADS[workload].variants[:: -1 if number % 2 else 1]
        ]
        for number, (workload, variant) in enumerate(turns, 1):
            self._begin(f"{number}/{len(turns)}: {workload}, {' '.join(VARIANTS[variant].heading)}")
            job = Job(workload, variant, str(folder), self._num_workers, self._smoke)
            measured = _apart(measure, job)
            self._results.setdefault(workload, {}).setdefault(variant, []).append(measured)
        if not self._smoke:
            self._begin("our loader's report")
            self._say(f"\n{_apart(report_of, job._replace(variant='both', times=_REPORT_TIMES))}")
        self._activity = "checking the GPU"
        if lines := _apart(check_gpu, self._num_workers):
            self._say(f"\n{lines}")

    def _show(self) -> None:
        """Show what was measured, as far as it went."""
        others = self._others.cores() or 0.0
        for workload, results in self._results.items():
            self._say(f"\n{workload.capitalize()}: {WORKLOADS[workload].about}")
            self._say(comparison_table(results, with_ratios=not self._smoke))
            if len(results) > 1 and not self._smoke:
                self._say(fastest_models(results))
                self._say(verdict(workload, results, others, whole_cores()))
        if self._smoke and self._results:
            self._say("The smoke run is too short to compare. Next: leave out --smoke.")

    def _begin(self, activity: str) -> None:
        self._activity = activity
        self._bar.begin(activity)

    def _say(self, text: str) -> None:
        self._bar.end()
        print(printable(text), file=self._out, flush=True)


def _apart(work: Callable[..., _Answer], *arguments: object) -> _Answer:
    """Do ``work`` in a process of its own, or where a fork is not safe do it here.

    A fork has no intra-op threads, and no GPU, of its parent's: this process computes nothing. It
    leads a group of its own, with its workers, so that Ctrl-C meets this process alone.
    """
    if sys.platform != "linux":
        return work(*arguments)
    from ..data.child_process.signals import handlers_deferred

    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(writer, work, arguments))
    try:
        with handlers_deferred():  # what a handler raises in the middle of a fork is lost
            process.start()
        writer.close()
        answer: _Answer = reader.recv()
    except EOFError:
        process.join()
        raise _TurnFailed(f"the process ended with status {process.exitcode}") from None
    except BaseException:
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # it may not have its group yet
        raise
    process.join()
    return answer


def _send(writer: Connection, work: Callable[..., object], arguments: Sequence[object]) -> None:
    os.setpgid(0, 0)
    writer.send(work(*arguments))
