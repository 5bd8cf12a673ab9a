"""Settings for threads and buffer sizes: estimated from the machine, tuned, or given.

The names below are imported when they are first used: a loader needs none of them unless its
workers are tuned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spdl_torch.lazy_names import hand_on

if TYPE_CHECKING:
    from ..machine.limits import Limits as Limits
    from .params import PerfParams as PerfParams

hand_on()
