"""Functions of CUDA's runtime that torch has no call for.

They come from the library that torch itself uses, which is loaded wherever torch was built for
CUDA: its state belongs to the thread and to the contexts that torch has made.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import torch

from ...scopes import scope

_SUCCESS = 0  # cudaSuccess
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_NON_BLOCKING = 1  # cudaStreamNonBlocking: does not wait for the legacy default stream


@scope
def captures_unharmed() -> Iterator[None]:
    """Keep what this thread asks of CUDA from spoiling a graph that another thread captures.

    A capture in the default mode, "global", fails if any thread of the process locks pages,
    allocates or looks at an event meanwhile. Nothing that transfers do belongs to such a graph.
    The mode is put back: on the trainer's thread, captures of its own are to stay guarded.
    """
    library, mode = cuda_library(), ctypes.c_int(_RELAXED)
    is_relaxed = library is not None and (
        library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == _SUCCESS
    )
    try:
        yield
    finally:
        if is_relaxed:  # otherwise this would relax the thread for good
            library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def new_stream() -> int | None:
    """Return a new stream of the thread's current device, as a number; None where none can be made.

    It belongs to nobody else: ``torch.cuda.Stream()`` hands out 32 streams in turn, so that a
    user's 33rd is the first again. It is never destroyed: memory may be recorded for it until the
    process ends.
    """
    library, stream = cuda_library(), ctypes.c_void_p()
    if library is None:
        return None
    status = library.cudaStreamCreateWithFlags(ctypes.byref(stream), _NON_BLOCKING)
    return stream.value if status == _SUCCESS else None


def forget_error() -> None:
    """Forget the error of a call that was refused and can be done without. torch would find it
    after the next kernel that this thread launches, and raise it for that.
    """
    library = cuda_library()
    if library is not None:
        library.cudaGetLastError()


@functools.cache
def cuda_library() -> Any:
    """Return the process's own symbols, if the runtime's are among them; else None: torch for
    ROCm, without CUDA, or with a runtime of its own inside (as on Windows).
    """
    if torch.version.cuda is None:
        return None
    try:
        # PyDLL: the calls return at once, and releasing the GIL may cost milliseconds.
        library = ctypes.PyDLL(None)
        return library if library.cudaThreadExchangeStreamCaptureMode else None
    except (AttributeError, OSError, TypeError):  # no such symbol; no such thing as "own" symbols
        return None
