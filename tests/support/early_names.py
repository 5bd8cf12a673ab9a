"""Functions that a program imports by name before its first loader: patches never reach them.

The first of the tests' files to be imported, by ``conftest.py``: another one may start a loader.
"""

from random import random

from numpy.random import rand

__all__ = ["rand", "random"]

assert type(random.__self__).__name__ == "Random", "the patches of loaders were here before"
