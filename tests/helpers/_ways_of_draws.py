"""The ways in which torch's draws get to the streams of samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spdl_torch.loader.rng.patches import install

if TYPE_CHECKING:
    import pytest

WAYS = ("key", "unseen", "unseen, then key")
FEW_SAMPLES = 7


def take(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process's streams see draws by the dispatch key from the beginning; or not until a
    few samples were made, as in a program that has not loaded before.
    """
    are_seen = not way.startswith("unseen")

    def see() -> bool:
        nonlocal are_seen
        are_seen = True
        return install()

    streams = "spdl_torch.loader.rng.streams"
    monkeypatch.setattr(f"{streams}.install", see)
    monkeypatch.setattr(f"{streams}.can_see_draws", lambda: are_seen)
    generators = "spdl_torch.loader.rng.thread_generators"
    monkeypatch.setattr(f"{generators}._num_unseen", 0)
    if "then" in way:
        monkeypatch.setattr(f"{generators}._MOST_UNSEEN", FEW_SAMPLES)
        monkeypatch.setattr(f"{generators}._BATCH_UNSEEN", 0)
