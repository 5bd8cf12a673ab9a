"""The ways in which torch's draws get to the streams of samples."""

from spdl_torch.loader.rng.patches import install
from spdl_torch.loader.rng.streams import Borrowing

WAYS = ("key", "unseen", "unseen, then key")


def take(way, monkeypatch):
    """Have this process's streams see draws by the dispatch key from the beginning; or not before
    they have need of it, as in a program that has not loaded before: never, as samples draw, or
    after each batch that comes to nothing, whatever it has drawn.
    """
    are_seen = not way.startswith("unseen")

    def see():
        nonlocal are_seen
        are_seen = True
        return install()

    streams = "spdl_torch.loader.rng.streams"
    monkeypatch.setattr(f"{streams}.install", see)
    monkeypatch.setattr(f"{streams}.can_see_draws", lambda: are_seen)
    if "then" in way:
        monkeypatch.setattr(f"{streams}._MOST_QUIET", 1)
        monkeypatch.setattr(Borrowing, "note", _note_nothing_drawn)


_note = Borrowing.note


def _note_nothing_drawn(borrowing, **_):
    _note(borrowing, has_drawn=False)
