"""The identity of a stage, which hooks and queues are given."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageInfo:
    """The identity of a stage; prints ``0:1:decode[10]``."""

    pipeline_id: int
    """0 unless the caller gives another; it does not change from epoch to epoch."""
    stage_id: int
    """The stage's number in the pipeline: 0 is the source."""
    stage_name: str
    concurrency: int = 1

    def __str__(self) -> str:
        threads = f"[{self.concurrency}]" if self.concurrency > 1 else ""
        return f"{self.pipeline_id}:{self.stage_id}:{self.stage_name}{threads}"
