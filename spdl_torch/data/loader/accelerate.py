"""The mark by which Accelerate knows loaders that its ``prepare`` is to leave alone."""

from __future__ import annotations

import logging
import sys
from typing import Any

__all__ = ["AcceleratePrepared"]

_logger = logging.getLogger("spdl_torch.data")


class AcceleratePrepared:
    """A loader's attribute ``_is_accelerate_prepared``; False unless it is set.

    Accelerate reads it right before it builds a plain DataLoader in the loader's place. There is no
    other moment at which that can be noticed, so this is where it is logged, once in a process. Who
    wants a loader prepared knowingly sets the mark to False first.
    """

    _has_logged = False

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, loader: Any, owner: type | None = None) -> bool:
        mark = None if loader is None else loader.__dict__.get(self._name)
        if mark is None and not AcceleratePrepared._has_logged and _caller() == "accelerate":
            AcceleratePrepared._has_logged = True
            _logger.warning(
                "accelerator.prepare() puts torch's DataLoader, with worker processes, in place of "
                "spdl_torch.DataLoader. To keep it: from spdl_torch.accelerate import Accelerator"
            )
        return bool(mark)

    def __set__(self, loader: Any, mark: bool) -> None:
        loader.__dict__[self._name] = mark


def _caller() -> str:
    """The package of the code that reads the attribute."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).partition(".")[0]
