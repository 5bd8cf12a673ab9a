"""Say once what makes reading a video slow."""

from __future__ import annotations

import logging
import threading

_logger = logging.getLogger("spdl_torch.io")
_said: set[str] = set()
_lock = threading.Lock()


def say_once(name: str, reason: str) -> None:
    """Log a warning about a source, the first of its kind in this process."""
    with _lock:
        if reason in _said:
            return
        _said.add(reason)
    _logger.warning("%s: %s. (Said once for all such files.)", name, reason)
