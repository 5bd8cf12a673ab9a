"""What to do about a stage that holds training back, and the gain to expect.

The advice never claims more than the :mod:`model`: where that knows what more workers would give,
it decides; elsewhere the free cores are the bound.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from .causes import Cause
from .model import THE_LOADER, THE_LOOP, Question, limiting, predict

if TYPE_CHECKING:
    from ...engine.statistics import PipelineStats
    from .causes import Reading

CACHED = " (cached(dataset, transform=what is random in it))"
AT_ONCE = " (whole batches in one call by __getitems__)"
AT_ONCE_OR_CACHED = f"{AT_ONCE[:-1]}, or{CACHED.replace('(', '', 1)}"
"""The ways to less work for a sample of a dataset with a length."""

Trait: TypeAlias = Literal[
    "a stream", "no length", "one by one", "torchvision's folder", "persistent workers"
]
"""What is known of a loader besides its figures, where advice depends on it. ``one by one``: each
sample takes its own call."""

_SHORT_SAMPLE_SECONDS = 50e-6
_ENOUGH_SAMPLES = 1_000

_IDLE_CONSUMER = 0.95
"""Share of waiting above which the consumer works too little to predict its speed."""
_MOST_AT_ONCE = 4
"""Factor of concurrency beyond which a stage may behave differently: measure again there."""
_WORTH_IT = 0.05
"""The gain below which no change is advised: that much is noise."""
_THE_CORES = "the cores"
_NOTICED = 0.05
"""The share of waiting that is left, from which what it is for is named as the next limit."""

_SWITCH_OFF = (
    " This Python can run without its GIL, which an extension module or PYTHON_GIL=1 has switched "
    "on: with PYTHON_GIL=0 it stays off."
)


class Ceiling(NamedTuple):
    """The gain that the rest of the program allows, however fast the stage gets."""

    gain: float
    """0.45 = 45 %; infinite where nothing else limits it."""
    limit: str = ""
    """What limits the speed then; "" = the training loop, which no longer waits."""

    def at_most(self, gain: float, limit: str) -> Ceiling:
        """Return the lower of the two."""
        return Ceiling(gain, limit) if gain < self.gain else self


Advice = tuple[str, Ceiling]
"""What to do, and the gain."""


def without_waits(waits: float, limit: str = "", others: float = 0.0) -> Ceiling:
    """Return the gain without these waits; ``others``: those that stay, for this limit."""
    gain = 1 / (1 - waits) - 1 if waits < _IDLE_CONSUMER else math.inf
    return Ceiling(gain, limit if others >= _NOTICED else "")


def without_any_waits(reading: Reading) -> Ceiling:
    """Return the gain if the consumer never waited."""
    return without_waits(reading.waits)


def without_start(reading: Reading) -> Ceiling:
    """Return the gain if it waited for its sampler alone."""
    waits = max(0.0, reading.waits - reading.sampling)
    return without_waits(waits, "the sampler", reading.sampling)


def fitted(action: str, stage: str | None, traits: Collection[Trait]) -> str:
    """Return an action that works for a loader with these traits. ``stage``: the bottleneck."""
    if "a stream" in traits or "no length" in traits:  # a cache is by index, below the length
        at_once = "" if "a stream" in traits else AT_ONCE
        action = action.replace(AT_ONCE_OR_CACHED, at_once).replace(CACHED, "")
    if "persistent workers" in traits:
        action = action.replace(" or persistent_workers=True", "")
    if stage == "fetch" and "torchvision's folder" in traits:
        action += " First import ImageFolder from spdl_torch: it makes the same samples, faster."
    return action


def on_short_samples(
    stats: PipelineStats, stage: str | None, traits: Collection[Trait]
) -> tuple[str, ...]:
    """Return the remark on samples that are made in no time."""
    if stage != "fetch" or "one by one" not in traits:
        return ()
    fetch = next(each.tasks for each in stats.stages if each.name == stage)
    num_good = fetch.num_tasks - fetch.num_failures
    if num_good < _ENOUGH_SAMPLES or fetch.ave_time >= _SHORT_SAMPLE_SECONDS:
        return ()
    return (
        f"A sample takes {fetch.ave_time * 1e6:.1f} µs, much of it for the calls that every sample "
        "makes. If the dataset has __getitems__(indices), which returns the list of a batch's "
        "samples, they are made in one call: index the data once with all of them.",
    )


def advise(reading: Reading, cause: Cause) -> Advice:
    """Return what to do about the bottleneck, a stage."""
    asked = _Asked(reading, cause)
    if cause is Cause.GIL:
        return _against_gil(asked)
    return _perhaps_against_gil(asked) if reading.may_wait_for_gil else _with_more(asked)


class _Asked(NamedTuple):
    """A stage that holds training back, and the words for it."""

    reading: Reading
    cause: Cause

    @property
    def ceiling(self) -> Ceiling:
        """The gain if the consumer never waited, or as much of it as its own work in the loader and
        the stages other than the bottleneck allow."""
        reading = self.reading
        if self.cause is Cause.GIL:  # what the loop does itself may be waits for it, too
            ceiling = without_any_waits(reading)
        else:
            left, limit = max((reading.sampling, "the sampler"), (reading.own_work, THE_LOADER))
            ceiling = without_waits(reading.waits_for_others, limit, left)
        name = reading.bottleneck.name
        changed = reading.pooled if name in reading.pooled else (name,)
        others = [each for each in reading.stages if each.name not in changed]
        if not others:
            return ceiling
        busiest = max(others, key=lambda each: each.busy_ratio)
        return ceiling.at_most(1 / max(busiest.busy_ratio, 0.01) - 1, f"stage {busiest.name!r}")

    @property
    def within_cores(self) -> Ceiling:
        """The same, once all cores are in use."""
        return self.ceiling.at_most(self.free_cores, _THE_CORES)

    @property
    def threads(self) -> int:
        """The number of threads besides the trainer's."""
        return 0 if self.reading.is_inline else self.reading.load.threads

    @property
    def crew(self) -> str:
        """The word for those that work."""
        return "workers" if self.reading.is_of_workers else "threads"

    @property
    def cores_used(self) -> float:
        """The number of cores in use, by the stage's threads alone where the rest is unknown."""
        load, used = self.reading.load, self.reading.probes.cores_used
        return load.cores + (load.helpers or 0.0) if used is None else used

    @property
    def free_cores(self) -> float:
        """The gain once all cores are in use, if every batch takes as much of them as now."""
        num_cores = self.reading.probes.num_cores
        if num_cores is None or self.cores_used <= 0:
            return math.inf
        return max(0.0, num_cores / self.cores_used - 1)

    @property
    def collates(self) -> bool:
        """Whether it is what a loader's workers do with the samples of a batch, once they have
        them."""
        reading = self.reading
        return reading.is_of_workers and reading.bottleneck is not reading.stages[0]

    @property
    def less_work(self) -> str:
        """What would make an item cheaper."""
        reading = self.reading
        if not reading.is_of_workers:
            return "less work for each item"
        if self.collates:  # neither a cache of samples nor reading them together makes it shorter
            return "less work for each batch (in collate_fn)"
        calls = reading.stages[0].tasks.num_tasks
        is_batch = calls <= 2 * ((reading.num_delivered or 0) + reading.load.threads)
        return f"less work for each item{CACHED if is_batch else AT_ONCE_OR_CACHED}"

    @property
    def in_few_calls(self) -> str:
        """What leaves the GIL to others."""
        calls = "Do its work in few calls that release the GIL"
        return calls if self.collates else f"{calls}, best a batch at a time"

    @property
    def without_gil(self) -> str:
        """What does, or needs no GIL of theirs."""
        own = self.reading.is_of_workers
        place = 'in processes (isolation="process")' if own else "on a process pool (executor=)"
        return f"{self.in_few_calls}, or run it {place}."

    def with_settings(self, question: Question) -> Ceiling | None:
        """Return the gain with other settings; None = the model does not know."""
        found = predict(question, self.reading, self.cause, None)
        if found.gain is None:
            return None
        limit = self.ceiling.limit if found.limit == THE_LOOP else found.limit
        return self.ceiling.at_most(found.gain, limit)


def _against_gil(asked: _Asked) -> Advice:
    processes, probes = _of_processes(asked), asked.reading.probes
    is_worth_it = processes.gain >= _WORTH_IT
    action = asked.without_gil
    if not is_worth_it:
        why = limiting(processes.limit or THE_LOOP)
        if processes.limit == _THE_CORES:
            why = f"{asked.cores_used:.1f} of the {probes.num_cores:g} cores are in use"
        action = f"{asked.in_few_calls}. Processes would not help either: {why}."
    action = f"More {asked.crew} will not help. {action}"
    action += _SWITCH_OFF if probes.could_go_without_gil else ""
    return action, processes if is_worth_it else asked.ceiling


def _of_processes(asked: _Asked) -> Ceiling:
    """Return the gain from a separate GIL for each worker, as far as it is known."""
    found = None
    if asked.reading.is_of_workers:
        found = asked.with_settings(Question(processes=max(2, asked.threads)))
    return found or asked.within_cores


def _perhaps_against_gil(asked: _Asked) -> Advice:
    reading = asked.reading
    action = (
        f"Its {asked.threads} {asked.crew} use {reading.load.cores:.1f} cores together, as threads "
        f"do that take the GIL in turns; then more will not help. {asked.without_gil}"
    )
    if reading.lacks_gil_probe:
        action += " Load for a few seconds to be sure."
    return action, asked.within_cores


def _with_more(asked: _Asked) -> Advice:
    """Return the advice to add threads, or to give them less work where more would not help."""
    threads = max(1, asked.threads)
    wanted = math.ceil(threads * min(1 + asked.ceiling.gain, _MOST_AT_ONCE))
    found = asked.with_settings(Question(num_workers=wanted))
    if found is not None:
        if found.gain < _WORTH_IT:
            return _with_less_work(asked, found.limit or THE_LOOP)
        return _raise(asked, min(wanted, math.ceil(threads * (1 + found.gain))), wanted), found
    has_none = asked.cause is Cause.CPU or asked.reading.others_have_cores
    number = int(min(wanted, _most_useful(asked)))
    if has_none or number <= asked.threads or asked.free_cores < _WORTH_IT:
        return _with_less_work(asked, _THE_CORES)
    most = asked.within_cores.at_most(number / threads - 1, f"the {asked.crew}")
    return _raise(asked, number, wanted), most


def _most_useful(asked: _Asked) -> float:
    """Return the number of threads above which there are no cores for more."""
    num_cores = asked.reading.probes.num_cores
    if asked.cause is Cause.IO or num_cores is None:
        return math.inf  # threads that wait for storage use no core
    return max(num_cores, math.ceil(num_cores / max(0.01, asked.reading.load.computing)))


def _raise(asked: _Asked, number: int, wanted: int) -> str:
    reading, num_cores = asked.reading, asked.reading.probes.num_cores
    knob = "num_workers" if reading.is_of_workers else "its concurrency"
    action = f"Raise {knob} from {asked.threads} to about {number}"
    if asked.cause is Cause.IO:
        return f"{action}: its {asked.crew} use no core while they wait."
    if reading.may_hide_gil:
        elsewhere = "in processes" if reading.is_of_workers else "on a process pool (executor=)"
        action += f", {elsewhere} if the work holds the GIL"
    if num_cores is not None and wanted > num_cores and asked.cause is not Cause.UNKNOWN:
        action += f": that keeps the {num_cores:g} cores busy. For more, give it "
        return f"{action}{asked.less_work}."
    return f"{action}, as long as cores are idle."


def _with_less_work(asked: _Asked, limit: str) -> Advice:
    """Return the advice where more threads would not help, since ``limit`` is the limit."""
    num_cores, less, cause = asked.reading.probes.num_cores, asked.less_work, asked.cause
    used = f"{asked.cores_used:.1f} of the {num_cores or 0:g} cores"
    if limit != _THE_CORES:
        why = f": {limiting(limit)}. Give it {less}"
    elif asked.reading.others_have_cores and num_cores is not None:
        why = f": this training uses {used}, and other programs take the rest. End some of those, "
        why += f"or give it {less}"
    elif cause is Cause.CPU:
        why = f". Give it more cores, or {less}"
    elif num_cores is None:
        why = f". Give it {less}"
    elif cause is Cause.IO:
        why = f": {used} are in use. Let it wait less for storage, or give it {less}"
    elif cause is Cause.THREADS and asked.threads >= num_cores:
        why = f": they compute on all of the {num_cores:g} cores already. Give it {less}, or more "
        why += "cores"
    else:
        why = f": {used} are in use. Give it {less}, or more cores"
    return f"More {asked.crew} will not help{why}.", asked.ceiling
