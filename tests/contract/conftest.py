"""For all of this room."""

from _lazy_device import backends
from _loader_helpers import no_thread_left

__all__ = ["backends", "no_thread_left"]
