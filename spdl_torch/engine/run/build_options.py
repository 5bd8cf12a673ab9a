"""The options of a build, as they travel from those who take them to the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..definition.specs import check_max_failures

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..definition.specs import MaxFailures
    from ..hooks.stats_queue import StatsQueue
    from ..hooks.task_hooks import HookFactory
    from .tunable import Tuner


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """The options of ``PipelineBuilder.build``, which says what they mean."""

    num_threads: int | None = None
    max_failures: MaxFailures | None = None
    report_stats_interval: float | None = None
    queue_class: Callable[..., StatsQueue] | None = None
    task_hook_factory: HookFactory | None = None
    stage_id: int = 0
    stats: bool = True
    tuner: Tuner | None = None

    def __post_init__(self) -> None:
        check_max_failures(self.max_failures, "build")
