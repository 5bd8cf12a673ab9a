"""Checks of a loader with your own dataset, for your own tests.

Each raises AssertionError with what differs, where, and the likely reason.
"""

from spdl_torch.testing.reproducible import assert_reproducible
from spdl_torch.testing.resume import assert_resume_exact

__all__ = ["assert_reproducible", "assert_resume_exact"]
