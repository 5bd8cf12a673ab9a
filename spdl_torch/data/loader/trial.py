"""The trial of worker processes: its limits, the loop's pace with each kind of workers, and how it
ends. A dataset whose batches are on a device is not tried at all."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..child_process.signals import handlers_deferred

if TYPE_CHECKING:
    from ..workers.moving import Moving

LOOK_SECONDS = 0.6
"""The time between two checks of the threads: the probe of the GIL needs half a second."""
LEAST_WAIT = 0.2
"""The share of the time that the loop has to wait; below it, moving could gain little."""
LEAST_BATCHES = 8
"""The number of batches from which the threads' speed is known."""
TRIAL_SECONDS, TRIAL_BATCHES = 0.5, 8
"""The least length of the children's trial."""
TRIAL_EPOCHS, LONG_TRIAL_SECONDS = 2, 2.0
"""The least number of epochs in a trial that begins with one, unless they take long: in the first
one modules are imported and caches filled."""
LONGEST_START_SECONDS = 5.0
"""The time after which forked children that are not ready are probably waiting for a thread or a
lock that does not exist in them."""
GAIN = 1.1
"""The speedup of the loop from which the children keep the work; the noise of such windows is a
few percent."""


class Pace:
    """Counts an epoch's batches for the decision where workers live. The loop's thread owns it."""

    def __init__(self, memory: Moving) -> None:
        self._memory = memory
        self._last_seconds = 0.0  # when the epoch began, or the loop had its last batch
        self._num_warm = 0  # the next batches that are not counted: those of a beginning
        self._is_first = False  # whether the epoch's first batch is still to come

    def begin(self, seconds: float) -> None:
        """Begin an epoch, at this time of ``perf_counter()``."""
        self._last_seconds, self._num_warm, self._is_first = seconds, 0, True
        self._memory.begin_epoch()

    def warm_up(self) -> None:
        """Note that batches come from others from now on: the first are those of their start."""
        self._num_warm = TRIAL_BATCHES

    def count(self, *, on_threads: bool, is_typical: bool) -> None:
        """Count the batch that the loop gets now, and the time since the last one. ``is_typical``:
        nothing else slows the workers down."""
        now, memory = perf_counter(), self._memory
        seconds, self._last_seconds = now - self._last_seconds, now
        memory.count()
        if on_threads:
            memory.unlooked_seconds += seconds
        if self._num_warm:
            self._num_warm -= 1
        elif is_typical:
            tally = memory.threads if on_threads else memory.children
            if self._is_first:
                self._is_first = False
                tally.begin(seconds)
            else:
                tally.add(seconds)


def is_on_device(batch: Any) -> bool:
    """Return whether a part of the batch is, as a forked process could not have it."""
    from ...io._transfer.tree import leaves_of, spots_of  # few loaders come to a trial

    for leaf in leaves_of(spots_of(batch)):
        device = getattr(leaf, "device", None)
        if getattr(leaf, "is_cuda", False) or getattr(device, "type", "cpu") not in ("cpu", "meta"):
            return True
    return False


def settle(memory: Moving) -> None:
    """Decide where the workers live from now on, if the trial is on and was long enough."""
    tally = memory.children
    if not memory.is_on_trial or tally.num_batches + tally.num_epochs < TRIAL_BATCHES:
        return
    least = TRIAL_SECONDS
    if tally.num_epochs and tally.num_epochs < TRIAL_EPOCHS:
        least = LONG_TRIAL_SECONDS
    if tally.seconds + tally.num_epochs * min(tally.start_seconds, least) < least:
        return
    gain = memory.gain
    with handlers_deferred():  # Ctrl-C comes before a decision or after it
        if gain >= GAIN:
            memory.moved(gain)
        else:
            memory.stays(f"the loop was {gain:.2f} times as fast with processes")


def failed_alone(error: BaseException) -> str:
    """Return the reason to stay on threads after an error that they do not have."""
    return f"a batch failed in a worker process alone ({type(error).__name__}: {error})"


def not_started(error: BaseException) -> str:
    """Return the reason to stay on threads if there are no children."""
    return f"worker processes could not be started ({error})"
