"""Programs that start with torch imported, forked by ``multiprocessing``'s fork server, which has.

A short program spends most of its time importing torch: 2.1 s of 2.2. One that is started here is
a process of its own like any other: it has the arguments, environment, streams, session and
signals that it is given, runs its file as ``__main__``, and ends as Python ends programs. Use
``subprocess`` where the start itself is under test: what an import loads or prints, or what
libraries read from the environment when they are loaded.

``start`` and ``run`` take what follows ``python`` on a command line: ``-c CODE``, ``-m MODULE`` or
a file, then its arguments; before these ``-W ACTION:MESSAGE``. Outside of Linux they call
``subprocess``.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import types
import warnings
import weakref
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from subprocess import DEVNULL, PIPE, CompletedProcess
from unittest.mock import patch

from support.forks import end_at_once, fork_server

CAN_FORK = sys.platform == "linux"
_ADOPTS_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER
_one_at_a_time = threading.Lock()


class Program(subprocess.Popen):
    """A test that fails does not wait for it."""

    def __exit__(self, kind, *more):
        if kind is not None:
            self.kill()
        super().__exit__(kind, *more)


def run(arguments, *, timeout=None, **options):
    """Start a program and wait for its end; like ``subprocess.run`` that captures text."""
    with start(arguments, **options) as process:
        printed, complaints = process.communicate(timeout=timeout)
    return CompletedProcess(process.args, process.returncode, printed, complaints)


def start(
    arguments,
    *,
    stdout=PIPE,
    stderr=PIPE,
    cwd=None,
    env=None,
    start_new_session=False,
    ends_whole=False,
):
    """Start a program; like ``subprocess.Popen`` with ``text=True`` and no input.

    ends_whole: whether it takes apart at its end what it has imported, too, as any program does:
    for tests of that end. It takes a third of a second, most of a short program's time.
    """
    arguments = [str(argument) for argument in arguments]
    options = {"stdout": stdout, "stderr": stderr, "cwd": cwd, "env": env}
    options |= {"stdin": DEVNULL, "text": True, "start_new_session": start_new_session}
    if not CAN_FORK:
        return Program([sys.executable, *arguments], **options)
    environment = dict(os.environ if env is None else env)
    cwd = os.fspath(cwd or os.getcwd())
    request = Request(arguments, cwd, environment, start_new_session, ends_whole)

    def fork_exec(*given):  # as _posixsubprocess's
        streams = given[6], given[9], given[11]
        return fork(request, [own if each == -1 else each for own, each in enumerate(streams)])

    fork_server().ensure_running()  # which itself is started as ever
    with _one_at_a_time, patch.object(subprocess, "_fork_exec", fork_exec):
        return Program([sys.executable, *arguments], **options)


def fork(request, streams):
    """The pid of a new child of this process, which has these streams. The server's own child ends
    at once, and its child, an orphan, is adopted here."""
    libc, (reading, writing) = ctypes.CDLL(None), os.pipe()
    libc.prctl(_ADOPTS_ORPHANS, 1, 0, 0, 0)
    try:
        status, data = fork_server().connect_to_new_process([writing, *streams])
        os.close(writing)
        with open(data, "wb") as file:
            for each in ({}, request):  # nothing is to be prepared
                file.write(pickle.dumps(each))
        with open(reading, "rb") as channel, open(status, "rb") as end:
            pid = int(channel.read())
            end.read()  # to its end: then the parent has ended
        return pid
    finally:
        libc.prctl(_ADOPTS_ORPHANS, 0, 0, 0, 0)


@dataclass
class Request:
    """What the child of the fork server is to run."""

    arguments: list[str]
    cwd: str
    env: dict[str, str]
    start_new_session: bool
    ends_whole: bool

    def _bootstrap(self, _):
        """Called there, as a ``Process``'s."""
        import numpy
        import torch

        channel, *streams = fork_server().get_inherited_fds()
        if pid := os.fork():
            os.write(channel, b"%d" % pid)
            end_at_once()
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        if self.start_new_session:
            os.setsid()
        else:
            os.setpgid(0, 0)  # a signal to its group reaches neither the server nor the tests
        os.chdir(self.cwd)
        before = _python_path()
        os.environ.clear()
        os.environ.update(self.env)
        sys.path = [*_python_path(), *(entry for entry in sys.path[1:] if entry not in before)]
        if "OMP_NUM_THREADS" in os.environ:
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        numpy.random.seed()
        tempfile.tempdir = None  # the environment says which
        _fork_what_multiprocessing_starts()
        _run_as_new(self.arguments, ends_whole=self.ends_whole)


def _python_path():
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _run_as_new(arguments, descriptors=(), mask=(), ends_whole=False):
    """Run what a new interpreter would, with the descriptors and signals that it would have, and
    end the process. What its parent has imported is there."""
    from multiprocessing import resource_tracker

    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in descriptors:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(descriptor)
    for finalizer in list(weakref.finalize._registry):
        # Its parent's: it would delete a temporary folder of that. And at an end that is not whole
        # torch need not take each of its operators out of its tables.
        is_torchs = getattr(finalizer.peek()[1], "__module__", None) == "torch.library"
        finalizer.atexit = is_torchs and ends_whole
    atexit.register(weakref.finalize._exitfunc)  # which a fork server of Python 3.13 has forgotten
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    fork_server().__init__()
    resource_tracker._resource_tracker.__init__()
    main = types.ModuleType("__main__")
    main.parents = sys.modules["__main__"]  # who is collected with it would clear its names
    main.__builtins__ = builtins  # not its names alone, as exec() has it
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    _end(_status_of(arguments, vars(main)), ends_whole)


def _status_of(arguments, main):
    """Run a program's code; the exit status, or less than 0 where it is Ctrl-C's."""
    try:
        exec(_program(arguments, main), main)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _end(status, ends_whole):
    """End this process as Python ends a program."""
    if ends_whole:
        if status < 0:  # C's raise(), once all is taken apart
            libc = ctypes.CDLL(None)
            libc.on_exit(ctypes.cast(getattr(libc, "raise"), ctypes.c_void_p), None)
        ctypes.pythonapi.Py_Exit(abs(status))
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        signal.raise_signal(-status)
    end_at_once(status)


def _program(arguments, main):
    """The code to run, with ``sys`` and ``__main__`` as it expects them."""
    sys.orig_argv = [sys.executable, *arguments]
    first, *arguments = arguments
    while first == "-W":
        option, first, *arguments = arguments
        action, _, message = option.partition(":")
        warnings.filterwarnings(action, message)
        sys.warnoptions.append(option)
    if first == "-c":
        sys.argv, sys.path = ["-c", *arguments[1:]], ["", *sys.path]
        return compile(arguments[0], "<string>", "exec")
    if first == "-m":
        sys.argv, sys.path = arguments, [os.getcwd(), *sys.path]
        return f"import runpy; runpy._run_module_as_main({arguments[0]!r})"
    sys.argv, sys.path = [first, *arguments], [str(Path(first).resolve().parent), *sys.path]
    main["__file__"] = os.path.join(os.getcwd(), first)
    main["__loader__"] = SourceFileLoader("__main__", main["__file__"])
    return compile(Path(first).read_bytes(), main["__file__"], "exec")


def _fork_what_multiprocessing_starts():
    """Let new interpreters of ``multiprocessing`` be forks of this process, unless a library's
    threads run: what they hold would never be released in a fork. Python sees to its own.
    """
    from multiprocessing import util

    start_python = util.spawnv_passfds

    def start_or_fork(path, arguments, descriptors):
        words = arguments[arguments.index("-c") :]
        imports = ("from multiprocessing.spawn ", "from multiprocessing.forkserver ")
        num_others = len(os.listdir("/proc/self/task")) - threading.active_count()
        if not words[1].startswith(imports) or num_others:
            return start_python(path, arguments, descriptors)
        # A signal comes to the new process when it has its own handlers, not its parent's.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = os.fork()
        if pid == 0:
            _run_as_new(words, descriptors, mask)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return pid

    util.spawnv_passfds = start_or_fork
