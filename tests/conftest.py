"""What holds for every test."""

import gc
import os
import signal

import pytest
from hypothesis import settings

# The same examples in every run, so that a change fails for what it changed; the long forms, which
# set profiles of their own, look further.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")

# A shell that starts the tests in the background, as some build servers do, lets them ignore
# Ctrl-C, and so do the processes that tests start in order to interrupt them. A handler, unlike
# being ignored, is not inherited by a new program.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish():
    """Many tests collect garbage; they need not look through all that was imported each time."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    """Skip what cannot or shall not run here.

    Tests marked ``cuda`` are skipped where there is none, or fail where one must be; those marked
    ``fuzz`` run when ``SPDL_TORCH_FUZZ_SECONDS`` says for how long.
    """
    if item.get_closest_marker("fuzz") and not os.environ.get("SPDL_TORCH_FUZZ_SECONDS"):
        pytest.skip("a long form: set SPDL_TORCH_FUZZ_SECONDS, e.g. to 600")
    if item.get_closest_marker("cuda") is None:
        return
    import torch

    if torch.cuda.is_available():
        return
    if os.environ.get("SPDL_TORCH_REQUIRE_CUDA") == "1":
        pytest.fail("SPDL_TORCH_REQUIRE_CUDA=1, but torch finds no CUDA device", pytrace=False)
    pytest.skip("needs a CUDA device")
