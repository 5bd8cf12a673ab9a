"""Checks of a loader, or of a dataset, for your own tests.

Each raises AssertionError with what differs, where, and what to look for.
"""

from spdl_torch.testing.reproducible import assert_reproducible
from spdl_torch.testing.thread_safety import assert_thread_safe

from .reproducible import assert_resume_exact

__all__ = ["assert_reproducible", "assert_resume_exact", "assert_thread_safe"]
