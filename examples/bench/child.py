"""The process that measures one contender: ``python examples/bench/child.py JOB``.

JOB is JSON: ``table``, ``contender`` and ``settings``. It writes the values, by metric, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

# Python puts this folder there; its files are a package, whose place is the folder above.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.tables import load_table


def main() -> None:
    """Measure the contender named on the command line."""
    end_with_the_parent()
    job = json.loads(sys.argv[1])
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)  # what peers print is not the answer
        table = load_table(job["table"])
        values = table.measure(table.contender(job["contender"]), job["settings"])
        json.dump(dict(values), answer)
    # Peers leave threads and processes behind that would delay the exit, or crash in it.
    sys.stderr.flush()
    os._exit(0)


def end_with_the_parent() -> None:
    """Kill this process and its workers when its parent is gone, even by ``kill -9``: its standard
    input is a pipe that the parent never writes to. Started by hand it leads no session, and this
    does nothing.
    """
    if hasattr(os, "getsid") and os.getsid(0) == os.getpid():
        threading.Thread(target=_wait_and_kill, name="lifeline", daemon=True).start()


def _wait_and_kill() -> None:
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
