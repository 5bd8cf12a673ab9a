"""The last import of the tests' fork server, by its place under the root: it cannot see our path.

Hundreds of workers find the datasets of the tests, and a memory that is cheap to fork.
"""

import gc
import sys
from pathlib import Path

from ._memory import make_cheap_to_fork

HERE = str(Path(__file__).parent)

sys.path.insert(0, HERE)
import _datasets  # noqa: E402
import _hooks  # noqa: E402
import _isolation_data  # noqa: E402

sys.path.remove(HERE)
__all__ = ["_datasets", "_hooks", "_isolation_data"]

gc.collect()
make_cheap_to_fork()
