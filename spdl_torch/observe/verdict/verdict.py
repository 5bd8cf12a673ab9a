"""The verdict: what holds training back, why, and what to do. A pure function of a reading.

One rule decides, the first that holds, so that the sentence that names the cause and the one that
says what to do cannot contradict each other. It names nothing whose figure was not measured.
Thresholds on the waiting time are those of TensorFlow's input-pipeline analysis (5 and 20 % of the
step).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from ...machine.readings import Probes, has_gil
from ...shown_text import counted, percent, shown_seconds
from .advice import Ceiling, advise, without_any_waits, without_start, without_waits
from .causes import INPUT_BOUND, SHORT_SECONDS, Cause, Reading

if TYPE_CHECKING:
    from ...engine.statistics import PipelineStats

_HIGHLY_INPUT_BOUND = 0.20

_STEP_SLOWDOWN = 0.10
_FAILURES = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One finding with its consequence."""

    cause: Cause
    stage: str | None
    """The name of the bottleneck; None where it is not a stage."""
    wait_ratio: float
    """Share of the time in which the consumer waited for data, 0 to 1."""
    finding: str
    action: str
    gain: float
    """The gain in speed that the action gives, at most: 0.45 = 45 %; infinite where nothing known
    limits it. More workers do no more than the cores and the GIL let them; less work for each item
    may end all waiting."""
    remarks: tuple[str, ...] = ()
    """Further findings: failures, dropped items, pauses."""
    limit: str = ""
    """What limits the speed after that gain: ``the cores``, a stage; "" = the training loop, which
    no longer waits."""


class Rule(NamedTuple):
    """A cause, and when it is named. Texts have fields: ``{crew}``, ``{stage}``."""

    cause: Cause
    holds: Callable[[Reading], bool]
    why: str
    action: str = ""
    """"" = the advice for a stage gives it, and the gain."""
    gain: Callable[[Reading], Ceiling] = without_any_waits
    of: Literal["window", "waits", "stage"] = "waits"
    """Whether ``why`` is the whole finding, or says why training waits: whatever the stages do, or
    for the busiest of them."""


def _nothing(_: Reading) -> Ceiling:
    return Ceiling(0.0)


def _is_empty(r: Reading) -> bool:
    """Nothing was delivered in a window that says nothing else."""
    says_more = not r.is_too_short and r.waits >= INPUT_BOUND and not r.num_lost
    return r.num_delivered == 0 and not says_more


def _is_input_bound(r: Reading) -> bool:
    return r.waits >= INPUT_BOUND


def _slows_down(r: Reading) -> bool:
    return not _is_input_bound(r) and (r.probes.step_slowdown or 0.0) >= _STEP_SLOWDOWN


def _takes_the_gil(r: Reading) -> bool:
    """Its threads want the GIL most of the time, so it is seldom free for the training loop."""
    is_open = not _is_input_bound(r) and r.probes.step_slowdown is None
    return is_open and rule_of_waits(r).cause is Cause.GIL


def _is_for_sampler(r: Reading) -> bool:
    # What the loop does itself takes long, too, where it waits for a GIL that others have.
    return r.is_for_sampler and (r.has_spare_time or not r.is_gil_taken)


def _is_for_hand_over(r: Reading) -> bool:
    is_for_loader = r.is_for_loader and not r.is_gil_taken
    is_spare = r.has_spare_time and (r.is_for_loader or r.is_for_all_items)
    return is_for_loader or is_spare


def _is_crew_without_core(r: Reading) -> bool:
    return r.waits_for_core and not (r.is_for_sampler or r.is_for_loader)


_NOT_BOUND = "Training is not input-bound: it waits for data {waits} of the time"
_MORE_AHEAD = (
    "{more_room}Bring more shards at once with {more_workers}a larger ahead=. The next epoch reads "
    "from the disk what is kept."
)
_NO_STAGE = "no stage is short of {crew}; "

RULES = (
    Rule(Cause.UNKNOWN, lambda r: r.stats.elapsed <= 0,
         "There are no figures: nothing was loaded yet.", "Load for a while, and look again.",
         _nothing, "window"),
    Rule(Cause.UNKNOWN, _is_empty,
         "Nothing was delivered in {seconds}: {lost} of {calls} calls failed or gave nothing.",
         "Look at the source, the notes, and the first errors in the log of spdl_torch.",
         _nothing, "window"),
    Rule(Cause.SHORT, lambda r: r.is_too_short,
         "Training waited for data {waits} of {seconds}, which is too short to say why.",
         f"Load for {SHORT_SECONDS:g} seconds or more, and look again.", _nothing, "window"),
    Rule(Cause.INTERFERENCE, lambda r: _slows_down(r) and r.probes.own_gil,
         f"{_NOT_BOUND}, but its steps take {{slowdown}} longer than with cached batches.",
         "Use fewer workers: they take cores, or memory bandwidth, from the step.",
         lambda r: Ceiling(r.probes.step_slowdown or 0.0), "window"),
    Rule(Cause.INTERFERENCE, _slows_down,
         f"{_NOT_BOUND}, but its steps take {{slowdown}} longer than with cached batches.",
         "Use fewer threads, or ops that hold the GIL less (whole batches in one call).",
         lambda r: Ceiling(r.probes.step_slowdown or 0.0), "window"),
    Rule(Cause.INTERFERENCE, _takes_the_gil,
         f"{_NOT_BOUND}, but its own Python waits for the GIL, which stage {{stage}} takes.",
         "Compare the step with cached batches (headspace). If it is faster with them, load in "
         "{processes}, or by ops that hold the GIL less (whole batches in one call).",
         lambda _: Ceiling(math.inf), "window"),
    Rule(Cause.CONSUMER, lambda r: not _is_input_bound(r), f"{_NOT_BOUND}.",
         "Do nothing: a faster loader would not be noticed.", _nothing, "window"),

    Rule(Cause.UNKNOWN, lambda r: r.lacks_statistics,
         "the stages keep no statistics, so nothing tells why",
         "Leave stats=False out, and look again.", without_start),
    Rule(Cause.START, lambda r: not r.stages, f"{_NO_STAGE}the wait is the start of the pass",
         "Use longer epochs{or_persistent}.", without_start),
    Rule(Cause.DOWNLOAD, lambda r: r.waits_for_source and r.waits_for_shards,
         "the source waits for shards to be downloaded", _MORE_AHEAD),
    Rule(Cause.SOURCE, lambda r: r.waits_for_source,
         "the source is the bottleneck; every stage waits for it",
         "Make the source cheaper: let it yield paths or indices, and read in a stage.",
         without_start),
    Rule(Cause.CPU, lambda r: _is_crew_without_core(r) and r.others_have_cores,
         f"{_NO_STAGE}the workers wait for a core, which other programs have",
         "End other programs that take the cores, or use larger batches: a worker waits for a core "
         "once for each.", without_start),
    Rule(Cause.CPU, _is_crew_without_core, f"{_NO_STAGE}the workers wait for a core",
         "Use fewer workers, or larger batches: a worker waits for a core once for each.",
         without_start),
    Rule(Cause.SAMPLER, _is_for_sampler,
         "the sampler is the bottleneck, from which the loop itself draws",
         "Make the sampler cheaper: more workers will not help, as they do not draw from it. Find "
         "the order before training, or for many indices at once, and let the dataset do the "
         "reading.", lambda r: without_waits(r.sampling, "the dataset", r.waits_for_others)),
    Rule(Cause.HAND_OVER, lambda r: r.is_inline and r.has_spare_time,
         "most of it is what the loader itself does for every batch, however small",
         "Use larger batches: each takes the loop the same, whatever is in it."),
    Rule(Cause.HAND_OVER, lambda r: r.is_loader and _is_for_hand_over(r),
         f"{_NO_STAGE}the wait is for many small results to be handed over",
         "Use larger batches, or num_workers=0, with which none is handed over."),
    Rule(Cause.HAND_OVER, _is_for_hand_over,
         f"{_NO_STAGE}the wait is for many small results to be handed over",
         "Hand over more at once: aggregate items, or let each op do the work of several."),
    Rule(Cause.START, lambda r: r.has_spare_time,
         f"{_NO_STAGE}the wait is the start of the pass",
         "Use longer epochs{or_persistent}.", without_start),

    Rule(Cause.GIL, lambda r: r.is_gil_taken, ", and its {crew} wait for the GIL", of="stage"),
    Rule(Cause.CPU, lambda r: r.is_short_of_cores and r.others_have_cores,
         ", and its {crew} wait for a core, which other programs have", of="stage"),
    Rule(Cause.CPU, lambda r: r.is_short_of_cores, ", and its {crew} wait for a core", of="stage"),
    Rule(Cause.UNKNOWN, lambda r: r.may_wait_for_gil, ", and its {crew} may wait for the GIL",
         of="stage"),
    Rule(Cause.DOWNLOAD, lambda r: r.waits_for_storage and r.waits_for_shards,
         ", and it waits for shards to be downloaded", _MORE_AHEAD, of="stage"),
    Rule(Cause.IO, lambda r: r.waits_for_storage,
         ", and it waits for storage, a network or a lock", of="stage"),
    Rule(Cause.UNKNOWN, lambda r: r.load.waits, ", and it waits; for what was not measured",
         of="stage"),
    Rule(Cause.THREADS, lambda r: r.computes and r.load.is_done_by_helpers,
         ", and it computes all the time, on threads of its own", of="stage"),
    Rule(Cause.THREADS, lambda r: r.computes, ", and it computes all the time", of="stage"),
    Rule(Cause.UNKNOWN, lambda _: True, "", of="stage"),
)  # fmt: skip
"""The first that holds decides: the window says too little or training does not wait; what it waits
for is no stage; or its busiest stage is the bottleneck."""


def judge(
    stats: PipelineStats, probes: Probes | None = None, *, pooled: Sequence[str] = ()
) -> Verdict:
    """Name what holds training back.

    stats: the statistics of a window without the warm-up.
    probes: without them the cause is inferred from CPU time alone, less surely.
    pooled: stages that share threads, those of a loader's workers, which wait for the trainer's
        requests, not for a source; () = every stage has threads of its own, as in a pipeline.
    """
    probes = probes or Probes(switch_interval=sys.getswitchinterval(), own_gil=not has_gil())
    reading = Reading(stats, probes, pooled)
    rule = next(rule for rule in RULES if rule.holds(reading))
    words = _words(reading, rule)
    finding = rule.why.format_map(words)
    if rule.of == "stage":
        finding = f"stage {words['stage']} is the bottleneck{finding}"
    if rule.action:
        action, ceiling = rule.action.format_map(words), rule.gain(reading)
    else:
        action, ceiling = advise(reading, rule.cause)
    if rule.of != "window":
        nothing = "Nothing was delivered. " * (reading.num_delivered == 0)
        finding = f"{nothing}{how_input_bound(reading.waits)}: {finding}."
    is_measured = stats.elapsed > 0
    return Verdict(
        cause=rule.cause,
        stage=reading.bottleneck.name if rule.of == "stage" else None,
        wait_ratio=reading.waits if is_measured else 0.0,
        finding=finding,
        action=action,
        gain=ceiling.gain,
        remarks=tuple(_remarks(reading)) if is_measured else (),
        limit=ceiling.limit,
    )


def how_input_bound(waits: float) -> str:
    """Return what a finding says first: the share of the time that training waits for data, 0 to
    1."""
    if waits < INPUT_BOUND:
        return _NOT_BOUND.format(waits=percent(waits))
    level = "HIGHLY" if waits >= _HIGHLY_INPUT_BOUND else "moderately"
    return f"Training waits for data {percent(waits)} of the time ({level} input-bound)"


def rule_of_waits(reading: Reading) -> Rule:
    """Return the rule of what holds up a training that waits, however long the window is."""
    return next(rule for rule in RULES if rule.of != "window" and rule.holds(reading))


def _words(r: Reading, rule: Rule) -> dict[str, str]:
    """Return the words for the fields of a rule's texts."""
    of_workers = r.is_of_workers if rule.of == "stage" else r.is_loader
    num_removed = int(r.stats.counts.get("shards/removed", 0))
    room = f"Give max_bytes= more room: {counted(num_removed, 'shard')} made room for others, and "
    return {
        "crew": "workers" if of_workers else "threads",
        "stage": repr(r.bottleneck.name) if r.stages else "",
        "waits": percent(r.waits),
        "slowdown": percent(r.probes.step_slowdown or 0.0),
        "seconds": shown_seconds(r.stats.elapsed),
        "lost": str(r.num_lost),
        "calls": str(sum(stage.tasks.num_tasks for stage in r.stages)),
        "more_room": f"{room}may have to come again. " * (num_removed > 0),
        "more_workers": "more workers or, if shards are read in their order, " * r.is_loader,
        "processes": 'processes (isolation="process")' if r.is_loader else "a subprocess",
        "or_persistent": " or persistent_workers=True" * r.is_loader,
    }


def _remarks(reading: Reading) -> list[str]:
    remarks = []
    for stage in reading.stages:
        tasks = stage.tasks
        if tasks.num_failures:
            share = tasks.num_failures / tasks.num_tasks
            grave = ", more than the 5 % that should concern you" if share > _FAILURES else ""
            remarks.append(
                f"{stage.name}: {tasks.num_failures} of {tasks.num_tasks} tasks failed "
                f"({percent(share)}{grave})."
            )
        if stage.num_dropped:
            remarks.append(f"{stage.name}: the op dropped {stage.num_dropped} items (None).")
    collecting = reading.probes.gc_ratio or 0.0
    # Of a short window a single collection may be most.
    if collecting >= 0.01 and not reading.is_too_short:
        remarks.append(
            f"Garbage collection takes {percent(collecting)} of the time: call "
            "gc.freeze() before training."
        )
    return remarks
