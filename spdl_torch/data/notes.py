"""What is said on the user's own exceptions: where they happened."""

from __future__ import annotations

import threading
from typing import Any

from ..pipeline.failures import describe

__all__ = [
    "add_thread_note",
    "cause_of",
    "describe_batch",
    "describe_indices",
    "not_stop_iteration",
    "noted_sample",
]


def add_thread_note(error: BaseException, where: str, what: str = "") -> None:
    """Say on the user's own exception where it happened, once, and on which worker thread."""
    thread = threading.current_thread().name
    note = f"{where} ({thread})" if thread.startswith("spdl-") else where
    note = f"{note}, {what}" if what else note
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def noted_sample(error: BaseException, index: Any) -> BaseException:
    """An error of a map-style dataset's sample."""
    error = not_stop_iteration(error, f"dataset[{describe(index)}]")
    add_thread_note(error, "in the dataset", f"sample index {describe(index)}")
    return error


def not_stop_iteration(error: BaseException, where: str) -> BaseException:
    """StopIteration would end the trainer's loop early and in silence; torch lets it."""
    if isinstance(error, StopIteration):
        return RuntimeError(
            f"{where} raised StopIteration, which would end the epoch early. A map-style dataset "
            "ends by its length; raise IndexError or another error for a bad index."
        )
    return error


def cause_of(error: BaseException) -> BaseException | None:
    """``raise ... from`` this keeps what the user's own ``raise ... from`` said."""
    return error if isinstance(error, StopIteration) else error.__cause__


def describe_indices(index: Any) -> str:
    """Those of a batch in one short line."""
    text = ", ".join(map(describe, list(index)[:8]))
    return f"indices [{text}{', ...' if len(index) > 8 else ''}]"


def describe_batch(number: int, index: Any) -> str:
    """A batch by its place in the epoch and what the sampler asked for, in one short line."""
    if isinstance(index, list | tuple):
        return f"batch {number}, {describe_indices(index)}"
    return f"batch {number}, sample index {describe(index)}"
