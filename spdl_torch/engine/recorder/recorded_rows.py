"""Changes to the rows of a timeline after they were read from the rings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .moments import Outcome

if TYPE_CHECKING:
    from .timeline import Row, Turn


def row_since(row: Row, since_ns: int) -> Row:
    """Return the row without everything that ended before ``since_ns``."""

    def is_later(turn: Turn) -> bool:
        # If a loop was left while somebody still holds its iterator, its last step never ends.
        return (turn.started_ns if row.role == "consumer" else turn.done_ns) >= since_ns

    return replace(
        row,
        turns=tuple(filter(is_later, row.turns)),
        parts=tuple(part for part in row.parts if part.ended_ns >= since_ns),
    )


def with_outputs(rows: list[Row], stage_number: int, num_in: int, num_out: int) -> list[Row]:
    """Return the rows of an ordered stage with the numbers that its results got.

    If every input led to a result, these are the inputs' numbers. Otherwise they are counted back
    from the last one, as far as every input's turn is known.
    """
    turns = {
        turn.number: turn for row in rows if row.stage_number == stage_number for turn in row.turns
    }
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
        replace(row, turns=tuple(map(numbered, row.turns)))
        if row.stage_number == stage_number
        else row
        for row in rows
    ]
