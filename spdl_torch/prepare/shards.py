"""Write the shards of a plan, each whole by renaming and its index last; read shards back.

    shard-000000.tar.partial        -> shard-000000.tar         1.
    shard-000000.index.json.partial -> shard-000000.index.json  2.

A shard whose index is there is done. A process that is killed at any moment leaves a ``.partial``
file, or a tar without an index; the next run writes both anew.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
from argparse import Namespace
from collections.abc import Iterable
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from ..command_options import CommandError
from ..data.sources._index import FILE_COLUMNS, index_path, load_index, scan_tar
from ..errors import DecodeError
from ..io._remote import is_transient
from ..pipeline import PipelineBuilder
from ..shown_text import counted
from ..whole_files import whole_file
from .samples import encode, make_plan

if TYPE_CHECKING:
    from ..data.sources._index import TarIndex
    from .samples import Sample, ShardPlan

_PLAN_FILE = "dataset.json"
_UNFINISHED = ".partial"


def write_shards(options: Namespace) -> None:
    """Write the shards that are not there yet.

    **Stop.** Ctrl-C ends it once the files in progress are encoded. What was written stays, and the
    same command continues from there.

    Raises: CommandError: the folders do not fit, or a file is bad; OSError: the disk is full.
    """
    plan = _plan_of(options)
    folder = os.fspath(options.out)
    os.makedirs(folder, exist_ok=True)
    _claim(folder, plan)
    shards = {os.path.join(folder, _tar_name(n)): each for n, each in enumerate(plan.shards())}
    done = {tar: index for tar in shards if (index := _done_index(tar)) is not None}
    if done:
        print(f"{len(done)} of {counted(len(shards), 'shard')} done before", file=sys.stderr)
    num_left_out, num_bytes = sum(len(index.left_out) for index in done.values()), 0
    pipeline = (
        PipelineBuilder()
        .add_source(chain(*(numbers for tar, numbers in shards.items() if tar not in done)))
        .pipe(partial(encode, plan), concurrency=options.workers, output_order="input")
        .add_sink()
        .build()
    )
    with pipeline.auto_stop():
        samples = iter(pipeline)
        for number, (tar, numbers) in enumerate(shards.items(), 1):
            if tar in done:
                continue
            print(f"shard {number} of {len(shards)}, {len(numbers)} samples", file=sys.stderr)
            index = _write_shard(tar, islice(samples, len(numbers)), plan, options)
            num_left_out += len(index.left_out)
            num_bytes += index.num_bytes
    left_out = f", {counted(num_left_out, 'file')} left out" if num_left_out else ""
    what = f"{counted(len(shards), 'shard')} of {counted(len(plan.files), 'file')}{left_out}"
    print(f"{folder}: {what}; {num_bytes / 1e6:.1f} MB written now")
    if plan.ignored:
        others = counted(len(plan.ignored), "file")
        print(f"ignored {others} of other kinds, such as {plan.ignored[0]!r}")


def _plan_of(options: Namespace) -> ShardPlan:
    if options.out.resolve().is_relative_to(options.source.resolve()):
        raise CommandError(f"{options.out} is inside {options.source}. Give a folder beside it.")
    settings = {name: getattr(options, name) for name in ("resize", "quality", "shard_samples")}
    print(f"listing {options.source}", file=sys.stderr)
    try:
        return make_plan(options.source, settings)
    except OSError as error:
        raise CommandError(error) from error


def _claim(folder: str, plan: ShardPlan) -> None:
    """Write the plan to the folder, or check that the one already there is the same."""
    path, content = os.path.join(folder, _PLAN_FILE), plan.to_json()
    if not os.path.exists(path):
        if others := sorted(set(os.listdir(folder)) - {_PLAN_FILE + _UNFINISHED}):
            raise CommandError(
                f"{folder} holds other files, such as {others[0]!r}. Give a new folder."
            )
        with whole_file(path, _UNFINISHED) as file:
            file.write(content)
    elif Path(path).read_bytes() != content:
        raise CommandError(
            f"{folder} was begun with other files or options, as {path} says. Give those again, or "
            "a new folder."
        )


def _tar_name(shard: int) -> str:
    return f"shard-{shard:06d}.tar"


def _done_index(tar: str) -> TarIndex | None:
    """Return the index of a shard that is already there, whole; None = it is to be written."""
    try:
        index = load_index(tar)
        return index if index.num_bytes == os.path.getsize(tar) else None
    except (FileNotFoundError, DecodeError):
        return None


def _write_shard(
    tar_path: str, samples: Iterable[Sample], plan: ShardPlan, options: Namespace
) -> TarIndex:
    left_out = []
    with (
        whole_file(tar_path, _UNFINISHED) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        for number, made in samples:
            if isinstance(made, Exception):
                _check_skipped(made, options)
                # Without the source folder, whose path may differ in another run.
                reason = str(made).replace(os.path.join(plan.folder, ""), "")
                left_out.append([plan.files[number].path, reason])
            else:
                for ending, content in made.items():
                    info = tarfile.TarInfo(f"{number:09d}.{ending}")
                    info.size = len(content)  # time, owner, group are 0: always the same bytes
                    tar.addfile(info, io.BytesIO(content))
    index = scan_tar(tar_path)
    index.left_out.extend(left_out)
    _write_index(tar_path, index)
    return index


def _check_skipped(error: Exception, options: Namespace) -> None:
    """Raise unless the file is to be left out. A transient error always ends the run: another run
    could read the file.
    """
    is_files_own = isinstance(error, DecodeError) or (
        isinstance(error, OSError) and not is_transient(error) and options.source.is_dir()
    )
    if not is_files_own:
        raise CommandError(error, status=1) from error
    if options.on_error == "raise":
        advice = "With --on-error skip the same command goes on and leaves such files out."
        raise CommandError(f"{error}\n{advice}", status=1) from error


def _write_index(tar: str, index: TarIndex) -> None:
    with whole_file(index_path(tar), _UNFINISHED) as file:
        file.write(index.to_json())


def check_shards(folder: Path, *, writes_indexes: bool) -> int:
    """Compare tars with their indexes, or write the indexes that are missing; return the exit
    status, 1 if a tar is damaged.
    """
    tars = _tars_in(os.fspath(folder))
    what = "indexing" if writes_indexes else "verifying"
    print(f"{what} {counted(len(tars), 'shard')}", file=sys.stderr)
    num_bad = num_samples = 0
    for tar in tars:
        here, problem = _checked(tar, writes_index=writes_indexes)
        num_samples += here
        if problem is not None:
            num_bad += 1
            print(f"DAMAGED {tar}: {problem}")
    what = "indexed" if writes_indexes else "verified"
    what += f", {num_bad} damaged" if num_bad or not writes_indexes else ""
    if num_bad:
        what += ". Delete a damaged tar, and prepare it again with the command that made it"
    print(f"{counted(len(tars), 'shard')}, {counted(num_samples, 'sample')}: {what}")
    return 1 if num_bad else 0


def _tars_in(path: str) -> list[str]:
    """Return a tar, or the tars in a folder, sorted, including those that its plan names and that
    are missing.
    """
    if path.endswith(".tar") and os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        raise CommandError(f"{path}: expected a folder of tars, or a file named *.tar.")
    found = {name for name in os.listdir(path) if name.endswith(".tar")}
    plan = Path(path, _PLAN_FILE)
    try:
        if plan.exists():
            found.update(map(_tar_name, range(json.loads(plan.read_bytes())["num_shards"])))
    except (KeyError, TypeError, ValueError) as error:
        raise CommandError(f"{plan}: damaged: {type(error).__name__}: {error}.") from error
    if not found:
        raise CommandError(f"{path}: the folder has no file named *.tar.")
    return [os.path.join(path, name) for name in sorted(found)]


def _checked(tar: str, *, writes_index: bool) -> tuple[int, str | None]:
    """Return how many samples a tar has, and what is wrong with it; None = nothing."""
    try:
        if writes_index and not os.path.exists(index_path(tar)):
            _write_index(tar, scan_tar(tar))
        index = load_index(tar)
        return index.num_samples, None if writes_index else _difference(index, scan_tar(tar))
    except FileNotFoundError as error:
        return 0, f"{error.filename} is missing"
    except ValueError as error:  # DecodeError is one
        return 0, str(error)


def _difference(index: TarIndex, found: TarIndex) -> str | None:
    """Return the first way in which a tar differs from what its index says."""
    expected, there = (
        zip(*(each.files[column] for column in FILE_COLUMNS), strict=True)
        for each in (index, found)
    )
    for file, other in zip_longest(expected, there):
        if file != other:
            return f"expected {file}, found {other} (name, offset, size and crc32 of a file)"
    if (found.samples, found.num_bytes) != (index.samples, index.num_bytes):
        return "the samples are not where the index says"
    return None
