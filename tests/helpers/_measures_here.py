"""A ``run`` for ``run_bench`` that measures here, where a fresh process proves nothing more."""

import io
import json
import traceback

import torch
from bench.child_process import ChildFailure
from bench.reporter import Reporter
from bench.tables import Refused, load_table


def measure_here(program, argument, on_line, limit_seconds):
    """The answer of ``python examples/bench/child.py JOB``, and no memory."""
    job = json.loads(argument)
    table = load_table(job["table"])
    threads = torch.get_num_threads()
    try:
        contender = table.contender(job["contender"])
        answer = dict(table.measure(contender, job["settings"], Reporter(io.StringIO())))
    except Refused as refused:
        answer = {"refused": str(refused)}
    except Exception:
        raise ChildFailure(traceback.format_exc()) from None
    finally:
        torch.set_num_threads(threads)  # tables change it for their process
    return json.loads(json.dumps(answer)), None
