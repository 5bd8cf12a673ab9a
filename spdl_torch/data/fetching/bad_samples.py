"""``on_error="skip"``: what becomes of samples that fail, and when there are too many of them.

The workers find them: they leave a bad sample out of its batch, or take another one in its place,
by rules that do not depend on the threads. Counting, logging and the verdict "too many" happen on
the trainer's thread, where batches are handed out: what was only prefetched does not count, and
the same epoch fails at the same batch whatever the number of threads.
"""

from __future__ import annotations

import logging
import operator
import traceback
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import PipelineFailure, UnsupportedOptionError
from ...pipeline.failures import FailureBudget, attach_note, describe, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ...pipeline.definition.specs import MaxFailures

__all__ = [
    "DEFAULT_ERROR_BUDGET",
    "MISSING",
    "BadSample",
    "NoGoodSample",
    "SkippedSample",
    "SkippedSamples",
    "Tolerance",
    "Tries",
    "too_many_in_a_row",
]

_logger = logging.getLogger("spdl_torch.data")

DEFAULT_ERROR_BUDGET = 0.05  # the share from which a report says that failures should concern you

_MOST_IN_A_ROW = 100  # bad samples; who meets that many has lost the storage, not a file
_LOGGED_ERRORS = 10  # one by one; later ones when their count reaches a power of two
_KEPT_KEYS = 1_000
# Their frames tell users nothing.
_FETCHING = {str(path) for path in Path(__file__).parent.glob("*.py")}
_SHOWN_KEYS = 5

MISSING: Any = object()
"""In place of a sample that is left out of its batch."""


class NoGoodSample(Exception):
    """Of a batch; never seen by users."""


class SkippedSample(NamedTuple):
    """A sample that failed and is not in its batch."""

    key: Any
    """What the dataset was asked for; of an iterable dataset the number of the item, from 0, in
    its worker's iterator."""
    stage: str
    error: str
    """Type and text."""


@dataclass(frozen=True, slots=True)
class BadSample:
    """What a worker tells of a try that failed."""

    place: int
    """In its batch."""
    key: Any
    error: Exception


@dataclass(frozen=True, slots=True)
class Tries:
    """What it took to fetch a batch."""

    num_good: int
    bad: tuple[BadSample, ...]
    """In the order of their places."""

    @classmethod
    def of(cls, num_good: int, bad: Sequence[BadSample]) -> Tries:
        """``bad`` in any order of places; the tries of one place in theirs."""
        return cls(num_good, tuple(sorted(bad, key=lambda each: each.place)))


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How a worker treats a sample that fails."""

    num_samples: int = 0
    """Of a map-style dataset whose next good sample takes a bad one's place; 0 = left out."""

    def instead_of(self, index: Any) -> Iterator[int]:
        """Indices to try in turn, behind this one and from the beginning again.

        Raises: UnsupportedOptionError: it is no number.
        """
        try:
            first = operator.index(index)
        except TypeError:
            raise UnsupportedOptionError(
                "DataLoader: replace=True needs a sampler of integers, to know which sample is "
                f"the next; it gave {describe(index)}. Leave replace out, or use indices."
            ) from None
        for step in range(1, min(self.num_samples, _MOST_IN_A_ROW)):
            yield (first + step) % self.num_samples

    @property
    def replaces(self) -> bool:
        return self.num_samples > 0


def too_many_in_a_row(bad: Sequence[BadSample]) -> PipelineFailure | None:
    """The end of a worker's patience: these tries, one behind the other, all failed."""
    if len(bad) < _MOST_IN_A_ROW:
        return None
    return nothing_good(bad)


def nothing_good(bad: Sequence[BadSample]) -> PipelineFailure:
    """No sample was found among these."""
    return PipelineFailure(
        f"DataLoader: {len(bad)} samples in a row failed, the first is {describe(bad[0].key)}. "
        "The first and the last errors follow",
        [bad[0].error, bad[-1].error],
    )


class SkippedSamples(FailureBudget):
    """Those of one epoch, up to where the trainer is. Only its thread writes."""

    def __init__(self, limit: MaxFailures | None) -> None:
        super().__init__("fetch", DEFAULT_ERROR_BUDGET if limit is None else limit)
        self.samples: deque[SkippedSample] = deque(maxlen=_KEPT_KEYS)
        self._num_tries = 0
        self._is_over = False

    def hand_out(self, tries: Tries | None) -> PipelineFailure | None:
        """Count a batch that the trainer is given; what it is to be given instead if that was one
        too many.
        """
        if tries is None:
            return None
        self._num_tries += tries.num_good + len(tries.bad)
        is_overdrawn = False
        for each in tries.bad:
            text = text_of(each.error)
            text = text if len(text) <= 500 else f"{text[:497]}..."
            self.samples.append(SkippedSample(each.key, "fetch", text))
            is_overdrawn = self.spend(_let_go(each.error), self._num_tries) or is_overdrawn
        return self._failure() if is_overdrawn else None

    def end(self) -> PipelineFailure | None:
        """The epoch is over; what it is to end with, if nothing else was good of it either."""
        if self._is_over:
            return None
        self._is_over = True
        return self._failure() if self.overdrawn_at_end(self._num_tries) else None

    def remarks(self) -> tuple[str, ...]:
        """For a report."""
        samples = list(self.samples)
        if not samples:
            return ()
        shown = [f"{describe(each.key)} ({each.error[:80]})" for each in samples[-_SHOWN_KEYS:]]
        more = (
            f" and {self.num_failures - len(shown)} before"
            if self.num_failures > len(shown)
            else ""
        )
        return (f"fetch: samples that were skipped: {', '.join(shown)}{more}.",)

    def message(self, num_tasks: int) -> str:
        """What the failure says."""
        limit = self._limit if isinstance(self._limit, int) else f"{float(self._limit):.4g} of all"
        return (
            f"DataLoader: {self.num_failures} of {num_tasks} samples failed, error_budget is "
            f"{limit}. Mend the samples below or raise error_budget"
        )

    def _failure(self) -> PipelineFailure:
        return PipelineFailure(self.message(self._num_tries), list(self.errors))

    def _log(self, error: Exception, count: int, num_tasks: int) -> None:
        if count <= _LOGGED_ERRORS or count & (count - 1) == 0:
            each = self.samples[-1]
            _logger.warning(
                "DataLoader: sample %s failed in stage %r and is skipped (%d of %d so far): %s",
                *(describe(each.key), each.stage, count, num_tasks, each.error),
            )

    def _log_total(self, num_tasks: int) -> None:
        if self.num_failures:
            _logger.warning(
                "DataLoader: %d of %d samples of the epoch failed and were skipped.",
                *(self.num_failures, num_tasks),
            )


def _let_go(error: Exception) -> Exception:
    """The error without the frames that it passed: they hold the samples of its batch, and without
    workers the training loop. Where it came from is kept as text.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _FETCHING:
        trace = trace.tb_next
    if trace is not None:
        attach_note(error, f"raised in\n{''.join(traceback.format_tb(trace)).rstrip()}")
    chain: list[BaseException | None] = [error]
    seen: set[int] = set()
    while chain:
        each = chain.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.with_traceback(None)
            chain += [each.__cause__, each.__context__]
    return error
