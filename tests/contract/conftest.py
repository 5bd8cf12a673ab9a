"""What a loader promises, by subject.

- ``test_oracle``, ``test_collate``, ``test_rows``: torch's loader is the oracle of batches.
- ``test_arguments``: options, attributes and what is refused; ``test_device``: ``device=``.
- ``test_seats``: what holds wherever the workers are; ``test_workers``: what is each worker's own.
- ``test_errors``, ``test_errors_skipped``: whatever of the user's raises.
- ``test_ends``, ``test_at_any_time``: how loops, loaders and programs end, and signals meanwhile.
- ``test_random``, ``test_random_apart``: random streams, and what they leave alone.
- ``test_resume_histories``: resuming at random places; ``test_resume`` and the others of its name:
  what those do not meet.
- ``test_datasets_of_others``: idioms of repositories, and other libraries.
"""

import pytest
from support import ways_of_draws
from support.lazy_device import backends

__all__ = ["backends"]


@pytest.fixture(params=["key", "unseen, then key"])
def led_by(request, monkeypatch):
    """Draws are led by the dispatch key, or not seen at first."""
    ways_of_draws.take(request.param, monkeypatch)
