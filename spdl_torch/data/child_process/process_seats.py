"""Workers in processes of their own.

Each child is one worker. A job goes to the one that has the fewest, or to the one whose turn it is;
each sends batches as they are done, and the epoch's outlet puts them in order. If a child is
killed, a new one takes its place, and its batches are made again: by the new one, or by the others
if it would have to import everything first. Children may join and leave while an epoch runs: one
that leaves gets no more jobs, and ends when it has answered those that it has.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from ...engine.channel import ChannelClosed
from ...engine.recorder import is_tracing
from ...engine.shared import weakly
from ...engine.threads import ThreadGroup, exit_has_begun
from ..rng.patches import install_for_copies
from ..workers.jobs import Failed, Given, Loaded, Result
from ..workers.worker_info import intra_op_threads_kept, use_one_intra_op_thread
from .batch_packing import unpack
from .connection import start_all
from .error_pickle import unpack_errors_of
from .process_counts import ProcessCounts
from .roster import Losses, Roster
from .worker_process import Equipment, WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...observe.verdict.placement import Placement
    from ..checkpoint.user_state import WorkerState
    from ..rng.keys import StreamKey
    from ..workers.epoch import Epoch
    from ..workers.load_spec import LoadSpec
    from ..workers.transfer_stage import DeviceStage
    from .mappings import Mappings
    from .messages import Answer

_logger = logging.getLogger("spdl_torch.data")

_JOIN_SECONDS = 1.0
_ASK_SECONDS = 2.0
_MOST_REPLACED = 100
"""The number of children that are replaced in an epoch."""
_LOOK_SECONDS = 0.1
"""The interval at which a waiting loop checks whether it has to fork a child."""


class ProcessSeats:
    """The worker processes of a crew; see ``Seats``.

    ``request_stop`` asks the children to end. Each has 5 s to finish the sample that it is
    fetching; then it is killed. Only the interpreter's exit waits for that.

    Owners of its state: the loop's thread writes ``_epoch``, ``_spec`` and ``_losses``;
    ``request_stop``, on any thread, sets ``_epoch`` to None, for good. The children and their jobs
    change under the roster's lock, by the loop's thread and by each child's receiver.
    """

    look_seconds = _LOOK_SECONDS

    def __init__(
        self,
        spec: LoadSpec,
        device_stage: DeviceStage | None = None,
        *,
        context: Any = None,
    ) -> None:
        """``context``: see ``Equipment``."""
        self.placement: Placement | None = None
        self.failure: BaseException | None = None  # it comes as a result
        self._finalize = spec.finalize
        self._spec = spec._replace(finalize=None, device_index=None)
        self._equipment = Equipment(context, self._spec, device_stage)
        self._threads = ThreadGroup(weakly(self.request_stop))
        self.counts = ProcessCounts(spec.num_workers)
        self._epoch: Epoch | None = None
        self.roster = Roster(spec.num_workers, has_turns=spec.has_turns)
        self._is_whole = True  # False once a child that was to join could not be started
        # Those that replace killed ones and are to be forked by the loop's thread, of which the
        # other children are copies too: see ChildConnection. A receiver appends, the loop's thread
        # takes: both are atomic on a deque.
        self._unstarted: deque[WorkerProcess] = deque()
        self._losses = Losses()
        self.is_stopped = False

    def prepare(self, key: StreamKey, workers: Sequence[WorkerState]) -> None:
        """Start the children, or have those that are there begin an epoch; new ones come in place
        of those that died. See ``Seats.prepare``.
        """
        if self.children:
            self._prepare_again(key, workers)
            return
        if self.are_copies:
            install_for_copies()
        try:
            new = [self._new_child(number, key, workers) for number in self.roster.numbers]
            for child in new:
                self.roster.put(child)
            self._start(*new)
        except BaseException:  # Ctrl-C too
            self.request_stop()
            raise

    def _prepare_again(self, key: StreamKey, workers: Sequence[WorkerState]) -> None:
        if is_tracing() and self._epoch is not None:
            self.counts.keep_rows()
        self._epoch = None  # a child that dies from here on is replaced below, or by the next epoch
        new: list[WorkerProcess] = []
        with self.roster.lock:
            self._losses = Losses()
            leaving = self.roster.leaving
            stay = {number: self.children[number] for number in self.roster.numbers}
            for number, child in stay.items():
                if child.connection.is_over:
                    stay[number] = self._new_child(number, key, workers)
                    new.append(stay[number])
                else:
                    child.restart(key, workers)
            self.roster.begin_epoch(stay)
        for child in leaving:
            child.connection.hang_up()
        if new:
            self._start(*new)

    def begin(self, epoch: Epoch) -> None:
        """Deliver to this epoch from now on; see ``Seats.begin``."""
        if self._epoch is epoch:
            return
        self.counts.begin(epoch)
        self._epoch = epoch
        # A child may have ended before its receiver could see this epoch: nobody else checks.
        for child in self.children.values():
            self._look_after(child)

    def submit(self, job: Given) -> Exception | None:
        """Give out a job; see ``Seats.submit``. Return what pickle raises on its index."""
        if self._epoch is None:
            raise ChannelClosed
        roster = self.roster
        if self._unstarted:
            self._start_successors()
        if len(roster.children) > len(roster.numbers):
            self._part()
        return roster.submit(job)

    def tend(self, epoch: Epoch) -> None:
        """Fork the children that are due, and give a worker its slabs back."""
        self._start_successors()
        if len(self.children) == 1 and not len(epoch.outlet):
            # The worker may need the freed slabs for the very batch that the loop waits for. (Of
            # several children each gets its own back with its next job, which is soon.)
            for child in self.children.values():
                child.send_freed()

    def at_work(self, awaited: int | None) -> str:
        """Describe what the children's threads do. Blocks up to 2 s for a child's answer."""
        asked = self.roster.with_batch(awaited) if self._epoch is not None else []
        return "\n".join(self._at_work_in(child, awaited) for child in asked)

    def _at_work_in(self, child: WorkerProcess, awaited: int | None) -> str:
        connection = child.connection
        described = connection.line.questions.ask("at_work", awaited, timeout=_ASK_SECONDS)
        if described is None:
            return (
                f"The worker process (pid {connection.pid}) is being started, or did not "
                f"answer within {_ASK_SECONDS:g} s because native code there keeps the GIL."
            )
        return str(described)

    @property
    def children(self) -> Mapping[int, WorkerProcess]:
        """The children by number, with those that are about to leave."""
        return self.roster.children

    @property
    def are_copies(self) -> bool:
        """Whether children are forked: copies of this process and the thread that starts them."""
        return self._equipment.are_copies

    @property
    def loss(self) -> BaseException | None:
        """The error that a child's end means for the epoch; see ``Seats.loss``."""
        return self._losses.error

    def rest(self) -> None:
        """Note that an epoch is over; see ``Seats.rest``."""
        self._part()

    def request_stop(self) -> None:
        """End every wait, and ask the children to end. Never blocks; safe in a finalizer."""
        if not self._threads.is_here:
            return
        self.is_stopped = True  # before looking for children: a receiver looks after it adds one
        epoch = self._epoch
        if epoch is not None:
            epoch.close()
        self._epoch = None
        self._end_children()

    def _end_children(self) -> None:
        """Let the children end; while tracing, only once a thread has kept their rows."""
        children, rows = list(self.children.values()), self.counts.rows
        is_left_to_thread = False
        try:
            if rows is not None and is_tracing() and not exit_has_begun():
                rows.keep_before_the_end(children, self._threads)
                is_left_to_thread = rows.is_keeping
        finally:  # Ctrl-C too
            if not is_left_to_thread:
                for child in children:
                    child.connection.hang_up()

    def __del__(self) -> None:
        # The iterator's finalizer does this too, but Ctrl-C may come before it begins.
        if hasattr(self, "roster"):
            self.request_stop()

    def stop(self) -> None:
        """Keep what the children recorded, call ``request_stop`` and wait for them: they have
        nothing left to do.
        """
        if self._epoch is not None:
            self.counts.keep_rows()
        self.request_stop()
        self._threads.join(_JOIN_SECONDS)

    def _new_child(
        self, number: int, key: StreamKey, workers: Sequence[WorkerState]
    ) -> WorkerProcess:
        """Return a child that is yet to be started."""
        child = WorkerProcess(
            number,
            self._spec,
            self._equipment,
            key,
            workers,
            hear=weakly(self._hear),
            ended=weakly(self._child_has_ended),
        )
        self.counts.add(child)
        return child

    def _start(self, *children: WorkerProcess) -> None:
        connections, context = [each.connection for each in children], self._equipment.context
        if self._finalize is None:
            start_all(connections, context, self._threads)
            return
        # Pinning copies, on the receiver's thread: give it one intra-op thread.
        with intra_op_threads_kept():
            start_all(connections, context, self._threads, use_one_intra_op_thread)

    def resize(self, num_workers: int, max_outstanding: int) -> int:
        """Change the number of children; see ``Seats.resize``.

        Waits until the processes of those that join exist, some milliseconds each. If one cannot be
        started, this is logged, and the number no longer changes.
        """
        epoch = self._epoch
        if epoch is None or not self._is_whole or num_workers < 1 or max_outstanding < 1:
            return len(self.roster.numbers)
        self._spec = self._spec._replace(max_outstanding=max_outstanding)
        for number in range(len(self.roster.numbers), num_workers):
            if not self._join(number, epoch):
                num_workers = number
                break
        self._equipment.grow(max_outstanding, num_workers)
        self.roster.numbers = range(num_workers)
        self._spec = self._spec._replace(num_workers=num_workers)
        self.counts.workers.change(num_workers)
        return num_workers

    def _join(self, number: int, epoch: Epoch) -> bool:
        """Give that number to a child, perhaps to the one that is about to leave it."""
        with self.roster.lock:
            if number in self.children:  # it has not left yet
                return True
            child = self._new_child(number, epoch.key, epoch.workers)
        try:
            self._start(child)
            self.roster.put(child)  # not before: the epoch ends with one that cannot be started
        except Exception as error:
            child.connection.hang_up()
            self._is_whole = False
            _logger.warning(
                "DataLoader: no process could be started for one more worker (%s); the others go "
                "on, and their number stays.",
                error,
            )
            return False
        except BaseException:  # Ctrl-C
            child.connection.hang_up()
            raise
        self._look_after(child)
        return True

    def _part(self) -> None:
        """End the children that are to leave and have answered all their jobs."""
        for child in self.roster.part():
            self.counts.left(child)
            child.connection.hang_up()

    def _look_after(self, child: WorkerProcess) -> None:
        """Note what happened to a child before its receiver could know that it belongs here."""
        if child.connection.is_over:
            self._child_has_ended(child)
        if self.is_stopped:
            child.connection.hang_up()

    # Called on the receivers' threads:

    def _hear(self, child: WorkerProcess, answer: Answer) -> None:
        mappings = child.mappings
        mappings.forget(answer.retired)
        result = unpack_errors_of(answer.result)
        with self.roster.lock:
            epoch = self._epoch
            is_current = epoch is not None and answer.epoch == child.epoch
            job = child.jobs.pop(result.number, None) if is_current else None
            if job is not None:
                child.answered(answer.readings)
        if epoch is None or job is None:
            if isinstance(result, Loaded) and result.batch.ticket is not None:
                mappings.give_back(result.batch.ticket.slab)
            return
        if isinstance(result, Loaded):
            result = self._unpacked(result, mappings)
        try:
            epoch.deliver(result)
        except ChannelClosed:
            pass  # the epoch has just ended

    def _unpacked(self, loaded: Loaded, mappings: Mappings) -> Result:
        try:
            loaded = unpack(loaded, mappings)
            if self._finalize is not None:
                loaded = loaded._replace(batch=self._finalize(loaded.batch))
        except BaseException as error:
            return Failed(loaded.number, error, loaded.progress, loaded.tries)
        return loaded

    def _child_has_ended(self, child: WorkerProcess) -> None:
        """Have the child's batches made again, or end the epoch.

        A forked successor is there in milliseconds, and makes them. One that imports torch takes
        seconds, in which the loop would wait for the first of them: the others make them.
        """
        is_late = not self.are_copies
        with self.roster.lock:
            epoch = self._epoch
            if epoch is None or self.children.get(child.number) is not child:
                return
            jobs = list(child.jobs.values())
            if not self._may_be_replaced(child, jobs):
                self._losses.end(child.connection, jobs)
                epoch.close()  # wakes a waiting get(), which raises the reason
                return
            successor = self._new_child(child.number, epoch.key, epoch.workers)
            others_make = self.roster.replace(child, successor, jobs, late=is_late)
        self.counts.replaced(child)  # before the log says so: whoever reads it finds it reported
        who = "The others" if others_make else "A new process"
        ending = "" if others_make else "s"
        what = f"take{ending} its place; it had no batch to make."
        if jobs:
            what = f"make{ending} its batches again: {', '.join(str(job.number) for job in jobs)}."
        _logger.warning("%s %s %s", child.connection.death(), who, what)
        if is_late:
            self._start_successor(successor)
        else:
            self._unstarted.append(successor)

    def _may_be_replaced(self, child: WorkerProcess, jobs: list[Given]) -> bool:
        """Return whether another child can make the jobs of one that has ended.

        It can if batches do not depend on those before: workers that take turns have iterators or
        random streams that ended with them. A child that is the only one is not replaced: nobody
        else is at work, and it holds all the batches, any of which may have ended it.
        """
        if not child.connection.was_killed or self._spec.has_turns or len(self.children) == 1:
            return False
        return self._losses.may_be_replaced(jobs) and self.counts.num_replaced < _MOST_REPLACED

    def _start_successors(self) -> None:
        """Fork those that replace killed children."""
        while self._unstarted and not self.is_stopped:
            self._start_successor(self._unstarted.popleft())

    def _start_successor(self, successor: WorkerProcess) -> None:
        try:
            self._start(successor)
        except Exception as error:
            successor.connection.fail(error)
            self._losses.end(successor.connection)
            epoch = self._epoch
            if epoch is not None:
                epoch.close()
        if self.is_stopped:
            successor.connection.hang_up()
