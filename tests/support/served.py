"""The last import of the tests' fork server, by its place under the root: it cannot see our path.

Hundreds of workers find the datasets of the tests, and a memory that is cheap to fork.
"""

import gc
import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[1])

sys.path.insert(0, TESTS)
from support import datasets, hooks, isolation_data  # noqa: E402
from support.memory import make_cheap_to_fork  # noqa: E402

sys.path.remove(TESTS)
__all__ = ["datasets", "hooks", "isolation_data"]

gc.collect()
make_cheap_to_fork()
