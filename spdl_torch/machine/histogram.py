"""A histogram of durations, and its percentiles."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

_SUB_BITS = 3


_SUB = 1 << _SUB_BITS


_NUM_BUCKETS = (64 - _SUB_BITS) * _SUB


class Histogram:
    """Counts of durations, in buckets whose width is 1/8 of their value (percentiles within 6.3 %).

    A value of n bits falls into one of 8 buckets by its 3 bits below the leading one, the layout
    of HdrHistogram (http://hdrhistogram.org) with 3 significant bits.
    """

    __slots__ = ("buckets",)

    def __init__(self) -> None:
        self.buckets = array("q", bytes(8 * _NUM_BUCKETS))  # 50 times as quick as from numbers
        """The count of each bucket; for writers that cannot afford a call of ``add``."""

    def add(self, nanoseconds: int) -> None:
        """Count one duration."""
        self.buckets[bucket_of(nanoseconds)] += 1

    def counts(self) -> tuple[int, ...]:
        """Return the count of every bucket."""
        return tuple(self.buckets)


def bucket_of(nanoseconds: int) -> int:
    """Return the bucket of a duration."""
    if nanoseconds < 0:  # on some virtual machines clocks step back
        return 0
    shift = (nanoseconds | _SUB).bit_length() - _SUB_BITS - 1
    return (shift << _SUB_BITS) + (nanoseconds >> shift)


def _middle_of(bucket: int) -> float:
    if bucket < _SUB:
        return float(bucket)
    shift = (bucket >> _SUB_BITS) - 1
    return float((_SUB | (bucket & (_SUB - 1))) << shift) + (1 << shift) / 2


def percentile(
    counts: Sequence[int] | Mapping[int, float], share: float, num_zero: float = 0
) -> float:
    """Return the duration in ns below which ``share`` of the values lie; 0.0 if there are none.

    counts: of every bucket, or of those that are not empty.
    num_zero: values of 0 that were not counted, such as calls that did not wait.
    """
    buckets = sorted(counts.items()) if isinstance(counts, dict) else list(enumerate(counts))
    total = sum(count for _, count in buckets) + num_zero
    rank = share * total
    seen = num_zero
    if total <= 0 or seen >= rank:
        return 0.0
    for bucket, count in buckets:
        seen += count
        if count and seen >= rank:
            return _middle_of(bucket)
    raise AssertionError("guaranteed by rank <= total")


NO_COUNTS = (0,) * _NUM_BUCKETS
