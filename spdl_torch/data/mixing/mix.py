"""The function that mixes datasets of any kind, and the weights that it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from torch.utils.data import IterableDataset

from ...checks import whole
from ...loader.sampling.sampler_chain import divides_itself
from ..sources import DataSource, as_source
from ..sources._base import seed_of
from ..sources._stream import is_map_style
from .mixed_source import IterableSource, MixedSource
from .mixture import Mixture
from .plan import Shares, Stop

if TYPE_CHECKING:
    Weights = Mapping[str, float] | Mapping[int, Mapping[str, float]]
    """One weight for each source, or such weights for each sample number from which they hold."""


def mix(
    sources: Mapping[str, Any],
    weights: Weights | None = None,
    *,
    seed: int = 0,
    stop: Stop = "first",
    num_samples: int | None = None,
    shuffle: bool = True,
) -> Mixture[Any] | MixedSource[Any]:
    """Return one dataset that takes its samples from several, in given proportions.

    Args:
        sources: datasets by name; the order of the dict does not affect the samples. If all are
            map-style, lists of ``spdl_torch.data.sources`` among them, the result is a
            :class:`Mixture`: its ``sampler()`` goes into a loader, the mixture itself into a
            pipeline. If some are streams, iterable datasets among them, it is a
            :class:`MixedSource` for a pipeline.
        weights: a number for each source, of any sum; None = all equal. Or a schedule: a dict of
            such dicts by the number of the sample from which they apply:
            ``{0: {...}, 100_000: {...}}``. A mixture of map-style datasets counts samples over all
            epochs and ranks; other mixtures count them from the beginning of each epoch, in each
            rank's part.
        seed: the seed of the plan and of every source's order; the same on every rank.
        stop: the end of an epoch. ``"first"``: where the first source would begin again; ``"all"``:
            where the last one would, after all the others have; ``"never"``: after ``num_samples``,
            or not at all.
        num_samples: the length of an epoch, with ``stop="never"``: required for a :class:`Mixture`,
            refused elsewhere.
        shuffle: shuffle each source by its own seed; False = samples in the sources' own order. A
            :class:`Mixture` of a ``ListSource`` that is itself shuffled then repeats it in the
            order of the epoch that is set there. Iterable datasets keep their order.

    Up to any position, the number of a source's samples is its share of the position, to within 2,
    and 2 more for each change of the weights.

    Raises: TypeError, ValueError: see the message.
    """
    if stop not in get_args(Stop):
        raise ValueError(f'mix: stop must be "first", "all" or "never", got {stop!r}.')
    seed = whole("mix", "seed", seed, -math.inf)
    # Sorted, so that the plan does not depend on the order of the dict.
    sources = dict(sorted(sources.items()))
    phases = shares_of(tuple(sources), weights)
    is_mixture = all(map(is_map_style, sources.values()))
    if is_mixture and stop == "never":
        where = (
            'mix: with stop="never" samplers and trainers need the length of an epoch (such as the '
            "global batch times the steps of the training)"
        )
        num_samples = whole(where, "num_samples", num_samples)
    elif num_samples is not None:
        raise ValueError(
            f'mix: num_samples={num_samples!r} needs stop="never" and map-style datasets: the '
            "sources, or the loop, determine where another epoch ends. Leave it out."
        )
    if is_mixture:
        return Mixture(
            sources, phases, seed=seed, stop=stop, shuffle=shuffle, num_samples=num_samples
        )
    given = {name: _source(name, each, seed, shuffle) for name, each in sources.items()}
    return MixedSource(given, phases, seed=seed, stop=stop)


def _source(name: str, given: Any, seed: int, shuffle: bool) -> DataSource[Any]:
    if divides_itself(given):
        kind = type(given).__name__
        raise TypeError(
            f"mix: {name!r} is a {kind}, whose passes a mixture cannot resume. Mix the sources, "
            f"and make one {kind} of the mixture."
        )
    if isinstance(given, IterableDataset):
        return IterableSource(given, name)
    source = as_source(given)
    return source.shuffle(seed_of("order", seed, name)) if shuffle else source


def shares_of(names: Sequence[str], weights: Weights | None) -> tuple[Shares, ...]:
    """Return the phases of a mixture, the first one at sample 0. None = all sources equal.

    Raises: TypeError, ValueError: see the messages.
    """
    if weights is None:
        weights = dict.fromkeys(names, 1.0)
    is_schedule = any(isinstance(value, Mapping) for value in weights.values())
    schedule: Any = weights if is_schedule else {0: weights}
    firsts = sorted(whole("mix", "a key of a schedule", first, 0) for first in schedule)
    if firsts[0] != 0:
        raise ValueError(
            f"mix: a schedule must begin at sample 0, got one that begins at {firsts[0]}."
        )
    return tuple(Shares(first, _shares(names, schedule[first])) for first in firsts)


def _shares(names: Sequence[str], weights: Mapping[str, Any]) -> tuple[float, ...]:
    if odd := {*names} ^ weights.keys():
        raise ValueError(
            f"mix: weights must have a number for each source, {', '.join(names)}, and no other: "
            f"one of them has no {min(odd, key=str)!r}. Give 0 to leave a source out."
        )
    values = [float(weights[name]) for name in names]
    total = math.fsum(values)
    if not all(0 <= value < math.inf for value in values) or not total > 0:
        raise ValueError(
            "mix: weights must be finite numbers >= 0, and not all of them 0, got "
            f"{dict(weights)!r}."
        )
    return tuple(value / total for value in values)
