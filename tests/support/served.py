"""The import of the tests' fork server, by its place under the root: it cannot see our path.

Hundreds of workers, and the programs of ``warm``, find what they need, and a memory that is cheap
to fork and to leave.
"""

import contextlib
import gc
import importlib
import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[1])

sys.path.insert(0, TESTS)
# torch is to find no Triton here, which complains at the end of a program when what it has made is
# frozen. A program can import it.
sys.modules["triton"] = None
gc.disable()  # what is imported is no garbage
for name in (
    *("torchvision", "pytest", "hypothesis", "spdl_torch.loader.backends.processes.child"),
    *("support.datasets", "support.hooks", "support.warm"),
):
    with contextlib.suppress(ImportError):  # torchvision is not everywhere
        importlib.import_module(name)
gc.enable()
gc.collect()
gc.freeze()
importlib.import_module("support.memory").make_cheap_to_fork()
del sys.modules["triton"]
sys.path.remove(TESTS)
