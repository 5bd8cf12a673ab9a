"""For all of this room."""

from support.lazy_device import backends
from support.tuners import at_random

__all__ = ["at_random", "backends"]
