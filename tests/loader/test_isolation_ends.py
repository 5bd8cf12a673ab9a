"""However a worker process, its trainer or its loop ends: it is reported, and nothing is left."""

import gc
import itertools
import multiprocessing
import os
import signal
import textwrap
from multiprocessing import util

import _spawned
import _warm
import psutil
import pytest
from _at_call import AtCall
from _datasets import Drawing
from _folders import HELPERS
from _forks import found_in_fork
from _gates import is_running, shared_memory_of, until
from _inside import children_of, doing_in, pids_of
from _isolated import isolated, nothing_left, served
from _isolation_data import Images, Noting, Waiting
from _loader_helpers import PATIENCE_SECONDS
from torch.utils.data import DataLoader as TorchLoader

from spdl_torch import DataLoader
from spdl_torch.loader.backends.processes import worker_process

__all__ = ["nothing_left"]

pytestmark = pytest.mark.skipif(os.name != "posix", reason="sends signals")


def test_child_does_not_collect_what_it_shares_with_its_server():
    """It would copy the memory."""
    (num_frozen,) = served(Drawing(gc.get_freeze_count, 1), num_workers=1)
    assert num_frozen.item() > 100_000


METHODS_AND_ENDS = [
    ("forkserver", "left"),
    ("forkserver", "persistent"),
    ("spawn", "whole"),
    ("fork", "whole"),  # torch's own ends there without a word of the dataset's
]


@pytest.mark.parametrize(("method", "how"), METHODS_AND_ENDS)
def test_worker_lets_the_dataset_end_as_torchs_does(method, how, tmp_path):
    """Its finalizer runs, and its open files are written to their ends."""
    context = _spawned.context() if method == "spawn" else method
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


@pytest.fixture
def held_child(tmp_path):
    """Three children, one of which is at sample 4, and will not get past it: an iterator that has
    handed out the batches before, and that child's pid."""
    os.mkfifo(tmp_path / "held")
    dataset, begun = Waiting(tmp_path / "held", held=4), []

    def begin(**options):
        loader = isolated(dataset, 1, num_workers=3, **options)
        batches = iter(loader)
        begun.append(int((tmp_path / "held").read_text(encoding="utf-8")))
        received = [next(batches) for _ in range(4)]
        assert len(received) == 4
        return batches, begun[0]

    yield begin
    os.kill(begun[0], signal.SIGKILL)


def test_child_that_does_not_answer_hides_no_other(held_child, monkeypatch):
    """A wait for any batch logs what all children do; a profile has the rows of each."""
    monkeypatch.setattr(worker_process, "_ASK_SECONDS", 0.5)
    batches, pid = held_child(in_order=False)
    until(lambda: doing_in(batches).count("None of its threads is at work") == 2)
    text = doing_in(batches)
    assert text.startswith("Waiting for any batch. ")
    assert text.count("sample index 4") == 1
    other = next(each for each in pids_of(batches) if each != pid)
    os.kill(other, signal.SIGSTOP)
    try:
        until(lambda: psutil.Process(other).status() == psutil.STATUS_STOPPED)
        text = doing_in(batches)
        timeline = batches.stats().recorder.timeline()
    finally:
        os.kill(other, signal.SIGCONT)
    assert f"The worker process (pid {other}) is being started, or did not answer" in text
    assert "sample index 4" in text
    rows = {row.replica for row in timeline.rows if row.stage == "worker process"}
    assert rows == set(children_of(batches))


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_forked_process_leaves_the_workers_alone(isolation):
    """They are the parent's: at the fork's end multiprocessing would end them. An iterator there
    says what it lacks, and a new one works."""
    loader = DataLoader(Images(), 4, num_workers=2, isolation=isolation)
    batches = iter(loader)
    next(batches)
    assert found_in_fork(util._exit_function) is None
    found = found_in_fork(lambda: next(batches))
    ended = "PipelineStopped: DataLoader: its workers did not follow into a forked process"
    assert found.startswith(ended)
    assert found_in_fork(lambda: len(list(loader))) == 6
    assert len(list(batches)) == 5


PROGRAM = """
    import os, signal, sys, threading
    sys.path.insert(0, {tests!r})
    from _isolation_data import Images, Waiting, as_list
    from spdl_torch import DataLoader

    def main():
        loader = DataLoader({dataset}, 2, num_workers=2, isolation="process",
                            collate_fn=as_list, persistent_workers=True)
        batches = iter(loader)
        first = next(batches)
        import multiprocessing
        pids = [p.pid for p in multiprocessing.active_children()]
        print("children", *pids, flush=True)
        {end}

    if __name__ == "__main__":
        main()
"""

ENDS = {
    "exit": ("globals().update(kept=(batches, first))", 0),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
}


@pytest.mark.parametrize("how", ENDS)
def test_nothing_is_left_when_a_sample_never_comes(how, tmp_path):
    """A sample that waits for ever does not keep the child alive: it is ended all the same."""
    code, expected = ENDS[how]
    path = str(tmp_path / "held")
    os.mkfifo(path)
    end = f"open({path!r}).close(); {code}"
    assert_program_ends(tmp_path, f"Waiting({path!r}, held=3)", end, expected)


def assert_program_ends(tmp_path, dataset, end, expected):
    """Run it in a session of its own: it leaves neither a process, nor a name in /dev/shm, nor a
    word on stderr."""
    file = tmp_path / "program.py"
    source = PROGRAM.format(tests=str(HELPERS), dataset=dataset, end=end)
    file.write_text(textwrap.dedent(source), encoding="utf-8")
    with _warm.start([file], start_new_session=True, ends_whole=True) as program:
        try:
            stdout, stderr = program.communicate(timeout=5 * PATIENCE_SECONDS)
            pids = [int(pid) for pid in stdout.split()[1:]]
            assert pids, stderr
            until(lambda: not any(map(is_running, pids)))
            until(lambda: not session_of(program.pid))
        finally:
            for process in session_of(program.pid):
                process.kill()
    assert (program.returncode, stderr) == (expected, "")
    assert not shared_memory_of(program.pid, *pids)


def session_of(leader):
    """The processes that belong to a session."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess, PermissionError):
            pass
    return found


@pytest.mark.parametrize(
    ("method", "sample"),
    [("fork", "1"), ("forkserver", "1"), ("spawn", "bytes(1 << 22)")],
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
    done = _warm.run([file], timeout=50, forks=True)
    if method == "fork":
        assert (done.returncode, done.stderr) == (0, "")
        return
    assert done.returncode == 1
    assert 'if __name__ == "__main__"' in done.stderr.splitlines()[-1]


def roles_seen_by_a_handler(place):
    """Whose rows the profile has that a handler asks for, which interrupts the loop's thread at
    that place of a batch's way to it; None = the way is shorter."""
    loader = isolated(Images(12), 1, num_workers=2)
    batches = iter(loader)
    for _ in range(2):  # one of each worker, which is up then
        next(batches)
    profiles = []
    before = signal.signal(signal.SIGUSR1, lambda *_: profiles.append(loader.profile()))
    try:
        with AtCall(place, signal.SIGUSR1):
            for _ in batches:
                break
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(list(batches)) == 9
    return [(row.stage, row.replica) for p in profiles for row in p.timelines[0].rows] or None


@pytest.mark.parametrize("step", [29, pytest.param(1, marks=pytest.mark.long)])
def test_profile_in_a_signal_handler_has_all_rows(step):
    """Wherever the loop's thread is, and whatever it holds: workers answer whoever asks. The short
    form looks at every 29th place."""
    for place in itertools.count(1, step):
        found = roles_seen_by_a_handler(place)
        if found is None:
            break
        stages = [stage for stage, _ in found]
        assert sorted(stages) == ["training", "worker process", "worker process"], place
    assert place > 40
