"""The memory of the process that runs the tests, made cheap to fork.

A fork copies a page table's entry for each 4 KiB of the parent: with all that the tests import, 20
to 50 ms for each of the thousands of workers that they fork, a fifth of the suite's CPU time. Pages
of 2 MiB have one entry each; memory that nobody uses needs none.
"""

import ctypes
import platform
import re
import sys

_LARGE_PAGE = 2 * 2**20
_MADV_COLLAPSE = 25  # Linux 6.1: make large pages of these addresses now


def make_cheap_to_fork():
    """Give free memory back, and move the rest into large pages, where the system can."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "malloc_trim"):  # glibc's: it keeps what each thread has freed
        libc.malloc_trim(0)
    if _has_collapse():
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for address, num_bytes in _memory_of_its_own():
            libc.madvise(address, num_bytes, _MADV_COLLAPSE)  # or it stays as it is


def _has_collapse():
    version = re.match(r"(\d+)\.(\d+)", platform.release())
    return version is not None and tuple(map(int, version.groups())) >= (6, 1)


def _memory_of_its_own():
    """Yield the addresses and sizes of what this process alone writes to, its heap and arenas, as
    far as large pages fit."""
    with open("/proc/self/maps") as file:
        regions = [line.split() for line in file]
    for region in regions:
        addresses, rights, *_, last = region
        is_anonymous = len(region) == 5 or last == "[heap]"
        if rights != "rw-p" or not is_anonymous:
            continue
        begin, end = (int(address, 16) for address in addresses.split("-"))
        first = -(-begin // _LARGE_PAGE) * _LARGE_PAGE
        if end - first >= _LARGE_PAGE:
            yield first, (end - first) // _LARGE_PAGE * _LARGE_PAGE
