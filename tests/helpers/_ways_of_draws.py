"""The ways in which torch's draws get to the streams of samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spdl_torch.loader.rng.patches import install
from spdl_torch.loader.rng.streams import Borrowing

if TYPE_CHECKING:
    import pytest

WAYS = ("key", "unseen", "unseen, then key")


def take(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process's streams see draws by the dispatch key from the beginning; or not before
    they have need of it, as in a program that has not loaded before: never, as samples draw, or
    after each batch that comes to nothing, whatever it has drawn.
    """
    are_seen = not way.startswith("unseen")

    def see() -> bool:
        nonlocal are_seen
        are_seen = True
        return install()

    streams = "spdl_torch.loader.rng.streams"
    monkeypatch.setattr(f"{streams}.install", see)
    monkeypatch.setattr(f"{streams}.can_see_draws", lambda: are_seen)
    if "then" in way:
        monkeypatch.setattr("spdl_torch.loader.rng.streams._MOST_QUIET", 1)
        monkeypatch.setattr(Borrowing, "note", _note_nothing_drawn)


_note = Borrowing.note


def _note_nothing_drawn(borrowing: Borrowing, **_: bool) -> None:
    _note(borrowing, has_drawn=False)
