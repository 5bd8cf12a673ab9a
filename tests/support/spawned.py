"""``spawn`` without its imports: a new process is forked from one that has imported torch.

It is a child of the process that starts it like any other and has none of its memory, what is sent
to it is pickled, and it finds everything by name; but it does not spend 3 s on importing torch and
the package. Tests of what only a new interpreter can show name ``"spawn"`` itself. The fork servers
of this process can be started in the same way.
"""

from __future__ import annotations

import multiprocessing
import threading
from multiprocessing import resource_tracker, util
from multiprocessing.context import SpawnContext, SpawnProcess
from unittest.mock import patch

from support import warm

_one_at_a_time = threading.Lock()
start_python = util.spawnv_passfds


class ForkedSpawnProcess(SpawnProcess):
    """A process of ``context``."""

    @staticmethod
    def _Popen(process):
        from multiprocessing.popen_spawn_posix import Popen

        resource_tracker.ensure_running()  # it is started in the same way, and is not meant
        with _one_at_a_time, patch.object(util, "spawnv_passfds", warm.spawnv_passfds):
            return Popen(process)


class ForkedSpawnContext(SpawnContext):
    """``spawn`` by its name and by its ways."""

    Process = ForkedSpawnProcess


def context():
    """For ``multiprocessing_context``; where nothing can be forked, ``spawn`` itself."""
    return ForkedSpawnContext() if warm.CAN_FORK else multiprocessing.get_context("spawn")


def fork_the_fork_servers():
    """From here on the fork servers that this process starts are forked from the warm one, too."""
    if not warm.CAN_FORK:
        return

    def start_or_fork(path, arguments, descriptors):
        is_server = arguments[-1].startswith("from multiprocessing.forkserver ")
        return (warm.spawnv_passfds if is_server else start_python)(path, arguments, descriptors)

    util.spawnv_passfds = start_or_fork
