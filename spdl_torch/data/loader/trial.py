"""The trial of worker processes: how it ends. A dataset whose batches are on a device is not tried
at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..child_process.signals import handlers_deferred
from . import move_limits as limits

if TYPE_CHECKING:
    from ..workers.moving import Moving


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
    if not memory.is_on_trial or tally.num_batches + tally.num_epochs < limits.TRIAL_BATCHES:
        return
    least = limits.TRIAL_SECONDS
    if tally.num_epochs and tally.num_epochs < limits.TRIAL_EPOCHS:
        least = limits.LONG_TRIAL_SECONDS
    if tally.seconds + tally.num_epochs * min(tally.start_seconds, least) < least:
        return
    gain = memory.gain
    with handlers_deferred():  # Ctrl-C comes before a decision or after it
        if gain >= limits.GAIN:
            memory.moved(gain)
        else:
            memory.stays(f"the loop was {gain:.2f} times as fast with processes")


def failed_alone(error: BaseException) -> str:
    """Return the reason to stay on threads after an error that they do not have."""
    return f"a batch failed in a worker process alone ({type(error).__name__}: {error})"


def not_started(error: BaseException) -> str:
    """Return the reason to stay on threads if there are no children."""
    return f"worker processes could not be started ({error})"
