"""How many threads, and how much room for what waits: worked out from the machine, or given."""

from spdl_torch.autotune.limits import Limits
from spdl_torch.autotune.params import PerfParams

__all__ = ["Limits", "PerfParams"]
