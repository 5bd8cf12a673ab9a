"""A ``run`` for ``run_bench`` that measures here, where a fresh process proves nothing more."""

import json
import traceback

import torch
from bench.child_process import ChildFailure
from bench.tables import load_table


def measure_here(program, argument, limit_seconds):
    """The answer of ``python examples/bench/child.py JOB``, and no memory."""
    job = json.loads(argument)
    table = load_table(job["table"])
    threads = torch.get_num_threads()
    try:
        answer = dict(table.measure(table.contender(job["contender"]), job["settings"]))
    except Exception:
        raise ChildFailure(traceback.format_exc()) from None
    finally:
        torch.set_num_threads(threads)  # tables change it for their process
    return json.loads(json.dumps(answer)), 0.0
