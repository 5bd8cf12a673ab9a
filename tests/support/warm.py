"""Programs that start with torch imported, forked from a process that has imported it.

A short program spends most of its time importing torch: 1.7 s of 1.9. One that is started here is
a process of its own like any other: it has the arguments, environment, streams, session and
signals that it is given, runs its file as ``__main__``, and ends as Python ends programs, but for
what it had imported from the start. Use
``subprocess`` where the start itself is under test: what an import loads or prints, or what
libraries read from the environment when they are loaded.

``start`` and ``run`` take what follows ``python`` on a command line: ``-c CODE``, ``-m MODULE`` or
a file, then its arguments; before these ``-W ACTION:MESSAGE``. Outside of Linux they call
``subprocess``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
import weakref
from importlib.machinery import SourceFileLoader
from pathlib import Path
from subprocess import DEVNULL, PIPE, CompletedProcess
from unittest.mock import patch

from support.forks import end_at_once, fork_server
from support.memory import make_cheap_to_fork

CAN_FORK = sys.platform == "linux"
PRELOADED = ("spdl_torch.loader.backends.processes.child", "pytest", "hypothesis")
"""What processes that ``multiprocessing`` starts find, beside torch."""
MOST_DESCRIPTORS = 32
"""Of one program."""
HERE = str(Path(__file__).parents[1])
ENVIRONMENT = dict(os.environ)
"""Before any test changes it: what libraries find when they are loaded."""
_ADOPTS_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER
_one_at_a_time = threading.RLock()


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
    preload=(),
    ends_whole=False,
    forks=False,
):
    """Start a program; like ``subprocess.Popen`` with ``text=True`` and no input.

    preload: what the program will have imported beside torch.
    ends_whole: whether it takes apart at its end what it has imported here, too, as any program
    does: for tests of that end. It copies memory for half a second, most of a short program's time.
    forks: whether the processes that the program starts by ``spawn`` or with a fork server are
    forked, too, where it has no threads but Python's. Each would import torch again.
    """
    arguments = [str(argument) for argument in arguments]
    options = {"stdout": stdout, "stderr": stderr, "cwd": cwd, "env": env}
    options |= {"stdin": DEVNULL, "text": True, "start_new_session": start_new_session}
    if not CAN_FORK:
        return Program([sys.executable, *arguments], **options)
    request = {
        "arguments": arguments,
        "cwd": os.fspath(cwd or os.getcwd()),
        "env": dict(os.environ if env is None else env),
        "start_new_session": start_new_session,
        "ends_whole": ends_whole,
        "forks": forks,
    }
    server(tuple(preload))  # which itself is started as ever

    def fork_exec(*given):  # as _posixsubprocess's
        streams = given[6], given[9], given[11]
        streams = [own if each == -1 else each for own, each in enumerate(streams)]
        return fork(request, dict(enumerate(streams)), preload)

    with _one_at_a_time, patch.object(subprocess, "_fork_exec", fork_exec):
        return Program([sys.executable, *arguments], **options)


def spawnv_passfds(path, arguments, descriptors):
    """The same in place of the function of that name in ``multiprocessing.util``: a process with
    these descriptors under their numbers, and our streams, but for the input."""
    request = {
        "arguments": arguments[arguments.index("-c") :],
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "start_new_session": False,
        "ends_whole": False,
        "forks": False,
    }
    with open(os.devnull) as nothing:
        streams = {0: nothing.fileno(), 1: 1, 2: 2}
        return fork(request, streams | {int(each): int(each) for each in descriptors}, PRELOADED)


def fork(request, descriptors, preload):
    """The pid of a new child of this process, which has ``descriptors`` under these numbers. The
    server's own child ends at once, and its child, an orphan, is adopted here."""
    libc, (ours, theirs) = ctypes.CDLL(None), socket.socketpair()
    theirs.settimeout(None)  # with a program's default timeout the server's end would not wait
    request = {**request, "numbers": [*descriptors]}
    with _one_at_a_time, ours:
        libc.prctl(_ADOPTS_ORPHANS, 1, 0, 0, 0)
        try:
            with theirs:
                passed = [theirs.fileno(), *descriptors.values()]
                socket.send_fds(server(tuple(preload)), [b"."], passed)
            ours.sendall(json.dumps(request).encode() + b"\n")
            with ours.makefile("r") as answer:
                return int(answer.read())  # to its end: then the parent has ended
        finally:
            libc.prctl(_ADOPTS_ORPHANS, 0, 0, 0, 0)


@functools.cache
def server(preload):
    """The channel to a process that has imported torch and ``preload``; it ends with this one. Only
    the first one imports torch: the others are forked from it."""
    ours, theirs = socket.socketpair()
    if preload:
        asking, asked = socket.socketpair()
        with theirs, asking, asked:
            socket.send_fds(server(()), [b"."], [asked.fileno(), theirs.fileno()])
            asking.sendall(json.dumps({"preload": preload}).encode() + b"\n")
        atexit.register(_close, ours, os.getpid())
        return ours
    code = f"import sys; sys.path.insert(0, {HERE!r}); from support import warm; exec(warm.serve())"
    command = [sys.executable, "-c", code, str(theirs.fileno())]
    with theirs, open(os.devnull, "w") as nothing:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=nothing,
            env=ENVIRONMENT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    atexit.register(_close, ours, os.getpid(), process)
    return ours


def _close(channel, pid, process=None):
    if os.getpid() == pid:
        channel.close()
        if process is not None:
            process.wait()


def serve():
    """Fork a program for each request. Returns in each of them, with the code that it is to run as
    ``__main__``.
    """
    atexit.register(_leave_modules)  # the last of all: what comes later is called first
    _import("numpy", "torch", "torchvision")
    sys.path.remove(HERE)
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, MOST_DESCRIPTORS)
        if not descriptors:
            end_at_once()  # the tests have ended
        channel = socket.socket(fileno=descriptors.pop(0))
        with channel.makefile("r") as lines:
            request = json.loads(lines.readline())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: OpenBLAS's thread
            child = os.fork()
        if child:
            for descriptor in descriptors:
                os.close(descriptor)
            if "preload" not in request:  # else it ends with the tests, as this process does
                os.waitpid(child, 0)
            channel.close()
        elif "preload" in request:
            channel.close()
            control.close()
            _import(*request["preload"])
            control = socket.socket(fileno=descriptors[0])
        elif pid := os.fork():
            channel.sendall(b"%d\n" % pid)
            end_at_once()
        else:
            channel.close()
            control.close()
            return _become(request, descriptors)


def _import(*names):
    # torch finds no Triton here, which complains at the end of each program when what it has made
    # is frozen (below). A program can import it.
    sys.modules["triton"] = None
    gc.disable()  # what is imported is no garbage
    for name in names:
        importlib.import_module(name)
    gc.enable()
    del sys.modules["triton"]
    # At its end a program would go through all that is imported here, and so copy its memory, which
    # took 0.9 of the 1.3 s of CPU time of an empty one. torch would take each of its operators out
    # of its tables first.
    gc.collect()
    gc.freeze()
    for finalizer in _finalizers():
        if getattr(finalizer.peek()[1], "__module__", None) == "torch.library":
            finalizer.atexit = False
    make_cheap_to_fork()


def _finalizers():
    """Those that Python would call at the end of this process."""
    return list(weakref.finalize._registry)


def _become(request, streams):
    """Make this process what ``python ARGUMENTS`` starts."""
    import numpy
    import torch

    numbers = request["numbers"]
    above = max(*numbers, *streams) + 1
    for number, descriptor in zip(numbers, [_moved(each, above) for each in streams], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if request["start_new_session"]:
        os.setsid()
    else:
        os.setpgid(0, 0)  # a signal to its group reaches neither the server nor the tests
    os.chdir(request["cwd"])
    before = _python_path()
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path = [*_python_path(), *(entry for entry in sys.path[1:] if entry not in before)]
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    numpy.random.seed()
    tempfile.tempdir = None  # the environment says which
    if not request["ends_whole"]:
        _end_quickly()
    if request["forks"]:
        _fork_what_multiprocessing_starts()
    return _program(request["arguments"])


_left: list[tuple[str, types.ModuleType]] = []
"""Modules with which Python has nothing to do at the end of this process."""


def _end_quickly():
    """Let what libraries have imported here, and the static objects of their code, end with this
    process, as memory does."""
    standard = {*sys.stdlib_module_names, "__main__", "support"}
    _left[:] = [each for each in sys.modules.items() if each[0].partition(".")[0] not in standard]
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # glibc's: it is called with the status, before those of libraries
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


def _leave_modules():
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_left))
    for name, module in _left:
        if sys.modules.get(name) is module:
            del sys.modules[name]


def _moved(descriptor, above):
    """The same under a number that nobody wants."""
    import fcntl  # which not every system has

    number = fcntl.fcntl(descriptor, fcntl.F_DUPFD, above)
    os.close(descriptor)
    return number


def _python_path():
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _program(arguments):
    """The code to run, with ``sys`` and ``__main__`` as it expects them."""
    sys.orig_argv = [sys.executable, *arguments]
    first, *arguments = arguments
    while first == "-W":
        option, first, *arguments = arguments
        action, _, message = option.partition(":")
        warnings.filterwarnings(action, message)
        sys.warnoptions.append(option)
    main = vars(sys.modules["__main__"])
    for name in [name for name in main if not name.startswith("__")]:
        del main[name]
    if first == "-c":
        sys.argv, sys.path = ["-c", *arguments[1:]], ["", *sys.path]
        return compile(arguments[0], "<string>", "exec")
    if first == "-m":
        sys.path.insert(0, os.getcwd())
        spec = importlib.util.find_spec(arguments[0])
        if spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{arguments[0]}.__main__")
        main |= {"__spec__": spec, "__package__": spec.parent, "__file__": spec.origin}
        sys.argv = [spec.origin, *arguments[1:]]
        return spec.loader.get_code(spec.name)
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
        code = arguments[arguments.index("-c") + 1]
        imports = ("from multiprocessing.spawn ", "from multiprocessing.forkserver ")
        num_others = len(os.listdir("/proc/self/task")) - threading.active_count()
        if not code.startswith(imports) or num_others:
            return start_python(path, arguments, descriptors)
        # A signal comes to the new process when it has its own handlers, not its parent's.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = os.fork()
        if pid == 0:
            _run_as_new(code, descriptors, mask)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return pid

    util.spawnv_passfds = start_or_fork


def _run_as_new(code, descriptors, mask):
    """Run what a new interpreter would, with the descriptors and signals that it would have, and
    end the process. What its parent has imported is there.
    """
    from multiprocessing import resource_tracker

    status = 1
    try:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor not in descriptors:
                with contextlib.suppress(OSError):  # the one that listed them
                    os.close(descriptor)
        for finalizer in _finalizers():
            finalizer.atexit = False  # its parent's: it would delete a temporary folder of that
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
        sys.modules["__main__"] = main
        sys.argv = ["-c", "--multiprocessing-fork"]
        exec(code, vars(main))
        status = 0
    except SystemExit as end:
        status = end.code or 0  # a number: that is how these end
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        end_at_once(status)
