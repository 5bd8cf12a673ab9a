"""Programs that are forked with torch imported are like those that Python starts, the oracle."""

import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing import util
from pathlib import Path
from subprocess import STDOUT, TimeoutExpired

import _spawned
import _warm
import pytest
from _forks import end_fork_server, fork_server, fork_server_pid

LOOKS = """
import json, os, sys
main = sys.modules["__main__"]
seen = {
    "arguments": sys.argv,
    "orig_argv": sys.orig_argv[1:],
    "first on the path": sys.path[0],
    "path": sorted(set(sys.path)),
    "folder": os.getcwd(),
    "environment": sorted(os.environ.items()),
    "file": getattr(main, "__file__", None),
    "name": __name__,
    "package": __package__,
    "spec": getattr(__spec__, "name", None),
    "names": sorted(name for name in vars(main) if not name.startswith("_")),
    "leads its session": os.getsid(0) == os.getpid(),
    "input": sys.stdin.read(),
    "open": sorted(os.listdir("/proc/self/fd"))[:3],
}
print(json.dumps(seen))
"""


def both(arguments, **options):
    """What the program did when it was forked, and when Python started it."""
    forked = _warm.run(arguments, timeout=50, **options)
    command = [sys.executable, *map(str, arguments)]
    streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    fresh = subprocess.run(command, timeout=50, **streams, **options)
    return forked, fresh


@pytest.mark.parametrize("how", ["code", "file", "module"])
def test_program_sees_what_it_would_see(how, tmp_path):
    """Its arguments, path, folder, environment, names and session."""
    (tmp_path / "package").mkdir()
    for name in ("program.py", "package/__main__.py", "package/__init__.py"):
        (tmp_path / name).write_text(LOOKS if "init" not in name else "")
    start = {"code": ["-c", LOOKS], "file": ["program.py"], "module": ["-m", "package"]}[how]
    # With a locale, or Python chooses one and adds it.
    environment = {"LC_ALL": "C.UTF-8", "MINE": "yes", "PYTHONPATH": str(tmp_path / "more")}
    options = {"cwd": tmp_path, "env": environment, "start_new_session": True}
    forked, fresh = both([*start, "one", "--two"], **options)
    assert (fresh.returncode, fresh.stderr) == (0, "")
    assert forked.stdout == fresh.stdout
    assert (forked.returncode, forked.stderr) == (0, "")


@pytest.mark.parametrize(
    "end",
    [
        "import sys; sys.exit('a complaint')",
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
        "raise ValueError('mine')",
        "import atexit; atexit.register(print, 'the end'); kept = [object()]",
        "import threading; threading.Thread(target=print, args=['a thread']).start()",
    ],
)
def test_program_ends_as_it_would_end(end):
    """By itself, by an error or by a signal, with the same last words."""
    forked, fresh = both(["-c", f"print('begun')\n{end}"])
    assert forked.returncode == fresh.returncode
    assert forked.stdout == fresh.stdout
    # Python 3.13 shows the line of a program given by -c, which it keeps where nobody else can.
    assert last_words(forked.stderr) == last_words(fresh.stderr)
    assert forked.stderr.count("Traceback") == fresh.stderr.count("Traceback")


def last_words(stderr):
    return [line for line in stderr.splitlines() if not line.startswith(" ")][-1:]


CHANGED = ["as imported"]


def look(wire, files):
    """Tell what a spawned process sees, and end with a code."""
    signals = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
    seen = [
        CHANGED,
        os.environ["MINE"],
        os.getcwd(),
        sys.argv,
        os.getppid(),
        multiprocessing.parent_process().pid,
        [str(signal.getsignal(number)) for number in signals],
        sorted(sys.path),
        [kind_of(number) for number in files],
    ]
    wire.send(seen)
    print("printed")
    print("complained", file=sys.stderr)
    sys.exit(wire.recv())


def kind_of(number):
    """What is open under a number."""
    name = f"/proc/self/fd/{number}"
    return os.readlink(name) if os.path.exists(name) else None


@pytest.fixture
def changed_here(monkeypatch, tmp_path):
    """What another process may see of this one, or not."""
    monkeypatch.setenv("MINE", "yes")
    monkeypatch.setattr(sys.modules[__name__], "CHANGED", ["by a test"])
    monkeypatch.chdir(tmp_path)


def seen_by(context, capfd):
    """What a process of a context sees, how it ends, and what it prints."""
    ours, theirs = context.Pipe()
    with open(__file__) as file, ours:
        process = context.Process(target=look, args=[theirs, [file.fileno()]])
        process.start()
        theirs.close()
        seen = ours.recv()
        assert process.is_alive()
        ours.send(3)
        process.join()
    return seen, process.exitcode, capfd.readouterr()


needs_forks = pytest.mark.skipif(not _warm.CAN_FORK, reason="nothing is forked here")


@needs_forks
@pytest.mark.usefixtures("changed_here")
def test_process_that_is_spawned_from_the_warm_one_is_as_a_new_one(capfd, tmp_path):
    """Its memory, parent, streams, environment, signals, open files and end; torch is there."""
    forked = seen_by(_spawned.context(), capfd)
    assert forked == seen_by(multiprocessing.get_context("spawn"), capfd)
    assert forked[0][:5] == [["as imported"], "yes", str(tmp_path), forked[0][3], os.getpid()]
    assert forked[1:] == (3, ("printed\n", "complained\n"))


@needs_forks
@pytest.mark.usefixtures("changed_here")
def test_fork_server_from_the_warm_process_is_as_a_new_one(capfd, monkeypatch, tmp_path):
    """The same of its children, whose parent it is."""
    found = []
    monkeypatch.setattr(fork_server(), "_preload_modules", [])
    for start in (util.spawnv_passfds, _spawned.start_python):
        monkeypatch.setattr(util, "spawnv_passfds", start)
        end_fork_server()
        try:
            seen, *others = seen_by(multiprocessing.get_context("forkserver"), capfd)
            pid = fork_server_pid()
            assert seen.pop(4) == pid
            is_torch_there = "libtorch" in Path(f"/proc/{pid}/maps").read_text()
            found.append((seen, others, is_torch_there))
        finally:
            end_fork_server()
    (forked, *others, is_warm), (new, *others_of_new, is_new_warm) = found
    assert (forked, others) == (new, others_of_new)
    assert (is_warm, is_new_warm) == (True, False)
    assert forked[:3] == [["as imported"], "yes", str(tmp_path)]
    assert others == [[3, ("printed\n", "complained\n")]]


def test_torch_is_there_already():
    """Which is what it is for; the package is not."""
    code = "import sys; print('torch' in sys.modules, 'spdl_torch' in sys.modules)"
    assert _warm.run(["-c", code]).stdout == "True False\n"


def test_program_can_be_talked_to(tmp_path):
    """Lines as they come, signals, streams that are one or a file, a limit of time."""
    code = "import signal; print('ready', flush=True); signal.pause()"
    with _warm.start(["-c", code]) as program:
        assert program.stdout.readline() == "ready\n"
        assert program.poll() is None
        with pytest.raises(TimeoutExpired, match="timed out after 0"):
            program.communicate(timeout=0)
        program.send_signal(signal.SIGINT)
        printed, complaints = program.communicate(timeout=50)
    assert (program.returncode, printed) == (-signal.SIGINT, "")
    assert complaints.endswith("KeyboardInterrupt\n")
    code = "import sys; print(1, flush=True); print(2, file=sys.stderr)"
    assert _warm.run(["-c", code], stderr=STDOUT).stdout == "1\n2\n"
    with (tmp_path / "printed").open("w") as file:
        assert _warm.run(["-c", code], stdout=file).stderr == "2\n"
    assert (tmp_path / "printed").read_text() == "1\n"
