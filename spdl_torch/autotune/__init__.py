"""Settings for threads and buffer sizes: estimated from the machine, tuned, or given.

The names below are imported when they are first used: a loader needs none of them unless its
workers are tuned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import spdl_torch.lazy_names as lazy_names

if TYPE_CHECKING:
    from spdl_torch.autotune.params import PerfParams
    from spdl_torch.machine.limits import Limits

__all__ = ["Limits", "PerfParams"]

_HOMES = {"Limits": "..machine.limits", "PerfParams": ".params"}


def __getattr__(name: str) -> Any:
    return lazy_names.import_name(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
