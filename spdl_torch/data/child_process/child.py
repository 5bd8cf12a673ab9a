"""The loading process: workers between two ends of a pipe.

One worker has the process to itself, see ``lone_worker``. Several are threads of a WorkerPool: the
main thread then only reads the trainer's messages, so it notices at once when the trainer is gone,
whatever the workers do, and another thread, the sender, makes the pool and sends its results.
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import random
import signal
import sys
import threading
from dataclasses import replace
from multiprocessing import util
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ...errors import PipelineStopped
from ...pipeline.channel.channel import Channel, ChannelClosed
from ...pipeline.threads.thread_group import taking_over
from ..rng.patches import install
from ..workers.worker_pool import WorkerPool
from .batch_packing import SlabWriter
from .lone_worker import LoneWorker
from .messages import Ask, Free, Reply, Restart, Up
from .signals import leave_to_the_trainer
from .uplink import Uplink

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from ..checkpoint.resume_state import WorkerState
    from ..rng.keys import StreamKey
    from ..workers.load_spec import LoadSpec

__all__ = ["Beginning", "main"]

_FINISH_SECONDS = 5.0  # for the samples that are being fetched when the trainer hangs up

_MOST_RESTARTS = 1_000


class Beginning(NamedTuple):
    """The arguments with which the child is started."""

    spec: Any
    key: StreamKey
    workers: Sequence[WorkerState]
    default_dtype: torch.dtype
    """torch's default dtype in the trainer, which worker threads there would use."""
    environment: dict[str, str] | None
    """The trainer's environment, and its rank: a fork server's children have the environment from
    when the server started. None = the child is forked, and already has it."""

    @property
    def is_forked(self) -> bool:
        """Whether the child has a copy of the trainer's memory."""
        return self.environment is None


def main(connection: Connection, control: Connection | None, beginning: Beginning) -> None:
    """Run until the trainer hangs up, or is gone; then end the process.

    ``control``: the pipe for the trainer's questions, if there is one worker.
    """
    if beginning.is_forked:
        gc.freeze()  # collections would write to every page that is shared with the trainer
    leave_to_the_trainer()
    signal.set_wakeup_fd(-1)  # a forked child has the trainer's, an event loop's
    uplink = Uplink(connection)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=uplink.forget)
    uplink.carry_log_lines()
    uplink.send(Up())
    if control is None:
        Child(connection, beginning, uplink).run()
    else:
        _run_lone(connection, control, beginning, uplink)
    # Skip the interpreter's teardown: threads may still be inside user code, and would crash. A
    # forked child has inherited the trainer's exit functions, which are not for it.
    if beginning.is_forked:
        getattr(util, "_exit_function", int)()
    else:
        getattr(atexit, "_run_exitfuncs", int)()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(0)


def _run_lone(
    connection: Connection, control: Connection, beginning: Beginning, uplink: Uplink
) -> None:
    try:
        spec = _opened(beginning, uplink)
        threading.current_thread().name = f"spdl-worker-{spec.id_of(0)}"
        _seed_process(spec.base_seed, spec.id_of(0))
        spec = replace(spec, owns_dataset=True)
        worker = LoneWorker(spec, beginning.key, beginning.workers, uplink)
        listener = threading.Thread(
            target=worker.answer, args=(control,), name="spdl-listener", daemon=True
        )
        listener.start()
    except BaseException as error:
        uplink.send_fatal("the loading process could not be set up", error)
        return
    try:
        worker.run(connection)
    except BaseException as error:
        uplink.send_fatal("the loading process failed", error)


def _opened(beginning: Beginning, uplink: Uplink) -> LoadSpec:
    """Return the loader's configuration, and apply the trainer's settings to this process."""
    torch.set_default_dtype(beginning.default_dtype)
    environment = beginning.environment
    if environment is not None:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
    # Before the dataset is unpickled, and its modules are imported: a function of random that it
    # keeps is found by its name there, and has to be the one that follows the samples' streams.
    install()
    spec: LoadSpec = beginning.spec.open()
    writer = SlabWriter(uplink.slabs)
    return replace(spec, finalize=writer.pack, memory=writer)


def _seed_process(base_seed: int, worker: int) -> None:
    """Seed the process's own generators as torch seeds its workers'. Samples have streams of their
    own; these are for draws that do not follow them, in threads that the dataset starts."""
    seed = base_seed + worker
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed([seed & 0xFFFF_FFFF, worker])


class Child:
    """The pool, the messages that wait for it, and the way back to the trainer."""

    def __init__(self, connection: Connection, beginning: Beginning, uplink: Uplink) -> None:
        self._connection = connection
        self._beginning = beginning
        self._uplink = uplink
        # Guards _pool and _backlog: a message goes to the backlog or to the pool, never to neither.
        self._pool_lock = threading.Lock()
        self._pool: WorkerPool | None = None
        self._backlog: list[tuple[Any, ...]] = []  # messages before there was a pool
        self._restarts = Channel[Restart](_MOST_RESTARTS)
        self._restarted = threading.Semaphore(0)
        self._ids: range | None = None  # of this process's workers

    def run(self) -> None:
        """Read messages until the other end is closed. Runs on the main thread."""
        send = taking_over(self._run_sender)  # so do the workers, which it starts
        sender = threading.Thread(target=send, name="spdl-sender", daemon=True)
        sender.start()
        try:
            while True:
                self._hear(pickle.loads(self._connection.recv_bytes()))
        except (EOFError, OSError):
            pass  # the trainer has hung up, or is gone
        except BaseException as error:
            self._uplink.send_fatal("the loading process could not handle a message", error)
        self._restarts.close()
        if self._pool is not None:
            self._pool.stop(_FINISH_SECONDS)
            sender.join(_FINISH_SECONDS)

    # Called on the main thread:

    def _hear(self, message: Any) -> None:
        if isinstance(message, Ask):
            self._uplink.send(Reply(message.question, self._reply(message)))
            return
        with self._pool_lock:
            pool = self._pool
            if pool is None:
                self._backlog.append(message)
                return
        if isinstance(message, Restart):
            # The sender does the restart, so that it knows the epoch of each result. interrupt()
            # wakes it from pool.get(); wait here until it is done: the next jobs are for the new
            # epoch.
            pool.interrupt()
            self._restarts.put(message)
            self._restarted.acquire()
        else:
            self._obey(pool, message)

    def _obey(self, pool: WorkerPool, message: tuple[Any, ...]) -> None:
        if isinstance(message, Restart):
            pool.restart(message.key, message.workers)
            self._uplink.begin(message.epoch)
        elif isinstance(message, Free):
            self._uplink.free(message)
        else:
            number, index, worker, first, wants_state, *freed = message
            self._uplink.job_came(Free(*freed))
            pool.submit(number, index, self._own(worker), first, wants_state=wants_state)

    def _own(self, worker: int) -> int:
        """Return the number of a worker among those of this process."""
        ids = self._ids
        return worker if ids is None or worker not in ids else ids.index(worker)

    def _reply(self, message: Ask) -> Any:
        pool = self._pool
        if pool is None:
            return None
        try:
            if message.question == "at_work":
                return pool.at_work(message.argument)
            return pool.stats.timeline()
        except PipelineStopped:
            return None

    # Called on the sender's thread:

    def _run_sender(self) -> None:
        try:
            spec = _opened(self._beginning, self._uplink)
            self._ids = spec.ids
            pool = WorkerPool(spec)
            pool.start(self._beginning.key, self._beginning.workers)
        except BaseException as error:
            self._uplink.send_fatal("the loading process could not be set up", error)
            return
        self._uplink.stats = pool.stats
        with self._pool_lock:
            self._pool = pool
            for message in self._backlog:
                self._obey(pool, message)
            self._backlog.clear()
        try:
            while True:
                try:
                    result = pool.get(None)
                except ChannelClosed:
                    self._obey(pool, self._restarts.get())
                    self._restarted.release()
                    continue
                self._uplink.send_result(result)
                del result  # it would keep its slab from being reused while this thread waits
        except (ChannelClosed, PipelineStopped, OSError):
            pass  # the trainer has hung up, or is gone
        except BaseException as error:
            self._uplink.send_fatal("the loading process failed", error)
        finally:
            self._restarted.release()  # the main thread may be waiting for a restart
