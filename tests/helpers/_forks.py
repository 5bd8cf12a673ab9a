"""What a forked process finds."""

import os
import pickle
import warnings


def found_in_fork(function):
    """What ``function`` returns, or the error that it raises as text, in a fork of this process,
    which then ends without a word: what it has inherited is not for it to end."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: of threads, which are not there
        pid = os.fork()
    if not pid:
        try:
            found = function()
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        finally:
            os.write(writing, pickle.dumps(found))
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        content = pipe.read()
    os.waitpid(pid, 0)
    return pickle.loads(content)
