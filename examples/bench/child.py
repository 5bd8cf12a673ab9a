"""The process that measures one contender: ``python examples/bench/child.py JOB``.

JOB is JSON: ``table``, ``contender`` and ``settings``. The answer is written as
``bench.reporter`` says.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

# Python puts this folder there; its files are a package, whose place is the folder above.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.reporter import Reporter, end_with_the_parent
from bench.tables import Refused, load_table


def main() -> None:
    """Measure the contender named on the command line."""
    end_with_the_parent()
    job = json.loads(sys.argv[1])
    table = load_table(job["table"])
    with os.fdopen(os.dup(1), "w") as lines:
        os.dup2(2, 1)  # what peers print is not the answer
        reporter = Reporter(lines)
        try:
            contender = table.contender(job["contender"])
            answer = dict(table.measure(contender, job["settings"], reporter))
        except Refused as refused:
            answer = {"refused": str(refused)}
        reporter.write(answer=answer)
        # Peers leave threads and processes behind that would delay the exit, or crash in it.
        lines.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
