"""How a loader resumes at the position in an epoch that a state says.

Map-style datasets: the order is drawn again, from the generators as they were when the epoch began,
and the samples that were handed out are skipped without loading them. This does not depend on the
number of threads, on the batch size or, with a sampler that deals samples out to ranks in turn, on
the number of ranks. Iterable datasets: every worker continues where it was.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DistributedSampler

from ...handlers import unless_of_handler
from ...scopes import scope
from ..rng.patches import drawn_from
from ..sampling.sampler_chain import (
    epoch_of,
    length_of,
    names_of,
    nested_samplers,
    num_ranks,
    unshared,
)
from .epoch import NUM_LAST, SamplerState, checksum_of, kinds_of, last_of
from .user_state import give_state, keeps_state, state_of

if TYPE_CHECKING:
    from .drawing import Drawing
    from .epoch import EpochStart
    from .saved_state import ResumeState


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators from which an epoch's order may be drawn, torch's global one first, or
    what stands for it where a dataset has a loader of its own."""
    found = [drawn_from()]
    samplers = nested_samplers(loader._index_sampler)
    for holder in (loader, *samplers):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not g for g in found):
            found.append(generator)
    return found


def stateful_sampler(index_sampler: Any) -> Any:
    """Return the outermost sampler that keeps its own state, if any. One that can begin anywhere
    (``start_at``) needs none: it is started at the position.
    """
    for sampler in nested_samplers(index_sampler):
        if callable(getattr(sampler, "start_at", None)):
            return None
        if keeps_state(sampler):
            return sampler
    return None


@dataclass(slots=True, eq=False, repr=False)
class Redrawn:
    """The generators of an epoch that begins."""

    states: list[torch.Tensor]
    """Their states from which the order is drawn, torch's global one first."""
    trainers: torch.Tensor
    """The state in which the trainer has the global one."""


@scope
def order_drawn_again(loader: Any, resume: ResumeState | None) -> Iterator[Redrawn]:
    """Let an epoch that begins draw the order of ``resume``, if given.

    torch's global generator is set to ``trainers`` afterwards: the trainer's code draws from it
    too. A generator that the user gave continues from here as it did then.
    """
    generators, position = generators_of(loader), loader._state.position
    redrawn, before = Redrawn([], torch.get_rng_state()), position.order
    is_within = resume is not None and not resume.finished
    try:
        if resume is not None:
            first = 0 if is_within else 1
            _set_states(generators[first:], resume.generators[first:])
            _restore_samplers(loader, resume)
        redrawn.states = [generator.get_state() for generator in generators]
        position.before_draws = None if is_within else redrawn.states
        yield redrawn
    except BaseException:
        # An epoch that did not begin: the next one draws what it would have.
        if position.before_draws is not None and position.order is before:
            draw_again_from(loader, position.before_draws)
        raise
    finally:
        position.before_draws = None
        if is_within:
            generators[0].set_state(redrawn.trainers)


def draw_again_from(loader: Any, states: list[torch.Tensor]) -> None:
    """Restore the generators to ``states``, taken before a draw."""
    for generator, state in zip(generators_of(loader), states, strict=True):
        generator.set_state(state)


def _restore_samplers(loader: Any, resume: ResumeState) -> None:
    if resume.drawn.sampler is not None:
        sampler = stateful_sampler(loader._index_sampler)
        if sampler is None:
            raise ValueError(
                "load_state_dict: sampler holds the state of a sampler that keeps one, but this "
                "loader's sampler does not. Make the loader as it was then."
            )
        give_state(sampler, resume.drawn.sampler, "sampler")
    for each in nested_samplers(loader._index_sampler):
        if callable(getattr(each, "start_at", None)) and not resume.finished:
            try:
                each.start_at(resume.num_samples)
            except ValueError as error:
                raise ValueError(f"load_state_dict: num_samples does not fit: {error}") from error


def drawing_of(
    index_sampler: Any, indices: Iterator[Any], resume: ResumeState | None
) -> Drawing | None:
    """Return the indices of the epoch, from ``resume`` on, of a sampler that keeps its own state;
    None = it keeps none."""
    sampler = stateful_sampler(index_sampler)
    if sampler is None:
        return None
    from .drawing import Drawing

    draw = partial(Drawing, sampler, indices, partial(iter, index_sampler))
    if resume is None or resume.finished or resume.drawn.sampler is None:
        return draw(length_of(index_sampler))
    drawn = resume.drawn
    if resume.order != kinds_of(drawn.pending):
        raise ValueError(
            "load_state_dict: pending: indices of a sampler with a state are of other types than "
            "when the state was saved: JSON makes lists of tuples. Save it by torch.save()."
        )
    return draw(drawn.sampler_left, pending=drawn.pending, restored=drawn.sampler)


def skipped(
    start: EpochStart, resume: ResumeState, indices: Iterator[Any]
) -> tuple[EpochStart, int]:
    """Skip the samples that were handed out. Return what the rest of the epoch begins with, and the
    number of this rank's samples that were skipped.

    Raises: ValueError: the state's position is not between two batches here, or the sampler gives
        other indices before it.
    """
    samplers, tells_order = list(nested_samplers(start.sampler)), start.last is not None
    if resume.drawn.sampler is not None or any(hasattr(s, "start_at") for s in samplers):
        return start._replace(first=resume.num_samples, last=() if tells_order else None), 0
    world = start.world
    target, rest = divmod(resume.num_samples, world)
    passed, last = 0, deque[Any](maxlen=NUM_LAST)
    while passed < target and not rest:
        try:
            index = next(indices)
        except StopIteration:
            break
        passed += start.count(index)
        last.append(unshared(index))
    if passed < target and not rest:
        raise ValueError(
            f"load_state_dict: num_samples: the state stands after {resume.num_samples} samples, "
            f"but the sampler ({type(samplers[-1]).__name__}) gives only {passed * world} in this "
            "epoch. Make the sampler and the dataset as they were then."
        )
    if passed != target or rest:
        raise ValueError(
            f"load_state_dict: num_samples: the state stands after {resume.num_samples} samples, "
            f"which is not between two batches of this loader with {world} rank(s). Keep the "
            "global batch, batch_size times ranks, as it was, and the dataset."
        )
    here = last_of(last, in_batches=start.in_batches)
    if tells_order and resume.order not in (None, checksum_of(here)):
        raise _other_order(samplers)
    return start._replace(last=here if tells_order else None), target


def tell_order(index_sampler: Any) -> bool:
    """Return whether the last indices say something new of the sampler's order. Not if there are
    several ranks, as any of them may resume the state; if the sampler begins at a position; or if
    it is torch's, whose order follows from a seed that every state has.
    """
    for each in nested_samplers(index_sampler):
        if hasattr(each, "start_at") or type(each) is DistributedSampler:
            return False
    return num_ranks(index_sampler) == 1


def _other_order(samplers: list[Any]) -> ValueError:
    """Return the error where a sampler does not give the indices that it gave."""
    return ValueError(
        f"load_state_dict: order: the sampler ({names_of(samplers[0])}) gives other indices than "
        "it gave before this position. In another order samples would be lost, or come twice. If "
        "nothing else was changed, it is in another epoch: call its set_epoch() between "
        "load_state_dict() and iter(); or it draws from what no state has, such as random, numpy "
        "or a generator that it makes: let it seed that by the number given to set_epoch(), draw "
        "from a torch.Generator that is its attribute generator, or have state_dict() and "
        "load_state_dict(state). Or another thread drew from torch's global generator when that "
        "epoch began: pass generator=."
    )


def before_first_epoch(loader: Any, generators: list[torch.Tensor]) -> ResumeState:
    """Return the state of a loader before its first epoch."""
    from .saved_state import ResumeState

    sampler = stateful_sampler(loader._index_sampler)
    return ResumeState(
        epoch=-1,
        epoch_seed=0,
        finished=True,
        sampler_epoch=epoch_of(loader._index_sampler),
        drawn=SamplerState(None if sampler is None else state_of(sampler)),
        generators=tuple(map(encoded, generators)),
    )


def encoded(state: torch.Tensor) -> str:
    """Return a generator's state as text."""
    return base64.b85encode(state.numpy().tobytes()).decode()


def _set_states(generators: list[torch.Generator], states: tuple[str, ...]) -> None:
    if len(generators) != len(states):
        raise ValueError(
            f"load_state_dict: generators: the state has {len(states)} generator(s), this loader "
            f"and its samplers have {len(generators)}. Pass generator= as it was then."
        )
    for number, (generator, text) in enumerate(zip(generators, states, strict=True)):
        try:
            content = bytearray(base64.b85decode(text))
            generator.set_state(torch.frombuffer(content, dtype=torch.uint8).clone())
        except unless_of_handler(ValueError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"load_state_dict: generators[{number}] is not a generator's state here: {error}."
            ) from error
