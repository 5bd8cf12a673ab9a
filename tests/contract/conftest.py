"""For all of this room."""

from _loader_helpers import no_thread_left

__all__ = ["no_thread_left"]
