"""What holds for every test."""

import os
import signal

import pytest

# A shell that starts the tests in the background, as some build servers do, lets them ignore
# Ctrl-C, and so do the processes that tests start in order to interrupt them. A handler, unlike
# being ignored, is not inherited by a new program.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item):
    """Tests marked ``cuda`` are skipped where there is none, or fail where one must be."""
    if item.get_closest_marker("cuda") is None:
        return
    import torch

    if torch.cuda.is_available():
        return
    if os.environ.get("SPDL_TORCH_REQUIRE_CUDA") == "1":
        pytest.fail("SPDL_TORCH_REQUIRE_CUDA=1, but torch finds no CUDA device", pytrace=False)
    pytest.skip("needs a CUDA device")
