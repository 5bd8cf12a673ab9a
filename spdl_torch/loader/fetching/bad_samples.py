"""``on_error="skip"``: handle samples that fail, and fail when there are too many of them.

Workers leave a bad sample out of its batch, or replace it, by rules that do not depend on the
threads. The trainer's thread counts, logs and decides when there are too many, as it receives the
batches: samples that were only prefetched do not count, and the same epoch fails at the same batch
for any number of threads.
"""

from __future__ import annotations

import logging
import operator
import os
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...engine.failures import (
    MOST_KEPT,
    FailureBudget,
    describe,
    remarks_on_left_out,
    renew_note,
    text_of,
)
from ...errors import PipelineFailure, UnsupportedOptionError
from ...shown_text import printable, shortened

if TYPE_CHECKING:
    from ...engine.definition import MaxFailures

_logger = logging.getLogger("spdl_torch.data")

DEFAULT_ERROR_BUDGET = 0.05  # the share from which a report says that failures should concern you

MOST_IN_A_ROW = 100  # bad samples; more mean that the storage is gone, not one file
_LOGGED_ERRORS = 10  # are logged one by one; later ones when the count reaches a power of two
# Frames in this folder are of no use to the user; an error's note leaves them out.
_FETCHING = f"{Path(__file__).parent}{os.sep}"

MISSING: Any = object()
"""The placeholder of a sample that is left out of its batch."""


# Internal: users never see these two.


class NoGoodSample(Exception):
    """A batch without any good sample."""


class EndOfIterable(Exception):
    """The end of an iterable dataset. Not StopIteration, which user code may raise by mistake."""


class SkippedSample(NamedTuple):
    """A sample that failed and is not in its batch."""

    key: Any
    """The key given to the dataset; for an iterable dataset the number of the item, from 0, in its
    worker's iterator."""
    stage: str
    error: str
    """The type and text of the error."""


class BadSample(NamedTuple):
    """A failed try, as a worker reports it."""

    place: int
    """The number of the sample in its batch, from 0."""
    key: Any
    error: Exception


class Tries(NamedTuple):
    """The tries that it took to fetch a batch."""

    num_good: int
    bad: tuple[BadSample, ...]
    """The failed tries, in the order of their places."""

    @classmethod
    def of(cls, num_good: int, bad: Sequence[BadSample]) -> Tries:
        """Build from ``bad`` in any order of places, with the tries of one place in order."""
        return cls(num_good, tuple(sorted(bad, key=lambda each: each.place)))


class Tolerance(NamedTuple):
    """The treatment of samples that fail."""

    num_samples: int = 0
    """The length of a map-style dataset whose next good sample replaces a bad one; 0 = leave it
    out."""

    def instead_of(self, index: Any) -> Iterator[int]:
        """Yield the indices to try in turn: those after ``index``, then from 0 again.

        Raises: UnsupportedOptionError: ``index`` is not a number.
        """
        try:
            first = operator.index(index)
        except TypeError:
            raise UnsupportedOptionError(
                "DataLoader: replace=True needs a sampler of integers, to know which sample is "
                f"the next; it gave {describe(index)}. Leave replace out, or use indices."
            ) from None
        for step in range(1, min(self.num_samples, MOST_IN_A_ROW)):
            yield (first + step) % self.num_samples

    @property
    def replaces(self) -> bool:
        return self.num_samples > 0


def nothing_good(bad: Sequence[BadSample]) -> PipelineFailure:
    """Return the error for tries that all failed."""
    return PipelineFailure(
        f"DataLoader: {len(bad)} samples in a row failed, the first is {describe(bad[0].key)}. "
        "The first and the last errors follow",
        [bad[0].error, bad[-1].error],
    )


class SkippedSamples(FailureBudget):
    """The skipped samples of one epoch, up to the trainer's position. Only its thread writes."""

    def __init__(self, limit: MaxFailures | None, tolerance: Tolerance) -> None:
        super().__init__("fetch", DEFAULT_ERROR_BUDGET if limit is None else limit)
        self._counted = "tries" if tolerance.replaces else "samples"
        # A list: other threads copy it in one step, which a deque's copy is not without a GIL.
        self.samples: list[SkippedSample] = []
        self._num_tries = 0
        self._is_over = False

    def hand_out(self, tries: Tries | None) -> PipelineFailure | None:
        """Count the tries of a batch that the trainer receives. Return the error to raise instead
        if they exceed the budget.
        """
        if tries is None:
            return None
        self._num_tries += tries.num_good + len(tries.bad)
        is_overdrawn = False
        for each in tries.bad:
            text = shortened(text_of(each.error), 500)
            del self.samples[: 1 - MOST_KEPT]
            self.samples.append(SkippedSample(each.key, "fetch", text))
            is_overdrawn = self.spend(_let_go(each.error), self._num_tries) or is_overdrawn
        return self._failure() if is_overdrawn else None

    def end(self) -> PipelineFailure | None:
        """End the epoch. Return the error to raise if it exceeded its budget as a whole."""
        if self._is_over:
            return None
        self._is_over = True
        return self._failure() if self.overdrawn_at_end(self._num_tries) else None

    def remarks(self) -> tuple[str, ...]:
        """Return the report's remark on the skipped samples."""
        samples = [(each.key, each.error) for each in self.samples.copy()]
        return remarks_on_left_out(samples, self.num_failures)

    def message(self, num_tasks: int) -> str:
        """Return the text of the failure."""
        limit = self._limit if isinstance(self._limit, int) else f"{float(self._limit):.4g} of all"
        return (
            f"DataLoader: {self.num_failures} of {num_tasks} {self._counted} failed, "
            f"error_budget is {limit}. Fix the samples below or raise error_budget"
        )

    def _failure(self) -> PipelineFailure:
        return PipelineFailure(self.message(self._num_tries), list(self.errors))

    def _log(self, error: Exception, count: int, num_tasks: int) -> None:
        if count <= _LOGGED_ERRORS or count & (count - 1) == 0:
            each = self.samples[-1]
            _logger.warning(
                "DataLoader: sample %s failed in stage %r and is skipped (%d of %d %s so far): %s",
                describe(each.key),
                each.stage,
                count,
                num_tasks,
                self._counted,
                printable(each.error),
            )

    def _log_total(self, num_tasks: int) -> None:
        if self.num_failures:
            _logger.warning(
                "DataLoader: %d of %d %s of the epoch failed and were skipped.",
                self.num_failures,
                num_tasks,
                self._counted,
            )


def _let_go(error: Exception) -> Exception:
    """Return the error without its traceback, whose frames hold the samples of its batch and,
    without workers, the training loop. A note keeps the traceback as text.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_FETCHING):
        trace = trace.tb_next
    if trace is not None:
        lines = "".join(traceback.format_tb(trace)).rstrip()
        renew_note(error, "raised in", f"raised in\n{lines}")
    chain: list[BaseException | None] = [error]
    seen: set[int] = set()
    while chain:
        each = chain.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.with_traceback(None)
            chain += [each.__cause__, each.__context__]
    return error
