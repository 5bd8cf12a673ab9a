"""A signal to the trainer's whole process group, as batch systems and terminals send them: what is
to be done is the trainer's business; its children go on, and end when it does."""

import multiprocessing
import os
import signal
import textwrap

import _warm
import pytest
from _folders import HELPERS
from _gates import is_running, until
from _isolated import isolated, nothing_left
from _isolation_data import Spawning
from test_isolation_ends import outcome_of_session

__all__ = ["nothing_left"]

pytestmark = pytest.mark.skipif(os.name != "posix", reason="sends signals")

PROGRAM = """
    import multiprocessing, os, signal, sys
    sys.path.insert(0, {tests!r})
    from _inside import pids_of
    from _isolation_data import Images, image_of
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

    def started_under(hit, **options):
        "A whole epoch of a loader whose child is hit by a signal as soon as there is a process."
        pids = []

        def start_and_hit(*arguments):
            child = start_child(*arguments)
            pids.append(child.pid)
            if len(pids) == 1:
                hit(child.pid)
            return child

        line.start_child = start_and_hit
        assert whole_epoch(loader(**options)) == 24
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
            started_under(lambda pid: os.kill(pid, each), **served)
        # Of a fork server's child the server is hit, too, which is not asked twice.
        started_under(lambda pid: os.killpg(0, signal.SIGTERM), multiprocessing_context="fork")
        assert handled.pop()
        for method in ("spawn", "fork"):
            options = {{"multiprocessing_context": method}}
            assert started_under(lambda pid: os.kill(pid, signal.SIGTERM), **options) == 1

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
    """While the child is being started, while it loads, while it stops; every batch comes, from
    the same child where there is one."""
    source = textwrap.dedent(PROGRAM.format(tests=str(HELPERS)))
    (tmp_path / "program.py").write_text(source, encoding="utf-8")
    arguments = ["-W", "error", "-W", NOT_OURS, tmp_path / "program.py"]
    with _warm.start(arguments, start_new_session=True, forks=True) as program:
        stdout, stderr = outcome_of_session(program)
    assert stdout.split() == ["loading", "starting", "stopping", "done"], stderr
    assert (program.returncode, stderr) == (0, "")


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_process_that_is_terminated_says_so(has_pidfd, monkeypatch):
    """By ``Process.terminate()``, which multiprocessing offers for all its children."""
    if not has_pidfd:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    batches = iter(isolated(Spawning(), None, num_workers=1))
    pids = next(batches)
    for process in multiprocessing.active_children():
        process.terminate()
        until(lambda process=process: process.exitcode is not None)
    with pytest.raises(RuntimeError, match=r"\(pid \d+\) was ended by Process\.terminate\(\)"):
        list(batches)
    for pid in pids:  # one of which would keep the fork server, and live on itself
        os.kill(pid, signal.SIGKILL)


def test_programs_of_the_dataset_can_be_ended():
    """Programs that the child starts obey the signals that it leaves to the trainer."""
    pids = next(iter(isolated(Spawning(), None, num_workers=1)))
    for pid in pids:
        # Again, if it came before the forked process had its own handlers back.
        until(lambda pid=pid: not is_running(pid) or os.kill(pid, signal.SIGTERM))
