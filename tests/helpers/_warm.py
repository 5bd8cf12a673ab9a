"""Programs that start with torch imported, forked from a process that has imported it.

A short program spends most of its time importing torch: 1.7 s of 1.9. One that is started here is
a process of its own like any other: it has the arguments, environment, streams, session and
signals that it is given, runs its file as ``__main__``, and ends as Python ends programs, but for
what it had imported from the start. Use
``subprocess`` where the start itself is under test: what an import loads or prints, or what
libraries read from the environment when they are loaded.

``start`` and ``run`` take what follows ``python`` on a command line: ``-c CODE``, ``-m MODULE`` or
a file, then its arguments; before these ``-u`` and ``-W ACTION:MESSAGE``. Where there are no
descriptors of processes (outside of Linux) they call ``subprocess``.
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
import selectors
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
from pathlib import Path
from subprocess import PIPE, STDOUT, CompletedProcess, TimeoutExpired
from time import monotonic

from _forks import end_at_once, fork_server
from _memory import make_cheap_to_fork

CAN_FORK = hasattr(os, "pidfd_open") and hasattr(os, "fork")
MOST_DESCRIPTORS = 32
"""Of one program."""
HERE = str(Path(__file__).parent)
ENVIRONMENT = dict(os.environ)
"""Before any test changes it: what libraries find when they are loaded."""


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
    if not CAN_FORK:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            cwd=cwd,
            env=env,
            start_new_session=start_new_session,
        )
    request = {
        "arguments": arguments,
        "cwd": os.fspath(cwd or os.getcwd()),
        "env": dict(os.environ if env is None else env),
        "start_new_session": start_new_session,
        "ends_whole": ends_whole,
        "forks": forks,
    }
    return Process(server(tuple(preload)), request, stdout, stderr)


def start_for_adoption(arguments, descriptors, *, preload=()):
    """Start a program with these descriptors, under their numbers, and our streams, but for the
    input. Its parent ends at once; whoever adopts orphans here is its parent. Returns its pid."""
    request = {
        "arguments": arguments,
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "start_new_session": False,
        "ends_whole": False,
        "forks": False,
        "descriptors": descriptors,
    }
    ours, theirs = socket.socketpair()
    theirs.settimeout(None)  # with a program's default timeout the server's end would not wait
    with ours:
        with theirs, open(os.devnull) as nothing:
            passed = [theirs.fileno(), nothing.fileno(), 1, 2, *descriptors]
            socket.send_fds(server(tuple(preload)), [b"."], passed)
        ours.sendall(json.dumps(request).encode() + b"\n")
        with ours.makefile("r") as answer:
            return int(answer.read())  # to its end: then the parent has ended


class Process:
    """What tests need of ``subprocess.Popen``."""

    def __init__(self, server, request, stdout, stderr):
        self.args = [sys.executable, *request["arguments"]]
        self.returncode = None
        self._readers = {}
        self._channel, theirs = socket.socketpair()
        theirs.settimeout(None)  # see start_for_adoption
        with theirs, open(os.devnull) as nothing:
            self.stdout, out = self._stream(stdout)
            self.stderr, err = (None, out) if stderr == STDOUT else self._stream(stderr)
            socket.send_fds(server, [b"."], [theirs.fileno(), nothing.fileno(), out, err])
        for descriptor, file in ((out, self.stdout), (err, self.stderr)):
            if file is not None:
                os.close(descriptor)  # the other end of a pipe of ours
        self._channel.sendall(json.dumps(request).encode() + b"\n")
        self._answers = self._channel.makefile("r")
        self.pid = int(self._answers.readline())

    @staticmethod
    def _stream(wanted):
        """The end to read from, or None, and the descriptor that the program gets."""
        if wanted != PIPE:
            return None, wanted if isinstance(wanted, int) else wanted.fileno()
        ours, theirs = os.pipe()
        return os.fdopen(ours, "r"), theirs

    def poll(self):
        """The exit code; None while the program runs."""
        if self.returncode is None and _is_readable(self._channel, 0):
            return self.wait()
        return self.returncode

    def wait(self, timeout=None):
        """The exit code; negative: the signal that ended the program."""
        if self.returncode is None:
            if not _is_readable(self._channel, timeout):
                raise TimeoutExpired(self.args, timeout)
            self.returncode = int(self._answers.readline())
            self._answers.close()
            self._channel.close()
        return self.returncode

    def communicate(self, timeout=None):
        """What the program prints from here to its end, as ``(stdout, stderr)``."""
        end = None if timeout is None else monotonic() + timeout
        if not self._readers:
            named = {"stdout": self.stdout, "stderr": self.stderr}
            self._readers = {name: _Reader(file) for name, file in named.items() if file}
            for reader in self._readers.values():
                reader.start()
        for reader in self._readers.values():
            reader.join(None if end is None else max(0, end - monotonic()))
            if reader.is_alive():
                raise TimeoutExpired(self.args, timeout)
        self.wait(None if end is None else max(0, end - monotonic()))
        self._close()
        texts = {name: reader.text for name, reader in self._readers.items()}
        return texts.get("stdout"), texts.get("stderr")

    def send_signal(self, number):
        """Send a signal, unless the program has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self):
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is not None:
            self.kill()  # a test that fails does not wait for the program, too
        for reader in self._readers.values():
            reader.join()
        self._close()
        self.wait()

    def _close(self):
        for file in (self.stdout, self.stderr):
            if file is not None:
                file.close()


class _Reader(threading.Thread):
    """Reads a stream to its end."""

    def __init__(self, file):
        super().__init__(daemon=True)
        self.file = file
        self.text = ""

    def run(self):
        self.text = self.file.read()


def _is_readable(channel, timeout):
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        return bool(selector.select(timeout))


# -- the process that forks ------------------------------------------------------------------------


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
    code = f"import sys; sys.path.insert(0, {HERE!r}); import _warm; exec(_warm.serve())"
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


def _keep_operators():
    """Let torch's operators end with a program: at its exit torch would take each out of its tables
    first."""
    for finalizer in _finalizers():
        if getattr(finalizer.peek()[1], "__module__", None) == "torch.library":
            finalizer.atexit = False


def _finalizers():
    """Those that Python would call at the end of this process."""
    return list(weakref.finalize._registry)


def serve():
    """Fork a program for each request. Returns in each of them, with the code that it is to run as
    ``__main__``.
    """
    atexit.register(_leave_modules)  # the last of all: what comes later is called first
    _import("numpy", "torch", "torchvision")
    sys.path.remove(HERE)
    return _serve(socket.socket(fileno=int(sys.argv[1])))


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
    # took 0.9 of the 1.3 s of CPU time of an empty one.
    gc.collect()
    gc.freeze()
    _keep_operators()
    make_cheap_to_fork()


def _serve(control):
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:  # the descriptor of a process that has ended
                    selector.unregister(key.fd)
                    _report_end(key.fd, *key.data)
                    continue
                _, descriptors, _, _ = socket.recv_fds(control, 1, MOST_DESCRIPTORS)
                if not descriptors:
                    end_at_once()  # the tests have ended
                channel = socket.socket(fileno=descriptors[0])
                with channel.makefile("r") as lines:
                    request = json.loads(lines.readline())
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: OpenBLAS's thread
                    pid = os.fork()
                if pid == 0:
                    control.close()
                    for other in selector.get_map().values():
                        if other.data is not None:
                            os.close(other.fd)
                            other.data[1].close()
                    selector.close()
                    if "preload" in request:
                        channel.close()
                        _import(*request["preload"])
                        return _serve(socket.socket(fileno=descriptors[1]))
                    if "descriptors" in request and (pid := os.fork()):
                        channel.sendall(b"%d\n" % pid)
                        end_at_once()
                    channel.close()
                    return _become(request, descriptors[1:])
                for descriptor in descriptors[1:]:
                    os.close(descriptor)
                if "preload" in request:
                    channel.close()
                    continue  # it ends with the tests, and so does this process
                if "descriptors" in request:
                    os.waitpid(pid, 0)
                    channel.close()
                    continue
                channel.sendall(b"%d\n" % pid)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, channel))


def _report_end(descriptor, pid, channel):
    os.close(descriptor)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        channel.sendall(b"%d\n" % code)
    except BrokenPipeError:
        pass  # nobody waits for it
    channel.close()


def _become(request, streams):
    """Make this process what ``python ARGUMENTS`` starts."""
    import numpy
    import torch

    numbers = [0, 1, 2, *request.get("descriptors", ())]
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
    standard = {*sys.stdlib_module_names, "__main__", __name__}
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
    while True:
        first, *arguments = arguments
        if first == "-u":
            sys.stdout.reconfigure(write_through=True)
        elif first == "-W":
            action, _, message = arguments[0].partition(":")
            warnings.filterwarnings(action, message)
            sys.warnoptions.append(arguments.pop(0))
        else:
            break
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
    main["__file__"] = os.path.abspath(first)
    return compile(Path(first).read_bytes(), main["__file__"], "exec")


# -- the processes that a program starts -----------------------------------------------------------


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
