"""The states of an iterator's epoch, and which may follow which."""

from __future__ import annotations

import enum


class EpochState(enum.Enum):
    """The state of an epoch. Only ``EpochIterator._advance`` changes it, on the loop's thread."""

    BEGINNING = "beginning"  # the position and the seed are set; workers get their first jobs
    RUNNING = "running"  # batches are handed out
    OVER = "over"  # the loop has had the last batch; a persistent loader may begin another epoch
    LOST = "lost"  # the loop has had the error after which no batch comes


FOLLOWING: dict[EpochState, frozenset[EpochState]] = {
    EpochState.BEGINNING: frozenset(EpochState),
    EpochState.RUNNING: frozenset(EpochState) - {EpochState.RUNNING},
    EpochState.OVER: frozenset({EpochState.OVER, EpochState.BEGINNING}),
    EpochState.LOST: frozenset({EpochState.BEGINNING}),
}
"""From BEGINNING or RUNNING an epoch begins anew if Ctrl-C, an error or ``break`` ended the one
before. Ctrl-C while it begins leaves the jobs that were given out, after which it is LOST. OVER
stays, as an iterator that has ended is asked again."""
