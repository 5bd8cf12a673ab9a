"""``python -m spdl_torch prepare``: plan, skip what is done, encode on threads, write, verify."""

from __future__ import annotations

import os
import sys
import time
from itertools import chain, groupby
from typing import TYPE_CHECKING, TextIO

from spdl_torch.errors import DecodeError
from spdl_torch.io._retry import is_transient
from spdl_torch.machine.limits import whole_cores
from spdl_torch.pipeline import PipelineBuilder
from spdl_torch.progress_bar import ProgressBar, time_left
from spdl_torch.shown_text import counted

from ..command_options import CommandError
from .encode import Encoder, encoder_versions
from .plan import PLAN_FILE, Settings, make_plan, shard_name
from .write import ShardWriter, check_tars, done_index, index_tars, tars_in, write_whole

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable
    from pathlib import Path

    from .encode import Sample
    from .plan import ShardPlan


class _BadFile(Exception):
    """A file of the source that ends the run."""


def run_prepare(options: Namespace, out: TextIO, progress: TextIO) -> int:
    """Write the shards that are not there yet; return the exit status. ``options``: those of the
    command line.

    **Stop.** Ctrl-C ends it once the files in progress are encoded. What was written stays, and the
    same call continues from there.

    Raises: CommandError: the folders do not fit; OSError: the disk is full, or fails.
    """
    plan = _plan(options, progress)
    folder = os.fspath(options.out)
    os.makedirs(folder, exist_ok=True)
    _claim(folder, plan)
    names = [shard_name(shard) for shard in range(plan.num_shards)]
    done = [done_index(folder, name) for name in names]
    missing = [shard for shard, index in enumerate(done) if index is None]
    if num_done := plan.num_shards - len(missing):
        print(f"{num_done} of {counted(plan.num_shards, 'shard')} done before", file=progress)
    report = _Progress(progress, sum(len(plan.numbers_of(shard)) for shard in missing))
    report.num_left_out = sum(len(index.left_out) for index in done if index is not None)
    try:
        _write_shards(options, plan, missing, report)
    except _BadFile as error:
        report.end()
        print(f"spdl-torch prepare: {error}", file=sys.stderr)
        return 1
    finally:
        report.end()
    _print_summary(plan, folder, report, out)
    return 0


def run_check(folder: Path, out: TextIO, progress: TextIO, *, writes_index: bool = False) -> int:
    """Compare the tars of a folder with their indexes or, with ``writes_index``, write those that
    are missing; return the exit status, 1 if a tar is damaged. Raises: CommandError, OSError.
    """
    bar = ProgressBar(progress, "shards")
    num_bad = num_samples = 0
    try:
        tars = tars_in(folder)
        bar.begin("indexing" if writes_index else "verifying", len(tars))
        for number, checked in enumerate((index_tars if writes_index else check_tars)(tars)):
            num_samples += checked.num_samples
            if checked.problem is not None:
                num_bad += 1
                bar.end()
                print(f"DAMAGED {checked.path}: {checked.problem}", file=out)
            bar.advance(number + 1)
    except ValueError as error:
        raise CommandError(error) from error
    finally:
        bar.end()
    what = "indexed" if writes_index else f"verified, {num_bad} damaged"
    if num_bad:
        what += ". Delete a damaged tar, and prepare it again with the command that made it"
    print(f"{counted(len(tars), 'shard')}, {counted(num_samples, 'sample')}: {what}", file=out)
    return 1 if num_bad else 0


def _plan(options: Namespace, progress: TextIO) -> ShardPlan:
    if not options.source.is_dir():
        what = "is not a folder" if options.source.exists() else "does not exist"
        raise CommandError(
            f"{options.source} {what}. Give the folder of the files, or of a folder for each class."
        )
    if options.out.resolve().is_relative_to(options.source.resolve()):
        raise CommandError(f"{options.out} is inside {options.source}. Give a folder beside it.")
    bar = ProgressBar(progress)
    bar.begin(f"listing {options.source}")
    try:
        settings = Settings(options.resize, options.quality, options.shard_samples, options.seed)
        return make_plan(options.source, settings, encoder_versions(settings))
    except (OSError, ValueError) as error:
        raise CommandError(error) from error
    finally:
        bar.end()


def _claim(folder: str, plan: ShardPlan) -> None:
    """Write the plan to the folder, or check that the one already there is the same."""
    path, content = os.path.join(folder, PLAN_FILE), plan.to_json()
    if not os.path.exists(path):
        others = sorted(set(os.listdir(folder)) - {PLAN_FILE + ".partial"})
        if others:
            raise CommandError(
                f"{folder} holds other files, such as {others[0]!r}. Give a new folder."
            )
        write_whole(path, content)
        return
    with open(path, "rb") as file:
        if file.read() != content:
            raise CommandError(
                f"{folder} was begun with other files, options or versions of libraries ({path} "
                "says which). Give those again, or a new folder."
            )


def _write_shards(
    options: Namespace, plan: ShardPlan, missing: list[int], report: _Progress
) -> None:
    """Write shards one after the other, while threads encode the samples of the next ones."""
    if not missing:
        return
    pipeline = (
        PipelineBuilder()
        .add_source(chain.from_iterable(map(plan.numbers_of, missing)))
        .pipe(
            Encoder(plan),
            concurrency=options.workers or whole_cores(),
            output_order="input",
            name="encode",
        )
        .add_sink()
        .build()
    )
    with pipeline.auto_stop():
        for shard, samples in groupby(pipeline, lambda sample: plan.shard_of(sample.number)):
            _write_shard(options, plan, shard, samples, report)


def _write_shard(
    options: Namespace,
    plan: ShardPlan,
    shard: int,
    samples: Iterable[Sample],
    report: _Progress,
) -> None:
    folder, name = os.fspath(options.out), shard_name(shard)
    writer = ShardWriter(folder, name)
    try:
        for sample in samples:
            if sample.error is None:
                writer.add(sample)
            else:
                _check_skipped(sample.error, options)
                # Without the source folder, whose path may differ in another run.
                reason = str(sample.error).replace(os.path.join(plan.folder, ""), "")
                writer.leave_out(plan.files[sample.number].path, reason)
                report.num_left_out += 1
            report.advance()
        report.num_bytes += writer.finish()
    except BaseException:
        writer.drop()
        raise
    report.shard_done(shard, plan.num_shards)


def _check_skipped(error: Exception, options: Namespace) -> None:
    """Raise unless the file is to be left out. A transient error always ends the run: another run
    could read the file.
    """
    is_files_own = isinstance(error, DecodeError) or (
        isinstance(error, OSError) and not is_transient(error) and options.source.is_dir()
    )
    if not is_files_own:
        raise _BadFile(str(error)) from error
    if options.on_error == "raise":
        advice = "With --on-error skip the same command goes on and leaves such files out."
        raise _BadFile(f"{error}\n{advice}") from error


class _Progress:
    """Shows the samples done and the time left: a bar on a terminal, elsewhere a line for each
    shard.
    """

    def __init__(self, stream: TextIO, total: int) -> None:
        self.num_left_out = self.num_bytes = 0
        self._stream = stream
        self._total = total
        self._done = 0
        self._start_time = time.monotonic()
        self._bar = ProgressBar(stream, "samples")
        if total:
            self._bar.begin("writing", total)

    def advance(self) -> None:
        """Count a sample."""
        self._done += 1
        if self._done % 16 == 0:
            self._bar.advance(self._done)

    def shard_done(self, shard: int, num_shards: int) -> None:
        """Print a line, unless there is a bar."""
        if self._stream.isatty():
            return
        left = time_left(self._done, self._total, time.monotonic() - self._start_time)
        left = left if self._done < self._total else ""
        line = f"shard {shard + 1} of {num_shards}, {self._done}/{self._total} samples{left}"
        print(line, file=self._stream, flush=True)

    def end(self) -> None:
        """Remove the bar."""
        self._bar.end()


def _print_summary(plan: ShardPlan, folder: str, report: _Progress, out: TextIO) -> None:
    left_out = f", {counted(report.num_left_out, 'file')} left out" if report.num_left_out else ""
    print(
        f"{folder}: {counted(plan.num_shards, 'shard')} of {counted(len(plan.files), 'file')}"
        f"{left_out}; {report.num_bytes / 1e6:.1f} MB written now",
        file=out,
    )
    if plan.ignored:
        number = counted(len(plan.ignored), "file")
        print(f"ignored {number} of other kinds, such as {plan.ignored[0]!r}", file=out)
