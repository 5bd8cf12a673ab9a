"""Do the job of the demo in a child process."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

from ..measuring.child_process import answers_of
from .jobs import Environment, Measurement, decode_answer, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from .jobs import Comparison


def run_job(
    job: Comparison, on_line: Callable[[dict[str, Any]], None]
) -> Generator[tuple[Environment | Measurement, float | None]]:
    """Do ``job`` in a fresh process; yield its answers as they come, each with the peak bytes of
    the process tree since the one before.

    Otherwise as :func:`~spdl_torch.measuring.child_process.answers_of`.
    """
    argument = json.dumps(encode(job))
    with contextlib.closing(answers_of(f"{__package__}.child", argument, on_line)) as answers:
        for answer, peak in answers:
            yield decode_answer(answer), peak
