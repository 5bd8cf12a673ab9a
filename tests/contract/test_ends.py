"""However a program ends, it ends: a loader, a pipeline and a statistics file are all in use."""

import os
import signal
import textwrap
import time

import _warm
import pytest
from _folders import HELPERS
from _gates import is_running, shared_memory_of, until
from _loader_helpers import PATIENCE_SECONDS

from spdl_torch.observe import query_task_stats

PROGRAM = """
    import itertools, multiprocessing, os, signal, sys, threading, time
    sys.path.insert(0, {tests!r})
    import torch
    import _lazy_device
    from spdl_torch import DataLoader
    from spdl_torch.observe import SQLiteStatsWriter, recorders
    from spdl_torch.pipeline import PipelineBuilder

    multiprocessing.set_start_method("fork")
    how = {how!r}
    ending = threading.Event()

    class Backend(_lazy_device.LazyBackend):
        def copy(self, target, source):
            if ending.is_set() and how == "transfer":
                raise RuntimeError("the link is down")
            super().copy(target, source)

    _lazy_device.install(_lazy_device.LazyDevice(is_prompt=True), backend=Backend)

    def collate(samples):
        if ending.is_set() and how == "collate":
            raise RuntimeError("ragged")
        return torch.tensor(samples)

    def stop(*_):
        sys.exit(143)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, stop)
    writer = SQLiteStatsWriter({path!r}, flush_interval=3600)
    writer.start()
    builder = PipelineBuilder().add_source(itertools.count()).pipe(str, name="decode")
    pipeline = builder.add_sink().build(**recorders(writer.log))
    loader = DataLoader(
        range(10**6),
        batch_size=8,
        num_workers=2,
        collate_fn=collate,
        device={device!r},
        isolation="thread" if how == "collate" else "auto",  # where it sees the event
    )

    def end():
        ending.set()
        pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
        print(time.time(), *pids, flush=True)
        if how == "ctrl-c":
            os.kill(os.getpid(), signal.SIGINT)
        elif how == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        elif how == "fork":
            pid = os.fork()
            if pid == 0:
                sys.exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            sys.exit(0)

    for step, batch in enumerate(loader):
        pipeline.get_item()
        if step == 20:
            end()
            if how == "exit":
                break
"""

ENDS = {
    ("exit", "cuda"): (0, ""),
    ("fork", None): (0, ""),
    ("ctrl-c", None): (-signal.SIGINT, "KeyboardInterrupt"),
    ("SIGTERM", "cuda"): (143, ""),
    ("collate", None): (1, "RuntimeError: ragged\nin collate_fn (spdl-loader-"),
    ("transfer", "cuda"): (1, "RuntimeError: the link is down"),
}


@pytest.mark.parametrize(("how", "device"), ENDS)
def test_program_ends_and_its_file_is_whole(tmp_path, how, device):
    """The exit code and the one traceback are the user's, no process is left and nothing in shared
    memory, and what the pipeline did last is in the file."""
    if how == "fork" and not hasattr(os, "fork"):
        pytest.skip("needs fork")
    path = tmp_path / "stats.db"
    names = {"tests": str(HELPERS), "how": how, "path": str(path), "device": device}
    program = textwrap.dedent(PROGRAM).format(**names)
    words = ["-W", "ignore", "-c", program]
    child = _warm.run(words, timeout=3 * PATIENCE_SECONDS, ends_whole=True)
    code, words = ENDS[how, device]
    assert child.returncode == code, child.stderr
    began, *pids = child.stdout.split()
    print(f"{how}, {device}: {time.time() - float(began):.2f} s")  # to see with -s
    assert child.stderr.count("Traceback") == (1 if code == 1 or how == "ctrl-c" else 0)
    assert words in child.stderr
    assert shared_memory_of(*pids) == set()
    until(lambda: not any(map(is_running, pids)))
    (row,) = query_task_stats(path)
    assert row["num_tasks"] >= 21
