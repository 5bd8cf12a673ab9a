"""The order of files: long ones that come late by name come first.

Each process of a run takes the next file when it has done one. A long file that begins last would
leave the others without work.
"""

LONG = (
    "test_worker_processes.py",
    "test_stores.py",
    "test_rng_owned.py",
    "test_soak.py",
    "test_warm.py",
)


def pytest_collection_modifyitems(items):
    """Put the long files first, each with its tests in order."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
