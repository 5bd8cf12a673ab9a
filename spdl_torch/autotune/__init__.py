"""Settings for threads and buffer sizes: estimated from the machine, tuned, or given."""

from spdl_torch.autotune.params import PerfParams
from spdl_torch.machine.limits import Limits

__all__ = ["Limits", "PerfParams"]
