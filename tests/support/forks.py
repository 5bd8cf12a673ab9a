"""Processes that are forked, and what they find."""

import os
import pickle
import traceback
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def end_at_once(status=0):
    """End this process as a crash does: nothing is flushed, nobody is waited for or told."""
    os._exit(status)


def fork(function):
    """The number of a fork of this process that calls ``function``, and then ends without a word:
    what it has inherited is not for it to end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: of threads, which are not there
        pid = os.fork()
    if not pid:
        try:
            function()
        except BaseException:
            traceback.print_exc()  # nothing above it in this process would
        finally:
            end_at_once()
    return pid


def found_in_fork(function):
    """The outcome of ``function`` in a fork of this process."""
    return found_in_forks(function)[0]


def found_in_forks(*functions):
    """The outcomes of functions, each in a fork of this process, all at once."""
    forks = [_forked(function) for function in functions]
    return [_found(pid, pipe) for pid, pipe in forks]


def found_in_new(function):
    """What ``function`` returns in a new process, in which nothing has loaded yet."""
    with ProcessPoolExecutor(1, mp_context=get_context("forkserver")) as pool:
        return pool.submit(function).result()


def _forked(function):
    reading, writing = os.pipe()
    pid = fork(lambda: os.write(writing, pickle.dumps(outcome(function))))
    os.close(writing)
    return pid, reading


def _found(pid, reading):
    with open(reading, "rb") as pipe:
        content = pipe.read()
    os.waitpid(pid, 0)
    return pickle.loads(content)


def outcome(function):
    """What ``function`` returns, or the error that it raises, as text."""
    try:
        return function()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def fork_server():
    """Python's own: it forks the children that this process asks it for."""
    from multiprocessing import forkserver  # not every process that forks has one

    return forkserver._forkserver
