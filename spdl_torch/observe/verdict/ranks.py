"""The ranks of one training beside each other: which one makes the others wait, and for how long.

Ranks that add up their gradients end each step together, so a rank that waits for its data holds up
all others, which wait for it inside of their step. What each waits for its own data is in its
report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...shown_text import percent, wrapped
from .causes import INPUT_BOUND, num_delivered

if TYPE_CHECKING:
    from .report import Report

_TOGETHER = 0.1
"""The share by which the times for a batch differ, at most, of ranks that step together."""


class _Rank(NamedTuple):
    number: int
    cause: str
    num_batches: int
    seconds: float
    """For a batch, with its step."""
    waits: float
    """The part of it in which the rank waits for its own data."""


def on_ranks(reports: Mapping[int, Report]) -> str:
    """Return a table of the ranks, by number, and what it says of them."""
    ranks = [_rank_of(number, report) for number, report in sorted(reports.items())]
    lines = ["rank  batches  ms/batch  of them for data  cause"]
    lines += [
        f"{each.number:>4}  {each.num_batches:>7}  {1e3 * each.seconds:>8.1f}  "
        f"{1e3 * each.waits:>16.1f}  {each.cause}"
        for each in ranks
    ]
    return "\n".join([*lines, "", wrapped(_finding(ranks), "RANKS    ")])


def told_of_ranks(reports: Mapping[int, Report]) -> str:
    """Return that, and below it the report of the rank that waits longest."""
    slowest = _slowest([_rank_of(*each) for each in reports.items()]).number
    return f"{on_ranks(reports)}\n\nRank {slowest}:\n{reports[slowest]}"


def _rank_of(number: int, report: Report) -> _Rank:
    stats = report.stats
    num_batches = num_delivered(stats.stages) or 0
    seconds = stats.elapsed / max(1, num_batches)
    waits = seconds * stats.consumer_wait_ratio
    return _Rank(number, report.verdict.cause.value, num_batches, seconds, waits)


def _slowest(ranks: Sequence[_Rank]) -> _Rank:
    return max(ranks, key=lambda each: each.waits)


def _finding(ranks: list[_Rank]) -> str:
    if not all(each.num_batches for each in ranks):
        return "Not every rank has loaded a batch, so nothing is known of who waits for whom."
    times = [each.seconds for each in ranks]
    if max(times) > (1 + _TOGETHER) * min(times):
        return (
            "The ranks do not step together: their times for a batch differ by more than "
            f"{percent(_TOGETHER)}, so none makes the others wait. Read each one's report."
        )
    slowest = _slowest(ranks)
    longest = max((each.waits for each in ranks if each is not slowest), default=slowest.waits)
    gain = slowest.waits - longest
    if gain < INPUT_BOUND * slowest.seconds:
        return "No rank makes the others wait for its data: all wait for theirs for as long."
    return (
        f"Rank {slowest.number} makes the others wait: in a step of {1e3 * slowest.seconds:.3g} ms "
        f"it waits {1e3 * slowest.waits:.3g} ms for its data, they {1e3 * longest:.3g} ms at most. "
        f"If it waited no longer than they do, a step would take at most {1e3 * gain:.3g} ms "
        f"({percent(gain / slowest.seconds)}) less."
    )
