"""SPDL's modules, so that a program moves here by one rule: ``spdl`` becomes ``spdl_torch.spdl``.

Names, arguments and results are SPDL's; docs/howto/migrate.md lists what differs. Most names
stand for parts of this package that do the same. What nothing else here needs is defined below:
``dataloader``, ``source``, ``io.utils``, and ``load_image`` in SPDL's layout.
"""

from __future__ import annotations

from typing import Any

from spdl_torch.lazy_names import import_name

_MODULES = dict.fromkeys(("dataloader", "io", "pipeline", "source"), ".")


def __getattr__(name: str) -> Any:
    return import_name(__name__, _MODULES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
