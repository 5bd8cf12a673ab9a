"""Scanner's parameters, and their equivalents here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ..errors import UnsupportedOptionError

_MANUAL = {
    "work_packet_size": "Items go through the stages one by one; those that belong together are "
    "put together by PipelineBuilder.aggregate(n), or by a DataLoader's batch_size",
    "io_packet_size": "A source hands out items one by one. Let it yield larger ones and pass them "
    "through disaggregate() for few large reads",
    "cpu_pool": "Memory comes from torch, which has no pool to be sized for the CPU",
    "gpu_pool": "Memory comes from torch's caching allocator: "
    "torch.cuda.set_per_process_memory_fraction()",
    "pipeline_instances_per_node": "Stages have threads of their own: manual(decode=8), or "
    "manual(num_workers=8) for a DataLoader",
    "load_sparsity_threshold": "Which frames are read follows from those asked for: "
    "spdl_torch.io.load_clip",
    "queue_size_per_pipeline": "Use buffer_size=, by stage or for all of them",
}

_ESTIMATE = {
    "max_memory_util": "Use memory_util=",
    "total_memory": "Use memory_bytes=, a number of bytes",
    "work_io_ratio": "There are no packets here: items go through the stages one by one",
    "queue_size_per_pipeline": "How much room each queue gets is what is estimated",
}

_KNOWN = {"manual": _MANUAL, "estimate": _ESTIMATE}


def refuse_scanners(
    method: Literal["manual", "estimate"], given: Mapping[str, Any], first: object, *others: object
) -> None:
    """Refuse parameters of Scanner's ``PerfParams`` for which ours has another way.

    given: keywords that are not our own; first: our positional argument; others: further ones.
    Raises: TypeError, UnsupportedOptionError.
    """
    for name in given:
        if name in _KNOWN[method]:
            raise UnsupportedOptionError(
                f"PerfParams.{method}: {name} is a parameter of Scanner's that means nothing here. "
                f"{_KNOWN[method][name]}."
            )
    if method == "estimate":
        if given:
            raise TypeError(f"PerfParams.estimate: unknown argument {next(iter(given))!r}.")
        if first is None:
            raise TypeError(
                "PerfParams.estimate: target must be what is to run: a dataset, a DataLoader or a "
                "PipelineBuilder, got nothing. Scanner's is asked when a graph runs; this one "
                "looks at the samples now: estimate(dataset) or estimate(builder)."
            )
    elif others or not (first is None or isinstance(first, Mapping)):
        given_here = ", ".join(map(repr, (first, *others)))
        raise TypeError(
            "PerfParams.manual: stages must be one mapping of concurrencies by stage, got "
            f"{given_here}. For Scanner's packet sizes there is PipelineBuilder.aggregate(n)."
        )
