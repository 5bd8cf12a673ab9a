"""However a worker process or its trainer ends: it is reported, and nothing is left.

What is to be done about a signal to the trainer's whole process group, as batch systems and
terminals send them, is the trainer's business: its children go on, and end when it does.
"""

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import suppress
from multiprocessing import forkserver

import psutil
import pytest
from support import warm
from support.at_call import AtCall, handled
from support.datasets import Images, Made
from support.folders import TESTS
from support.forks import fork_server
from support.gates import is_running, until
from support.inside import children_of, doing_in, pids_of
from support.isolated import isolated, nothing_left
from support.loaders import PATIENCE_SECONDS
from support.seats import SPAWN
from torch.utils.data import DataLoader as TorchLoader, Dataset

__all__ = ["nothing_left"]

pytestmark = pytest.mark.skipif(os.name != "posix", reason="sends signals")


class Noting(Dataset):
    """Notes in an open file of its worker's which samples it made, and its own end."""

    def __init__(self, folder):
        self.folder, self.file = folder, None

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if self.file is None:
            self.file = open(self.folder / str(os.getpid()), "a", encoding="utf-8")  # noqa: SIM115
        self.file.write(f"{index}\n")
        return index

    def __del__(self):
        if self.file is not None:
            self.file.write("end\n")


METHODS_AND_ENDS = [
    ("forkserver", "left"),
    ("forkserver", "persistent"),
    ("spawn", "whole"),
    ("fork", "whole"),  # torch's own ends there without a word of the dataset's
]


@pytest.mark.parametrize(("method", "how"), METHODS_AND_ENDS)
def test_worker_lets_the_dataset_end_as_torchs_does(method, how, tmp_path):
    """Its finalizer runs, and its open files are written to their ends."""
    context = SPAWN if method == "spawn" else method
    options = {"num_workers": 2, "multiprocessing_context": context}
    found = []
    for number, kind in enumerate([TorchLoader, isolated]):
        folder = tmp_path / str(number)
        folder.mkdir()
        loader = kind(Noting(folder), 2, **options, persistent_workers=how != "whole")
        drawn = [batch.tolist() for batch in itertools.islice(loader, 2 if how == "left" else None)]
        workers = multiprocessing.active_children()
        del loader
        for each in workers:
            each.join()
        lines = [line for file in folder.iterdir() for line in file.read_text().splitlines()]
        samples = {str(index) for batch in drawn for index in batch}
        if kind is TorchLoader and method != "fork" and not lines:
            pytest.skip("an old torch's own workers end without a word of the dataset's")
        assert method == "fork" or samples <= set(lines)
        found.append(lines.count("end") if how == "left" else sorted(lines))
    assert found[0] == found[1]


def outcome_of(program):
    """What a session's leader and its children, which have its streams, write until the last of
    them ends."""
    try:
        return program.communicate(timeout=5 * PATIENCE_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("method", "sample"), [("fork", "1"), ("forkserver", "1"), ("spawn", "bytes(1 << 22)")]
)
def test_script_without_a_main_guard_says_so(tmp_path, method, sample):
    """The child runs it again, which multiprocessing refuses; the trainer's error says what to do.
    Also where there is so much to be sent to the child that it does not live to take it. A forked
    child runs nothing again."""
    file = tmp_path / "program.py"
    file.write_text(
        "from spdl_torch import DataLoader\n"
        "import multiprocessing\n"
        f"multiprocessing.set_start_method({method!r})\n"
        f"list(DataLoader([{sample}], num_workers=1, isolation='process'))\n",
        encoding="utf-8",
    )
    done = warm.run([file], timeout=50)
    if method == "fork":
        assert (done.returncode, done.stderr) == (0, "")
        return
    assert done.returncode == 1
    assert 'if __name__ == "__main__"' in done.stderr.splitlines()[-1]


GOES_ON = """
    import multiprocessing, os, signal, sys
    sys.path.insert(0, {tests!r})
    from support.inside import pids_of
    from support.datasets import Images
    from spdl_torch import DataLoader
    from spdl_torch.loader.backends.processes import worker_process as line

    SIGNALS = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT]
    handled = []
    start_child = line.start_child

    def whole_epoch(batches):
        "The rest of an epoch of 24, in order."
        found = [index for batch in batches for index in batch["index"].tolist()]
        assert found == list(range(24 - len(found), 24)), found
        return len(found)

    def loader(num_workers=1, **options):
        return DataLoader(Images(24), 4, num_workers=num_workers, isolation="process", **options)

    def started_under(send, number, method):
        "How many processes load an epoch, the first of which gets a signal as soon as it is one."
        pids = []

        def start_and_hit(*arguments):
            child = start_child(*arguments)
            pids.append(child.pid)
            if len(pids) == 1:
                send(child.pid if send is os.kill else 0, number)
            return child

        line.start_child = start_and_hit
        assert whole_epoch(loader(multiprocessing_context=method)) == 24
        line.start_child = start_child
        return len(pids)

    def main():
        for each in SIGNALS:
            signal.signal(each, lambda *_: handled.append(1))

        print("loading", flush=True)
        served = {{"multiprocessing_context": "forkserver"}}
        for options in (served, {{"num_workers": 2}}):
            persistent = loader(persistent_workers=True, **options)
            for each in (*SIGNALS[1:], signal.SIGTERM):  # which the fork server does not outlive
                batches = iter(persistent)
                next(batches)
                pids = pids_of(batches)
                os.killpg(0, each)
                assert whole_epoch(batches) == 20
                assert handled.pop() and pids_of(batches) == pids

        print("starting", flush=True)
        for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            started_under(os.kill, each, "forkserver")
        # Of a fork server's child the server is hit, too, which is not asked twice.
        started_under(os.killpg, signal.SIGTERM, "fork")
        assert handled.pop()
        for method in ("spawn", "fork"):
            assert started_under(os.kill, signal.SIGTERM, method) == 1

        print("stopping", flush=True)
        batches = iter(loader())
        next(batches)
        (pid,) = pids_of(batches)
        (child,) = [each for each in multiprocessing.active_children() if each.pid == pid]
        del batches
        os.killpg(0, signal.SIGTERM)
        child.join(30)
        assert handled.pop() and child.exitcode == 0
        print("done", flush=True)

    if __name__ == "__main__":
        main()
"""


NOT_OURS = "ignore:resource_tracker"  # multiprocessing's: SIGHUP and SIGUSR1 end it


def test_loading_goes_on_when_the_group_gets_a_signal(tmp_path):
    """While the child is being started, while it loads, while it stops; every batch comes, from the
    same child where there is one."""
    source = textwrap.dedent(GOES_ON.format(tests=str(TESTS)))
    (tmp_path / "program.py").write_text(source, encoding="utf-8")
    arguments = ["-W", "error", "-W", NOT_OURS, tmp_path / "program.py"]
    with warm.start(arguments, start_new_session=True) as program:
        stdout, stderr = outcome_of(program)
    assert stdout.split() == ["loading", "starting", "stopping", "done"], stderr
    assert (program.returncode, stderr) == (0, "")


def processes_of(index):
    """Sample 0 is the pid of a program that was started and that of a process that was forked."""
    if index:
        return index
    code = "import threading; print(flush=True); threading.Event().wait()"
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    program.stdout.readline()
    if not (pid := os.fork()):
        threading.Event().wait()
    return program.pid, pid


def test_process_that_is_terminated_says_so(monkeypatch):
    """By ``Process.terminate()``, which multiprocessing offers for all its children. Programs that
    the child has started obey the signals that it leaves to the trainer."""
    monkeypatch.delattr(os, "pidfd_open", raising=False)  # as where there is none
    batches = iter(isolated(Made(processes_of, 1000), None, num_workers=1))
    pids = next(batches)
    for process in multiprocessing.active_children():
        process.terminate()
        until(lambda process=process: process.exitcode is not None)
    with pytest.raises(RuntimeError, match=r"\(pid \d+\) was ended by Process\.terminate\(\)"):
        list(batches)
    for pid in pids:
        # Again, if it came before the forked process had its own handlers back.
        until(lambda pid=pid: not is_running(pid) or os.kill(pid, signal.SIGTERM))


@pytest.mark.parametrize("step", [29, pytest.param(1, marks=pytest.mark.long)])
def test_profile_in_a_signal_handler_has_all_rows(step):
    """Wherever the loop's thread is on a batch's way to it, and whatever it holds: workers answer
    whoever asks. The short form looks at every 29th place."""
    profiles = []
    with handled(lambda *_: profiles.append(loader.profile())):
        for place in itertools.count(1, step):
            loader = isolated(Images(12), 1, num_workers=2)
            batches = iter(loader)
            for _ in range(2):  # one of each worker, which is up then
                next(batches)
            with AtCall(place, signal.SIGUSR1):
                for _ in batches:
                    break
            assert len(list(batches)) == 9
            if not profiles:
                break
            stages = [row.stage for row in profiles.pop().timelines[0].rows]
            assert sorted(stages) == ["training", "worker process", "worker process"], place
    assert place > 40


def test_rows_of_processes_are_read_while_they_are_kept():
    """At the end of an epoch: each once."""
    loader, found = isolated(Images(4), 1, num_workers=1), []
    next(batches := iter(loader))
    ring = children_of(batches)[0].page.ring
    copied = ring.copied

    def num_rows():
        return [row.stage for row in loader.profile().timelines[0].rows].count("worker process")

    def reading():
        if not found:
            found.append(None)
            found.append(num_rows())
        return copied()

    ring.copied = reading
    assert len(list(batches)) == 3
    batches.close()
    assert [*found, num_rows()] == [None, 1, 1]


HIT_AT_THE_START = """
    import os, signal, sys, threading
    from spdl_torch import DataLoader
    from spdl_torch.loader.backends.processes import worker_process as line

    start_child = line.start_child

    def start_and_die(*arguments):
        print(start_child(*arguments).pid, flush=True)
        os.killpg(0, signal.SIGHUP)
        threading.Event().wait()

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    line.start_child = start_and_die
    iter(DataLoader([0], num_workers=1, isolation="process", multiprocessing_context="fork"))
"""


def test_child_ends_that_misses_a_signal_to_the_group():
    """A trainer without a handler ends at once, and its child, which obeys none yet, after it."""
    words = ["-c", textwrap.dedent(HIT_AT_THE_START)]
    with warm.start(words, start_new_session=True) as program:
        stdout, stderr = outcome_of(program)
    assert (program.returncode, stderr) == (-signal.SIGHUP, "")
    until(lambda: not is_running(int(stdout)))


class Waiting(Images):
    """Sample ``held`` tells its process through a named pipe and then waits for ever."""

    def __init__(self, path, held=5):
        super().__init__()
        self.path = str(path)
        self.held = held

    def __getitem__(self, index):
        if index == self.held:
            with open(self.path, "w", encoding="utf-8") as file:  # waits for a reader
                file.write(str(os.getpid()))
            threading.Event().wait()
        return super().__getitem__(index)


def test_child_that_does_not_answer_hides_no_other(tmp_path, monkeypatch):
    """A wait for any batch logs what all children do; a profile has the rows of each."""
    monkeypatch.setattr("spdl_torch.loader.backends.processes.worker_process._ASK_SECONDS", 0.5)
    os.mkfifo(tmp_path / "held")
    loader = isolated(Waiting(tmp_path / "held", held=4), 1, num_workers=3, in_order=False)
    batches = iter(loader)
    pid = int((tmp_path / "held").read_text(encoding="utf-8"))
    for _ in range(4):
        next(batches)
    until(lambda: doing_in(batches).count("None of its threads is at work") == 2)
    text = doing_in(batches)
    assert text.startswith("Waiting for any batch. ")
    assert text.count("sample index 4") == 1
    other = next(each for each in pids_of(batches) if each != pid)
    os.kill(other, signal.SIGSTOP)
    try:
        until(lambda: psutil.Process(other).status() == psutil.STATUS_STOPPED)
        text = doing_in(batches)
        timeline = loader.profile().timelines[0]
    finally:
        os.kill(other, signal.SIGCONT)
        os.kill(pid, signal.SIGKILL)
    assert f"The worker process (pid {other}) is being started, or did not answer" in text
    assert "sample index 4" in text
    rows = {row.replica for row in timeline.rows if row.stage == "worker process"}
    assert rows == set(children_of(batches))


@pytest.mark.parametrize("num_workers", [1, 3])
def test_fork_server_that_dies_as_a_worker_starts_is_replaced(monkeypatch, num_workers):
    """As by Ctrl-C, which reaches the program's whole group while the server imports torch."""
    server = fork_server()
    server.ensure_running()
    connect, read, pids = forkserver.connect_to_new_process, forkserver.read_signed, []

    def connect_to_the_stopped(descriptors):
        if not pids:
            pids.append(server._forkserver_pid)
            os.kill(pids[0], signal.SIGSTOP)  # it takes no request
        return connect(descriptors)

    def read_of_the_dead(descriptor):
        if len(pids) == 1:
            pids.append(os.kill(pids[0], signal.SIGKILL))
        return read(descriptor)

    monkeypatch.setattr(forkserver, "connect_to_new_process", connect_to_the_stopped)
    monkeypatch.setattr(forkserver, "read_signed", read_of_the_dead)
    loader = isolated(range(8), 2, num_workers=num_workers, multiprocessing_context="forkserver")
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert len(pids) == 2
