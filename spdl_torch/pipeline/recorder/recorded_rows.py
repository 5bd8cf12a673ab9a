"""What is done to the rows of a timeline once they were read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .timeline import Outcome

if TYPE_CHECKING:
    from .timeline import Row, Turn

__all__ = ["row_since", "with_outputs", "without_outputs"]


def row_since(row: Row, since_ns: int) -> Row:
    """The row without what had ended before."""

    def is_later(turn: Turn) -> bool:
        # Of a loop that was left, and whose iterator is held by somebody, the last step never ends.
        return (turn.started_ns if row.role == "consumer" else turn.done_ns) >= since_ns

    return replace(
        row,
        turns=tuple(filter(is_later, row.turns)),
        parts=tuple(part for part in row.parts if part.ended_ns >= since_ns),
    )


def without_outputs(row: Row) -> Row:
    """The row without the numbers that items have where they go."""
    return replace(row, turns=tuple(replace(turn, output=-1) for turn in row.turns))


def with_outputs(rows: list[Row], position: int, num_in: int, num_out: int) -> list[Row]:
    """Rows of a stage whose results were put in order, with the numbers that they got.

    If there was a result for every input, the numbers are the same. Otherwise they are counted
    back from the last one, as far as every input's turn is known.
    """
    turns = {turn.number: turn for row in rows if row.position == position for turn in row.turns}
    outputs: dict[int, int] = {}
    if num_in == num_out:
        outputs = {number: number for number in turns}
    else:
        for number in range(num_in - 1, -1, -1):
            if number not in turns:
                break
            if turns[number].outcome is Outcome.PASSED:
                num_out -= 1
                outputs[number] = num_out

    def numbered(turn: Turn) -> Turn:
        passed = turn.outcome is Outcome.PASSED
        return replace(turn, output=outputs.get(turn.number, -1)) if passed else turn

    return [
        replace(row, turns=tuple(map(numbered, row.turns))) if row.position == position else row
        for row in rows
    ]
