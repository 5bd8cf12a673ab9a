"""The order of files: long ones that come late by name come first.

Each process of a run takes the next file when it has done one. A long file that begins last would
leave the others without work. What imports Lightning stays late: it never gets smaller again, and a
fork of a process takes twice the time then. Of the late ones it comes first all the same, as its
files are the longest, and would end the run by themselves.
"""

LONG = (
    "test_loader_interrupts.py",
    "test_stores.py",
    "test_child_pipelines.py",
)
LONG_PROGRAMS = (
    "test_resume_lightning.py",
    "test_lightning_monitor.py",
    "test_examples_imagenet.py",
    "test_docs.py",
    "test_demo.py",
    "test_testing.py",
    "test_bench.py",
    "test_prepare.py",
)
LAST_ROOMS = ("programs", "trainers")


def pytest_collection_modifyitems(items):
    """Put the long files first, and those of the last rooms before their others, each with its
    tests in order."""
    items.sort(key=_place)


def _place(item):
    name, is_late = item.path.name, item.path.parent.name in LAST_ROOMS
    long_ones = LONG_PROGRAMS if is_late else LONG
    return is_late, long_ones.index(name) if name in long_ones else len(long_ones)
