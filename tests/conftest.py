"""What holds for every test. ``--long`` runs the long forms, too: tables, soaks, fuzzers."""

import gc
import multiprocessing
import os
import shutil
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

# Before torch is imported. Its intra-op threads spin while they wait for one another, which is
# quick where each has a core; beside other processes of tests they take the cores from those for
# which they wait: a short training took 9 s of CPU time in place of 1.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import fsspec
import pytest
from hypothesis import HealthCheck, settings
from support import early_names  # noqa: F401 - before any file of tests can start a loader
from support.at_call import TooLate, handled
from support.gates import quiet_log, spdl_threads
from support.loaders import assert_threads_end
from support.memory import make_cheap_to_fork

from spdl_torch.loader.rng.patches import of_thread

NEEDED_BYTES = 2 * 10**9
"""The bytes of temporary files that all tests together may take."""

MANY_TESTS = 500
"""More tests than this are worth a second for memory that forks quickly."""

# The same examples in every run, so that a change fails for what it changed; the long forms, which
# set profiles of their own, look further. How long they take to make is the machine's matter.
settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")

# A fork server's child imports what it needs: torch, in seconds, for each of hundreds of workers.
# The server has it, and programs are forked from it, too. What a child owns is the same.
multiprocessing.set_forkserver_preload(["tests.support.served"])

# Datasets of tests are defined where they are used, and pickled nowhere: workers are forked, as by
# default on Linux up to Python 3.13.
if "fork" in multiprocessing.get_all_start_methods():
    multiprocessing.set_start_method("fork")

# A shell that starts the tests in the background, as some build servers do, lets them ignore
# Ctrl-C, and so do the processes that tests start in order to interrupt them. A handler, unlike
# being ignored, is not inherited by a new program.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    """The options for the long forms."""
    group = parser.getgroup("long forms")
    group.addoption("--long", action="store_true", help="run the long forms")
    group.addoption(
        "--long-seconds",
        type=float,
        metavar="S",
        help="run each fuzzer and soak for S seconds (60 with --long, else 10)",
    )


def pytest_collection_modifyitems(config, items):
    """Leave out the long forms where they are not asked for, and give them their time; put long
    files first, and those of the last rooms before their others, each with its tests in order."""
    long_items = {item for item in items if item.get_closest_marker("long")}
    for item in long_items:
        item.add_marker(pytest.mark.timeout(600 + 2 * _long_seconds(config)))
    if long_items and not config.option.long:
        items[:] = [item for item in items if item not in long_items]
        config.hook.pytest_deselected(items=list(long_items))
    items.sort(key=_place)


# Each process of a run takes the next file when it has done one: a long one that begins last would
# leave the others without work. What imports Lightning stays late: it never gets smaller again, and
# a fork of a process takes twice the time then.
LONG = ("test_loader_interrupts.py", "test_stores.py", "test_child_pipelines.py")
LONG_OF_LAST_ROOMS = (
    *("test_resume_lightning.py", "test_lightning_monitor.py", "test_examples_imagenet.py"),
    *("test_docs.py", "test_demo.py", "test_testing.py", "test_bench.py"),
    "test_prepare.py",
)


def _place(item):
    name, is_late = item.path.name, item.path.parent.name in ("programs", "trainers")
    long_ones = LONG_OF_LAST_ROOMS if is_late else LONG
    return is_late, long_ones.index(name) if name in long_ones else len(long_ones)


def _long_seconds(config):
    default = 60.0 if config.option.long else 10.0
    return config.option.long_seconds or default


FAILED = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Note whether the test itself has failed: what is said of it holds its iterators, and they
    their workers."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def none_left(request):
    """A test that leaves a thread of ours or a child process fails, whatever it was about."""
    before = [*spdl_threads(), *multiprocessing.active_children()]
    yield
    if request.node.stash.get(FAILED, False):
        return
    left = [*spdl_threads(), *multiprocessing.active_children()]
    if left := [each for each in left if each not in before]:
        assert_threads_end(left)


@pytest.fixture(autouse=True)
def trainers_generators():
    """The main thread is left in no stream of random numbers, from which it would draw for ever."""
    yield
    left, of_thread.streams = of_thread.streams, None
    assert left is None


@pytest.fixture
def _too_late():
    """An error comes of SIGUSR1."""

    def handler(*_):
        raise TooLate

    with handled(handler):
        yield


@pytest.fixture
def quiet():
    """Without the engine's log lines about dropped items."""
    with quiet_log():
        yield


@pytest.fixture
def memory():
    """fsspec's file system in memory, empty afterwards."""
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


@pytest.fixture(scope="module")
def pool():
    """An executor with three threads."""
    with ThreadPoolExecutor(3) as executor:
        yield executor


@pytest.fixture
def long_seconds(request):
    """How long a test marked ``long`` runs that could go on for ever."""
    return _long_seconds(request.config)


@pytest.fixture(scope="module", autouse=True)
def _garbage_of_this_file_alone(request):
    """Keep what other files have imported and cached out of the many collections of garbage, and
    out of the way of forks.

    A collection costs 15 ms here, and would cost a second after the files that import Lightning.
    What a file leaves is collected at its end, where its own filters of warnings hold.
    """
    gc.collect()
    gc.freeze()
    if len(request.session.items) > MANY_TESTS:
        make_cheap_to_fork()
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _environment_of_this_test_alone():
    """Take back what libraries write into the environment, such as the rank of a training. A thread
    that a library has put before all others of the machine would keep the cores from them."""
    policy = _scheduling_policy()
    with patch.dict(os.environ):
        yield
    assert _scheduling_policy() == policy


def _scheduling_policy():
    return os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported stays: to look through it for garbage while it grows took a third of the
    collection's time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_sessionstart():
    """Say at once that the disk is nearly full, where many tests would fail each in its way."""
    from spdl_torch.io._cache.store import spare_bytes

    folder = tempfile.gettempdir()
    disk = shutil.disk_usage(folder)
    needed = spare_bytes(disk.total) + NEEDED_BYTES
    if disk.free < needed:
        pytest.exit(
            f"{folder}: {disk.free / 1e9:.1f} GB are free on its disk, and the tests need "
            f"{needed / 1e9:.1f} GB. Make room, or name another folder in TMPDIR.",
            returncode=1,
        )


def pytest_configure(config):
    """What a machine of few cores, or Python from 3.12 on at each fork beside threads, warns of."""
    for ignored in (
        "This DataLoader will create:UserWarning",
        ".*multi-threaded:DeprecationWarning",
    ):
        config.addinivalue_line("filterwarnings", f"ignore:{ignored}")


def pytest_unconfigure():
    """At the end of the process all garbage counts again: some libraries complain of any left."""
    gc.unfreeze()


def pytest_runtest_setup(item):
    """Skip tests marked ``cuda`` where there is none, or fail where one must be."""
    if item.get_closest_marker("cuda") is None:
        return
    import torch

    if torch.cuda.is_available():
        return
    if os.environ.get("SPDL_TORCH_REQUIRE_CUDA") == "1":
        pytest.fail("SPDL_TORCH_REQUIRE_CUDA=1, but torch finds no CUDA device", pytrace=False)
    pytest.skip("needs a CUDA device")
