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
    _check_arguments(sources, stop)
    seed = whole("mix", "seed", seed, -math.inf)
    # Sorted, so that the plan does not depend on the order of the dict.
    sources = dict(sorted(sources.items()))
    phases = shares_of(tuple(sources), weights)
    if all(map(is_map_style, sources.values())):
        num_samples = _checked_num_samples(num_samples, stop)
        return Mixture(
            sources, phases, seed=seed, stop=stop, shuffle=shuffle, num_samples=num_samples
        )
    if num_samples is not None:
        raise ValueError(
            f"mix: num_samples={num_samples!r} is for map-style datasets only: other mixtures end "
            "where their loop does. Leave it out."
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


def _check_arguments(sources: Any, stop: Any) -> None:
    if not isinstance(sources, Mapping) or not sources:
        raise TypeError(
            f"mix: sources must be a dict of at least one dataset by name, got {sources!r:.100}."
        )
    for name in sources:
        if not isinstance(name, str):
            raise TypeError(f"mix: the names of the sources must be text, got {name!r}.")
    if stop not in get_args(Stop):
        raise ValueError(f'mix: stop must be "first", "all" or "never", got {stop!r}.')


def _checked_num_samples(num_samples: Any, stop: Stop) -> int | None:
    if stop == "never":
        where = (
            'mix: with stop="never" samplers and trainers need the length of an epoch (such as the '
            "global batch times the steps of the training)"
        )
        return whole(where, "num_samples", num_samples)
    if num_samples is not None:
        raise ValueError(
            f'mix: num_samples={num_samples!r} needs stop="never"; with stop={stop!r} the sources '
            "determine where an epoch ends."
        )
    return None


def shares_of(names: Sequence[str], weights: Weights | None) -> tuple[Shares, ...]:
    """Return the phases of a mixture, the first one at sample 0. None = all sources equal.

    Raises: TypeError, ValueError: see the messages.
    """
    if weights is None:
        weights = dict.fromkeys(names, 1.0)
    if not isinstance(weights, Mapping) or not weights:
        raise TypeError(
            "mix: weights must be a dict of one number for each source, or a schedule, a dict of "
            f"such dicts by the sample number from which they hold, got {weights!r:.100}."
        )
    if not any(isinstance(value, Mapping) for value in weights.values()):
        return (Shares(0, _shares(names, weights, "weights")),)
    for first in weights:
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ValueError(
                f"mix: the keys of a schedule must be numbers of samples >= 0, got {first!r}."
            )
    if 0 not in weights:
        raise ValueError(
            f"mix: a schedule must begin at sample 0, got one that begins at {min(weights)}."
        )
    schedule: Any = weights
    return tuple(
        Shares(first, _shares(names, schedule[first], f"weights[{first}]"))
        for first in sorted(schedule)
    )


def _shares(names: Sequence[str], weights: Any, where: str) -> tuple[float, ...]:
    if not isinstance(weights, Mapping):
        raise TypeError(
            f"mix: {where} must be a dict of one number for each source, got {weights!r:.100}."
        )
    unknown = [name for name in weights if name not in names]
    if unknown:
        raise ValueError(
            f"mix: {where} names {unknown[0]!r}, which is not a source. The sources are "
            f"{', '.join(map(repr, names))}."
        )
    missing = [name for name in names if name not in weights]
    if missing:
        raise ValueError(
            f"mix: {where} has no weight for the source {missing[0]!r}. Give 0 to leave it out."
        )
    values = [_weight(name, weights[name], where) for name in names]
    total = math.fsum(values)
    if not total > 0:
        raise ValueError(f"mix: {where} must have a number above 0, got {dict(weights)!r}.")
    return tuple(value / total for value in values)


def _weight(name: str, value: Any, where: str) -> float:
    try:
        weight = float(value)
    except (TypeError, ValueError):
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise ValueError(f"mix: {where}[{name!r}] must be a finite number >= 0, got {value!r}.")
    return weight
