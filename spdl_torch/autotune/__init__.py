"""Settings for threads and buffer sizes: estimated from the machine, tuned, or given."""

from spdl_torch.autotune.limits import Limits
from spdl_torch.autotune.params import PerfParams

__all__ = ["Limits", "PerfParams"]
