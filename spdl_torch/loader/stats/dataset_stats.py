"""The statistics that datasets keep of themselves, by name: ``{"cache/found": 20}``.

A dataset provides them by methods of its class. Those that every worker counts for itself, and that
are added up over threads and processes, are ``loading_counts()``. Those that follow from the loop's
position are ``progress_stats(epoch, num_given)``, asked of the trainer's dataset alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...objects.datasets import all_datasets

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def counting_datasets(dataset: Any) -> Iterator[Any]:
    """Yield the datasets in a dataset that count what they load, each once; in the same order in
    all copies of it."""
    seen: set[int] = set()
    for each in all_datasets(dataset):
        # Ask the class: an object that answers to any attribute name would seem to have it.
        if id(each) not in seen and hasattr(type(each), "loading_counts"):
            seen.add(id(each))
            yield each


def dataset_stats(
    dataset: Any, counts: Mapping[str, float], given: tuple[int, int] | None
) -> dict[str, float]:
    """Return the statistics of an epoch.

    counts: the sums of ``loading_counts()`` over all workers. given: the epoch, and the samples of
    it that the loop has had on all ranks; None = unknown.
    """
    stats = {name: count for name, count in counts.items() if not name.startswith("packing/")}
    room = counts.get("packing/room", 0)
    if room:
        stats["packing/waste"] = 1 - counts["packing/size"] / room
    # Only the outermost dataset knows what the sampler's numbers mean.
    if given is not None and hasattr(type(dataset), "progress_stats"):
        stats |= dataset.progress_stats(*given)
    return stats
