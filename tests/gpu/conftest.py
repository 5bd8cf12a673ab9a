"""For all of this room."""

from _gpus import gpu
from _lazy_device import backends
from _loader_helpers import no_thread_left

__all__ = ["backends", "gpu", "no_thread_left"]
