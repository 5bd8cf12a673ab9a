"""The worker process, from its first message to its end."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ....machine.probes import count_only_this_thread
from ....scopes import scope
from ...rng.patches import install_functions
from ...stats.counts import WorkerCounts
from ..worker_thread import Worker, use_one_intra_op_thread
from .page import Guard, Page
from .signals import leave_to_the_trainer
from .trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ...checkpoint.user_state import WorkerState
    from ...rng.keys import StreamKey
    from ..backend import LoadSpec
    from .wire import OwnedSocket


class Beginning(NamedTuple):
    """The arguments with which the child is started."""

    page: Page
    spec: Callable[[], LoadSpec]
    """What opens the loader's configuration."""
    number: int
    """The worker's number among those of all processes."""
    key: StreamKey
    workers: Sequence[WorkerState]
    default_dtype: torch.dtype
    """torch's default dtype in the trainer."""
    environment: dict[str, str] | None
    """The trainer's environment, and its rank: a fork server's children have the environment from
    when the server started. None = the child is forked, and already has it."""


def main(end: OwnedSocket, asked: OwnedSocket, beginning: Beginning) -> None:
    """Run until the trainer hangs up, or is gone; then multiprocessing ends the process, as it ends
    torch's workers.

    ``asked``: by which the trainer asks what is at work.
    """
    # Collections would write to every page that is shared with the trainer, or with a fork server.
    gc.freeze()
    leave_to_the_trainer()
    signal.set_wakeup_fd(-1)  # a forked child has the trainer's, an event loop's
    trainer = Trainer(end, beginning.page)
    if hasattr(os, "register_at_fork"):
        # What the dataset forks must not hold it open, or the trainer would not see the end.
        os.register_at_fork(after_in_child=trainer.wire.close)
    trainer.carry_log_lines()
    beginning.page.is_up = True
    _run_worker(trainer, Guard(asked, beginning.page), beginning)
    trainer.send_all()


def _run_worker(trainer: Trainer, guard: Guard, beginning: Beginning) -> None:
    what = "the worker process could not be set up"
    try:
        spec = _opened(beginning, trainer)
        threading.current_thread().name = f"spdl-worker-{beginning.number}"
        _seed_process(spec.draws.base_seed, beginning.number)
        guard.start()
        what = "the worker process failed"
        _work(trainer, beginning, spec, guard)
    except BaseException as error:
        trainer.send_fatal(what, error)
    trainer.counts = None  # the trainer stays, and would keep the dataset


def _work(trainer: Trainer, beginning: Beginning, spec: LoadSpec, guard: Guard) -> None:
    """Work until the trainer hangs up, or is gone."""
    use_one_intra_op_thread()
    count_only_this_thread()
    trainer.records, trainer.counts = spec.stats, WorkerCounts(1, spec.recipe.dataset)
    counts = trainer.counts
    trainer.begin(0, beginning.key, beginning.workers)
    worker = Worker(
        beginning.number,
        spec,
        trainer.shifts,
        guard.activity,
        copying=None,
        cells=counts.new_cells(enabled=spec.stats),
        could_not_start=_note_nothing,
    )
    try:
        worker.serve(_note_nothing, lambda: False)
    finally:
        counts.end()  # its epoch refers to the jobs, and these to it, and so to the dataset


def _note_nothing(*_: object) -> None:
    """Do nothing: nobody waits for the worker, whose error answers its jobs."""


def _opened(beginning: Beginning, trainer: Trainer) -> LoadSpec:
    """Return the loader's configuration, and apply the trainer's settings to this process."""
    torch.set_default_dtype(beginning.default_dtype)
    environment = beginning.environment
    if environment is not None:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
    # Before the dataset is unpickled, and its modules are imported: a function of random that it
    # keeps is found by its name there, and has to be the one that follows the samples' streams.
    install_functions()
    spec: LoadSpec = beginning.spec()
    writer = trainer.writer
    return spec._replace(finalize=writer.pack, memory=writer, owns_dataset=True)


def _seed_process(base_seed: int, worker: int) -> None:
    """Seed the process's own generators as torch seeds its workers'. Samples have streams of their
    own; these are for draws that do not follow them, in threads that the dataset starts."""
    seed = base_seed + worker
    random.seed(seed)
    with _stacks_left_out():
        torch.manual_seed(seed)
    np.random.seed([seed & 0xFFFF_FFFF, worker])


@scope
def _stacks_left_out() -> Iterator[None]:
    """Let no stack be described meanwhile. With each call for a device that is not in use yet torch
    keeps a description of where it came from, for which it reads the files of all frames: 3 ms or
    more.
    """
    absent: Any = object()
    limit = getattr(sys, "tracebacklimit", absent)
    sys.tracebacklimit = 0
    try:
        yield
    finally:
        if limit is absent:
            del sys.tracebacklimit
        else:
            sys.tracebacklimit = limit
