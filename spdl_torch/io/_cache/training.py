"""A name that the ranks of one training run on this machine share, however they were started.

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

import multiprocessing
import os
import sys
from typing import TYPE_CHECKING

from .hashing import hash_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_ADDRESS = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
_SLURM_STEP = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")


def training_name() -> str:
    """Return the name; a program that is not a rank has one of its own."""
    environ = os.environ
    address = [environ.get(name, "") for name in _ADDRESS]
    if "RANK" in environ and any(address[:-1]):
        return _name("address", *address)
    if _has_tasks(environ):
        return _name("slurm", *(environ.get(name, "") for name in _SLURM_STEP))
    is_child = multiprocessing.parent_process() is not None
    local_rank = environ.get("LOCAL_RANK", "")
    if not is_child and local_rank.isdecimal() and environ.get("MASTER_PORT"):
        return _own_name() if int(local_rank) == 0 else _process_name(os.getppid())
    if _has_group() or (is_child and environ.get("MASTER_PORT")):
        return _name("siblings", _process_name(os.getppid()), *address[1:3])
    return _own_name()


def _has_group() -> bool:
    """Return whether this process is in a group of torch.distributed with others."""
    torch = sys.modules.get("torch")  # sources are used without it
    if torch is None or not torch.distributed.is_available():
        return False
    distributed = torch.distributed
    return bool(distributed.is_initialized() and distributed.get_world_size() > 1)


def _has_tasks(environ: Mapping[str, str]) -> bool:
    """Return whether this is one of several tasks of a step, which are one program's ranks. A job's
    batch script has the job's variables too, but what it starts may be anything.
    """
    num_tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    return "SLURM_PROCID" in environ and num_tasks.isdecimal() and int(num_tasks) > 1


def _own_name() -> str:
    # Forked workers keep the name of their program, and share what they make. A fork that is not a
    # worker is a program of its own.
    if multiprocessing.parent_process() is None:
        return _process_name(os.getpid())
    return _first_name


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
    return f"{hash_of(*parts):016x}"


_first_name = _process_name(os.getpid())
