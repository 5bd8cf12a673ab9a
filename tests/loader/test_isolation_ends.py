"""However a worker process, its trainer or its loop ends: it is reported, and nothing is left."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import signal
import textwrap
from functools import partial
from multiprocessing import util

import _spawned
import _warm
import psutil
import pytest
from _at_call import AtCall
from _folders import HELPERS
from _forks import found_in_fork
from _gates import is_running, shared_memory_of, until
from _inside import are_up, children_of, doing_in, pids_of
from _isolated import children, isolated, nothing_left, served
from _isolation_data import Images, Leaving, Noting, Waiting
from _loader_helpers import PATIENCE_SECONDS, assert_threads_end
from torch.utils.data import DataLoader as TorchLoader

from spdl_torch.loader.backends.processes import worker_process

__all__ = ["nothing_left"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.skipif(os.name != "posix", reason="sends signals"),
]


def test_child_does_not_collect_what_it_shares_with_its_server():
    """It would copy the memory."""
    (num_frozen,) = served(Leaving(), num_workers=1)
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
        assert method == "fork" or samples <= set(lines)
        found.append(lines.count("end") if how == "left" else sorted(lines))
    assert found[0] == found[1]


def test_child_can_be_joined_when_it_is_gone():
    """At exit multiprocessing joins, on its own thread, the children of a moment ago."""
    batches = iter(isolated(Images(40), 4))
    next(batches)
    workers = children()
    until(partial(are_up, batches))  # one that is not is killed
    del batches
    assert_threads_end()
    for child in workers:
        child.join()
    assert [child.exitcode for child in workers] == [0, 0]


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


def test_timeout_names_what_the_child_with_the_batch_does(held_child):
    """Of several children, that one alone."""
    batches, _ = held_child(timeout=3)
    with pytest.raises(RuntimeError, match="timed out after 3 seconds") as caught:
        next(batches)
    message = (
        r"(?s)Waiting for batch 4.*Busy threads:.*worker-\d, batch 4.*sample index 4.*_isolation_"
    )
    assert re.search(message, str(caught.value))
    assert "None of its threads is at work" not in str(caught.value)


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


def test_forked_process_leaves_the_children_alone():
    """They are the parent's: at the fork's end multiprocessing would end them, and an iterator
    there says what it lacks."""
    batches = iter(isolated(Images(), 4))
    next(batches)
    assert found_in_fork(util._exit_function) is None
    found = found_in_fork(lambda: next(batches))
    ended = "PipelineStopped: DataLoader: its workers did not follow into a forked process"
    assert found.startswith(ended)
    assert len(list(batches)) == 5


# -- whole programs --------------------------------------------------------------------------

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


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_children_run_the_script_at_the_same_time_however_large_the_dataset(method, tmp_path):
    """Each waits there for the other, which is not kept from it until this one has its dataset."""
    file = tmp_path / "program.py"
    file.write_text(
        textwrap.dedent(f"""
            import pathlib, threading, uuid
            from spdl_torch import DataLoader

            if __name__ == "__main__":
                loader = DataLoader([bytes(1 << 22)] * 4, num_workers=2, isolation="process",
                                    multiprocessing_context={method!r})
                assert sum(map(len, loader)) == 4
            else:
                folder = pathlib.Path({str(tmp_path)!r})
                (folder / f"{{uuid.uuid4()}}.here").touch()
                while len(list(folder.glob("*.here"))) < 2:
                    threading.Event().wait(0.01)
        """),
        encoding="utf-8",
    )
    done = _warm.run([file], timeout=50, forks=True)
    assert (done.returncode, done.stderr) == (0, "")


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
