"""The ``measure`` of every table whose contenders are loaders: warm up, then one timed pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .passes import measure_pass

if TYPE_CHECKING:
    from collections.abc import Callable

    from .loaders import Work
    from .tables import BenchOptions, Contender


def samples_of(options: BenchOptions, per_second: float, batch_size: int) -> int:
    """Return the number of samples in a pass, in whole batches: ``--seconds`` at a rate, 4 batches
    with ``--smoke``."""
    if options.smoke:
        return 4 * batch_size
    return max(4, round(per_second * options.seconds / batch_size)) * batch_size


def measure_loader(
    contender: Contender, settings: dict[str, Any], make_work: Callable[..., Work]
) -> dict[str, float]:
    """Measure one pass; ``make_work(settings, num_samples, **arguments)`` gives the contender's
    :class:`Work`.

    One sample is loaded here, so that forked workers find imports done; then two batches for each
    worker warm up what is compiled or allocated once.
    """
    import torch

    torch.set_num_threads(1)  # every loader does its work on threads or processes of its own
    num_samples = settings["num_samples"]
    work = make_work(settings, num_samples, **contender.arguments)
    work.load_group([0])
    num_warm = min(num_samples, 2 * settings["batch_size"] * max(1, settings["num_workers"]))
    warm = make_work(settings, num_warm, **contender.arguments)
    measure_pass(contender.run(warm), num_warm, warm.size_of)
    batches = contender.run(work)
    return measure_pass(batches, num_samples, work.size_of, work.num_workers)
