"""For all of this room."""

from _lazy_device import backends
from _tuners import at_random

__all__ = ["at_random", "backends"]
