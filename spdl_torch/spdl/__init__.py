"""SPDL's modules, so that a program moves here by one rule: ``spdl`` becomes ``spdl_torch.spdl``.

Names, arguments and results are SPDL's; docs/howto/migrate.md lists what differs. Most names
stand for parts of this package that do the same. What nothing else here needs is defined below:
``dataloader``, ``source``, ``io.utils``, and ``load_image`` in SPDL's layout.
"""

from __future__ import annotations

from typing import Any

from .names import look_up

_MODULES = ("dataloader", "io", "pipeline", "source")


def __getattr__(name: str) -> Any:
    return look_up(__name__, name, modules=_MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
