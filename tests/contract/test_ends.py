"""Loaders at the edges of a program: its exit, daemon threads, contexts of threads, Ctrl-C."""

import gc
import signal
import sys
import textwrap
import threading
import weakref
from contextlib import suppress
from itertools import product
from multiprocessing.context import SpawnContext

import pytest
from support import warm
from support.at_call import AtCall
from support.datasets import BulkData, GatedData, Indices, MapData, StreamData
from support.folders import TESTS
from support.gates import is_gone, is_running, shared_memory_of, until
from support.inside import placement_of, state_of
from support.loaders import (
    PATIENCE_SECONDS,
    DataLoader,
    ThreadLoader as OnThreads,
    batches_of,
    resumed,
    run_script,
)
from torch.utils.data import IterableDataset

from spdl_torch import PipelineStopped


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 2), reason="no thread can be started then, by a bug"
)
def test_thread_that_trains_on_after_the_main_one_has_its_epochs():
    """Python waits for such a thread, whoever has made it, and so do its workers."""
    program = """
        import threading
        from concurrent.futures import ThreadPoolExecutor
        from threading import Thread
        from spdl_torch import PipelineDataset
        from spdl_torch.pipeline import PipelineBuilder

        def numbers():
            builder = PipelineBuilder().add_source(range(12)).pipe(int, concurrency=2)
            return PipelineDataset(builder.add_sink(), stats=False)

        makers = {
            "thread": lambda: DataLoader(range(12), num_workers=2, isolation="thread"),
            "process": lambda: DataLoader(range(12), num_workers=2, isolation="process"),
            "pipeline": numbers,
        }
        executor = ThreadPoolExecutor(3)
        have_begun, has_ended = threading.Barrier(2 * len(makers) + 1), threading.Event()
        # Called after what the first threads register to be stopped, and before executors wait.
        threading._register_atexit(has_ended.set)

        def train(kind):
            loader = makers[kind]()
            for epoch in range(2):
                for number, _ in enumerate(loader):
                    if (epoch, number) == (0, 0):
                        have_begun.wait()
                    has_ended.wait()
                print(f"{kind} {number}\\n", end="", flush=True)

        for kind in makers:
            Thread(target=train, args=[kind]).start()
            executor.submit(train, kind)
        have_begun.wait()
    """
    done, kinds = run_script(program), ["pipeline", "process", "thread"]
    assert done.stderr == ""
    assert sorted(done.stdout.splitlines()) == [f"{kind} 11" for kind in kinds for _ in range(4)]


def test_what_lives_until_the_interpreter_is_taken_down_ends_without_a_word(tmp_path):
    """In the middle of an epoch, with workers that never return; Python empties the modules while
    something else refers to the program's: dill does."""
    program = f"""
        import sys, threading, torch, spdl_torch
        from spdl_torch.data import cached
        from spdl_torch.engine import threads
        from spdl_torch.loader.backends.processes import page

        assert threads._EXIT_JOIN_SECONDS == page._FINISH_SECONDS == 5.0
        threads._EXIT_JOIN_SECONDS = page._FINISH_SECONDS = 0.2  # for workers that never return
        sys.keeps_this_module = sys.modules["__main__"]

        class Rows(torch.utils.data.Dataset):
            thread_safe = True
            def __len__(self):
                return 64
            def __getitem__(self, index):
                return torch.tensor(index) if index == 0 else threading.Event().wait()

        def items(pipeline):
            with pipeline.auto_stop():
                yield from pipeline

        built = spdl_torch.pipeline.PipelineBuilder().add_source(range(64)).pipe(str).add_sink()
        forked = {{"isolation": "process", "multiprocessing_context": "fork"}}
        left_open = [
            *(
                spdl_torch.DataLoader(Rows(), num_workers=2, **options)
                for options in (forked, forked | {{"persistent_workers": True}}, {{}})
            ),
            spdl_torch.DataLoader(Rows()),
            spdl_torch.DataLoader(cached(Rows(), {str(tmp_path)!r}, version="1")),
            items(built.build(num_threads=1)),
            spdl_torch.PipelineDataset(built),
        ]
        left_open = [iter(each) for each in left_open]
        for each in left_open:
            next(each)
    """
    words = ["-W", "ignore", "-c", textwrap.dedent(program)]
    done = warm.run(words, timeout=60, ends_whole=True)
    assert (done.returncode, done.stderr) == (0, "")


class ThreadContext(SpawnContext):
    """A context whose processes are threads, as some libraries make one for torch's loader."""

    class Process(threading.Thread):
        """A thread."""


def test_context_that_starts_threads_has_threads():
    """It is what the program asks for; processes by it are refused."""
    loader = DataLoader(Indices(8), 2, num_workers=2, multiprocessing_context=ThreadContext())
    assert batches_of(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert placement_of(loader).num_processes == 0
    loader.isolation = "process"
    with pytest.raises(ValueError, match=r"starts threads\. Leave one of the two out"):
        iter(loader)


class Stateful(StreamData):
    """Keeps a state of its own, which fails."""

    def state_dict(self):
        raise LookupError("no state")

    def load_state_dict(self, state):
        raise LookupError("no state")


def interrupt(batches, place):
    next(batches)
    with AtCall(place):
        list(batches)
    raise AssertionError("the epoch was too short")


def train(loader, how):
    """Two epochs, each ended in that way; by Ctrl-C, at some call as batches are awaited."""
    for place in (15, 40):
        with suppress(ValueError, KeyboardInterrupt):
            if how == "Ctrl-C":
                interrupt(iter(loader), place)
            for number, _batch in enumerate(loader):
                if how in ("break", "state") and number == 1:
                    break
        if "state" in how:
            with suppress(LookupError):
                loader.state_dict()


@pytest.fixture
def without_collector():
    """What is freed is freed by its last reference."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


OPTIONS = {
    "0": {},
    "2": {"num_workers": 2},
    "2, skipping": {"num_workers": 2, "on_error": "skip", "error_budget": 99},
    "persistent": {"num_workers": 2, "persistent_workers": True, "stats": False},
    "auto": {"num_workers": "auto"},
    "process": {"num_workers": 1, "isolation": "process"},
}
ENDINGS = [
    *product((MapData, BulkData, StreamData), ("end", "break", "error", "Ctrl-C")),
    *((Stateful, how) for how in ("state", "end, state")),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_dataset_goes_with_its_loader(options, without_collector):
    """However its epochs ended."""
    kept = []
    for kind, how in ENDINGS:
        if options == "process" and how.startswith("end"):
            continue  # each starts two
        data = kind(12, {5: ValueError} if how == "error" else {})
        loader = OnThreads(data, 2, **OPTIONS[options])
        if kind is Stateful:
            state_of(loader).position.want()
        train(loader, how)
        kept.append((kind.__name__, how, weakref.ref(data)))
        del data, loader
    until(lambda: not [(kind, how) for kind, how, found in kept if not is_gone(found)])


def test_dataset_goes_with_its_loader_while_a_worker_is_stuck(without_collector):
    """It goes when the worker does."""
    data = GatedData(12)
    gate, entered, found = data.gate, data.entered, weakref.ref(data)
    batches = iter(OnThreads(data, 2, num_workers=2))
    assert entered.wait(60)
    del batches, data
    assert found() is not None
    gate.set()
    until(lambda: is_gone(found))


class Closing(IterableDataset):
    """Its loader is closed while it makes item 5."""

    close = None

    def __iter__(self):
        for item in range(12):
            if item == 5 and self.close is not None:
                self.close()
            yield item


def test_batch_that_is_made_as_its_loader_is_closed_is_finished():
    """Without workers: the loop has it, and a state the rest."""
    dataset = Closing()
    loader = DataLoader(dataset, 4)
    dataset.close, got = loader.close, []
    with pytest.raises(PipelineStopped, match="was closed"):
        got += (each for batch in loader for each in batch.tolist())
    dataset.close = None
    rest = resumed(DataLoader(Closing(), 4), loader.state_dict())
    assert got + [each for batch in rest for each in batch.tolist()] == list(range(12))
    assert got == list(range(8))


PROGRAM = """
    import multiprocessing, os, signal, sys, threading
    sys.path.insert(0, {tests!r})
    import torch
    from support import lazy_device
    from spdl_torch import DataLoader
    from spdl_torch.engine import threads
    from spdl_torch.loader.backends.processes import page

    threads._EXIT_JOIN_SECONDS = page._FINISH_SECONDS = 0.2  # for workers that never return
    how, copied, has_told = {how!r}, [], threading.Event()

    class Backend(lazy_device.LazyBackend):
        def copy(self, target, source):
            copied.append(source)
            if len(copied) > 40 and how == "transfer":
                raise RuntimeError("the link is down")
            super().copy(target, source)

    def collate(samples):
        if samples[0] >= 8 * 40 and how == "collate":
            raise RuntimeError("ragged")
        if samples[0] >= 8 * 21 and "stuck" in how:
            if on_threads and samples[0] == 8 * 21:  # one of them
                has_told.wait()
                os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait()
        return torch.tensor(samples)

    lazy_device.install(lazy_device.LazyDevice(is_prompt=True), backend=Backend)
    multiprocessing.set_start_method("fork")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    on_threads = how == "SIGINT, stuck"
    options = {{"device": {device!r}, "isolation": "thread" if on_threads else "process"}}
    loader = DataLoader(range(10**6), 8, num_workers=2, collate_fn=collate, **options)
    for step, batch in enumerate(loader):
        if step == 20:
            children = multiprocessing.active_children()
            print(os.getpid(), *(child.pid for child in children), flush=True)
            has_told.set()
            if "exit" in how:
                break
            if how.startswith("SIG") and not on_threads:
                os.kill(os.getpid(), getattr(signal, how.partition(",")[0]))
"""

ENDS = {
    ("exit", "cuda"): (0, ""),
    ("exit, stuck", None): (0, ""),
    ("SIGKILL, stuck", None): (-signal.SIGKILL, ""),
    ("SIGINT", None): (-signal.SIGINT, "KeyboardInterrupt"),
    ("SIGINT, stuck", None): (-signal.SIGINT, "KeyboardInterrupt"),
    ("SIGTERM", "cuda"): (143, ""),
    ("collate", None): (1, "RuntimeError: ragged\nin collate_fn"),
    ("transfer", "cuda"): (1, "RuntimeError: the link is down"),
}


@pytest.mark.parametrize(("how", "device"), ENDS)
def test_program_ends_as_its_user_has_it(how, device):
    """The exit code and the one traceback are the user's, no process is left and nothing in shared
    memory. A sample that waits for ever keeps no worker alive, in a process or, where Ctrl-C wakes
    the loop that waits for it, on a thread."""
    program = textwrap.dedent(PROGRAM).format(tests=str(TESTS), how=how, device=device)
    words = ["-W", "ignore", "-c", program]
    child = warm.run(words, timeout=3 * PATIENCE_SECONDS, ends_whole=True)
    code, told = ENDS[how, device]
    assert child.returncode == code, child.stderr
    assert child.stderr.count("Traceback") == (code == 1 or "SIGINT" in how)
    assert told in child.stderr
    pids = child.stdout.split()
    assert len(pids) == (1 if how == "SIGINT, stuck" else 3)
    assert shared_memory_of(*pids) == set()
    until(lambda: not any(map(is_running, pids)))


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python starts no threads then")
def test_function_of_the_exit_may_iterate():
    """With worker threads and with processes, as with torch's loader. Persistent ones ended with
    the main thread: it gets new ones."""
    program = """
        import atexit

        def load():
            for loader in loaders:
                print([batch.tolist() for batch in loader])

        loaders = [
            DataLoader(range(4), 2, num_workers=2, isolation=isolation, persistent_workers=stay)
            for isolation in ("thread", "process") for stay in (False, True)
        ]
        load()
        atexit.register(load)
    """
    done = run_script(program)
    assert (done.stderr, done.stdout.splitlines()) == ("", ["[[0, 1], [2, 3]]"] * 8)
