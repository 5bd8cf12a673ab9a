"""Where a cache is: in a folder on disk, or in memory that the processes of a run share.

In memory it stands in a folder of this user alone. Anybody can make names in /dev/shm: where
another user has made this one, the next is tried, in all processes in the same order. The folder of
a cache is removed by the last process that holds it at its exit or, after a kill, by the next
program that makes a cache.

Ranks of one training run share a name, however they were started:

==================  =====================================  ======================================
started by          recognised by                          name
==================  =====================================  ======================================
torchrun, etc.      RANK and the address of rank 0         the address
srun                a Slurm step with more than one task   job and step
Lightning           the ranks after the first one of a     the first rank's own: it starts the
                    machine have LOCAL_RANK and no RANK    others with the same program
multiprocessing     an address, or torch.distributed is    the parent, and the address
and others          initialised
nobody              none of these                          the program's own
==================  =====================================  ======================================

Lightning's first rank gets its variables only when it starts the others, often after its datasets
were made. So it uses its own name before and after, and its children use their parent's.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
import tempfile
from typing import Any

from ...checks import check_bytes
from ...handlers import unless_of_handler
from ...locks import SharedCounter
from ...machine.limits import Limits
from . import folders
from .store import Store

_SHARED_MEMORY = "/dev/shm"
_NUM_ROOTS = 100
"""The names that are tried."""

_ADDRESS = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
_SLURM_STEP = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")

_numbers = SharedCounter()


def open_store(
    cache: Any, dataset: str, identity: str, *, max_bytes: int | None, who: str
) -> Store:
    """Return the store in ``"memory"`` or in a folder, for the samples of one identity, which is
    one of a dataset's: its version and transforms.

    It is off where no folder can be made in memory.

    Raises: TypeError, ValueError: the place or the limit does not fit, or others could have written
        there; OSError: the given folder cannot be made.
    """
    check_bytes(who, max_bytes)
    if not isinstance(cache, str | os.PathLike):
        raise TypeError(f'{who}: cache must be "memory" or the path of a folder, got {cache!r}.')
    if not folders.HAS_LOCKS:
        return Store(os.fspath(cache), why_off="this system has no fcntl.lockf")
    name = f"{folders.hash_of('cache 2', dataset):016x}-{folders.hash_of(identity):016x}"
    if cache != "memory":
        folder = os.path.join(os.path.abspath(os.fspath(cache)), name)
        alive = folders.hold(folder)
        return Store(folder, max_bytes=max_bytes, alive=alive)
    try:
        # The ranks of a training run make the same caches in the same order.
        folder = memory_folder(f"{training_name()}-{next(_numbers)}-{name}")
        limit = memory_limit() if max_bytes is None else max_bytes
    except unless_of_handler(OSError) as error:
        return Store("memory", why_off=str(error))
    return Store(folder, max_bytes=limit, is_shared=max_bytes is None)


def memory_folder(name: str) -> str:
    """Return the folder of a name in shared memory, made and held until this process ends.

    Processes that give the same name share it. Where there is no /dev/shm, it is on disk, among the
    temporary files.

    Raises: UnsafePlaceError: others have taken all its names; OSError: it cannot be made.
    """
    root = _root()
    for entry in os.scandir(root):
        folders.remove_unused(entry.path)
    folder = os.path.join(root, name)
    atexit.register(_leave, folder, folders.hold(folder), os.getpid())
    return folder


def _leave(folder: str, file: int, pid: int) -> None:
    """Remove the folder if no other process holds it. Forked children leave that to their
    parent.
    """
    if pid == os.getpid():
        folders.remove_if_alone(folder, file)


def memory_limit() -> int | None:
    """Return the limit on all of this user's caches in memory together: half of the memory that is
    free or that they hold; None = unknown.

    In a container, its limit counts: what is in memory is charged to it, and beyond its limit the
    system kills the training.
    """
    free = Limits.of_this_machine().memory_bytes
    return None if free is None else (free + folders.bytes_taken_in(_root())) // 2


def _root() -> str:
    """Return the folder of all caches of this user, made if it is not there.

    Raises: UnsafePlaceError: others have taken all its names; OSError.
    """
    place = _SHARED_MEMORY if os.path.isdir(_SHARED_MEMORY) else tempfile.gettempdir()
    root = name = os.path.join(place, f"spdl_torch-cache-{os.geteuid()}")
    for number in range(1, _NUM_ROOTS):
        with contextlib.suppress(folders.UnsafePlaceError):
            return folders.own_folder(root)
        root = f"{name}-{number}"
    return folders.own_folder(root)  # the last one: its error counts


def training_name() -> str:
    """Return the name that ranks share; a program that is not a rank has one of its own."""
    environ = os.environ
    address = [environ.get(name, "") for name in _ADDRESS]
    if "RANK" in environ and any(address[:-1]):
        return _name("address", *address)
    # A job's batch script has the job's variables too, but what it starts may be anything.
    num_tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    if "SLURM_PROCID" in environ and num_tasks.isdecimal() and int(num_tasks) > 1:
        return _name("slurm", *(environ.get(name, "") for name in _SLURM_STEP))
    is_child = multiprocessing.parent_process() is not None
    local_rank = environ.get("LOCAL_RANK", "")
    if not is_child and local_rank.isdecimal() and environ.get("MASTER_PORT"):
        return _process_name(os.getpid() if int(local_rank) == 0 else os.getppid())
    if _has_group() or (is_child and environ.get("MASTER_PORT")):
        return _name("siblings", _process_name(os.getppid()), *address[1:3])
    # Forked workers keep the name of their program, and share what they make. A fork that is not a
    # worker is a program of its own.
    return _first_name if is_child else _process_name(os.getpid())


def _has_group() -> bool:
    """Return whether this process is in a group of torch.distributed with others."""
    torch = sys.modules.get("torch")  # sources are used without it
    if torch is None or not torch.distributed.is_available():
        return False
    distributed = torch.distributed
    return bool(distributed.is_initialized() and distributed.get_world_size() > 1)


def _process_name(pid: int) -> str:
    """Return a name that no other process has had since the machine started, where /proc says when
    a process began; elsewhere, the system may reuse its id.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name of the program, in parentheses, may contain anything.
            began = file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        began = "0"
    return f"{pid}-{began}"


def _name(*parts: str) -> str:
    return f"{folders.hash_of(*parts):016x}"


_first_name = _process_name(os.getpid())
