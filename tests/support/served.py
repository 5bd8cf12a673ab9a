"""The import of the tests' fork server, by its place under the root: it cannot see our path.

Hundreds of workers, and the programs of ``warm``, find what they need, and a memory that is cheap
to fork and to leave.
"""

import gc
import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[1])

sys.path.insert(0, TESTS)
# torch is to find no Triton here, which complains at the end of a program when what it has made is
# frozen. A program can import it.
sys.modules["triton"] = None
gc.disable()  # what is imported is no garbage

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torchvision  # noqa: E402

from spdl_torch.loader.backends.processes import child  # noqa: E402
from support import datasets, hooks, isolation_data, warm  # noqa: E402
from support.memory import make_cheap_to_fork  # noqa: E402

sys.path.remove(TESTS)
del sys.modules["triton"]
__all__ = ["child", "datasets", "hooks", "hypothesis", "isolation_data", "pytest", "torchvision"]
__all__ += ["warm"]

gc.enable()
gc.collect()
gc.freeze()
make_cheap_to_fork()
