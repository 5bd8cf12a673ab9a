"""The tables and sentences that the demo ends with, for a plain terminal of 100 columns."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from ..named_tuples import NamedTuple
from ..shown_text import shown_rate, wrapped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Results = Mapping[str, Sequence["Measurement"]]
    """The rounds of each variant, by its key."""


class Variant(NamedTuple):
    """One column: which classes the training script imports."""

    heading: tuple[str, str]
    subject: str
    """The words for it in a sentence that compares it with torch's."""
    imports: tuple[str, str]
    """The loader and, for photographs, the folder of images."""


VARIANTS = {
    "torch": Variant(
        ("torch", "DataLoader"),
        "torch's DataLoader",
        ("torch.utils.data:DataLoader", "torchvision.datasets:ImageFolder"),
    ),
    "loader": Variant(
        ("spdl_torch", "DataLoader"),
        "our DataLoader",
        ("spdl_torch:DataLoader", "torchvision.datasets:ImageFolder"),
    ),
    "both": Variant(
        ("spdl_torch", "+ImageFolder"),
        "our DataLoader and our ImageFolder",
        ("spdl_torch:DataLoader", "spdl_torch:ImageFolder"),
    ),
}
"""The columns: the user's program today, then one import changed, then two."""


class Workload(NamedTuple):
    """A dataset and the variants that load it."""

    about: str
    variants: tuple[str, ...]
    why_level: str
    """The reason why our DataLoader alone changes little, and what gains more."""


WORKLOADS = {
    "pictures": Workload(
        "32 x 32 pixels in memory, through Pillow and torchvision's transforms",
        ("torch", "loader"),
        "This dataset stays in worker processes, as with torch's loader, because its many short "
        "calls hold the GIL: our DataLoader alone saves only what surrounds the samples. For more, "
        "give the dataset __getitems__, which makes a batch's samples in one call.",
    ),
    "photographs": Workload(
        "JPEG files, cropped at random and resized",
        ("torch", "loader", "both"),
        "torchvision's ImageFolder stays in worker processes, as with torch's loader, and decodes "
        "there as before: our DataLoader alone saves only what surrounds the samples. For more, "
        "import ImageFolder from spdl_torch, too.",
    ),
}
"""The workloads in the order in which they are measured."""


class Measurement(NamedTuple):
    """What one turn has measured. CPU seconds are those of the process and its workers."""

    loading_images_per_second: float
    """The most that the loader delivers: a model that takes more waits for it."""
    training_images_per_second: float
    wait_ratio: float
    """The share of the training's time that it waited for batches."""
    first_batch_seconds: float
    """From ``iter()`` to the first batch, in a fresh process."""
    loading_cpu_seconds: float
    """Per image, without a model."""


_ROWS = (
    ("loading alone", "images/s", 1, "higher"),
    ("training light network", "images/s", 1, "higher"),
    ("  waiting for data", "% of time", 100, "lower"),
    ("time to first batch", "ms", 1e3, "lower"),
    ("CPU time, loading alone", "ms/image", 1e3, "lower"),
)
"""Name, unit, factor to it and which way is better, of each field of a measurement."""

_MATTERS = 0.05
"""The part of a speed below which a difference does not matter."""


def comparison_table(results: Results, *, with_ratios: bool = True) -> str:
    """Return a column for each variant, the median of its rounds, and ``±`` half the difference
    between the best and the worst; then the ratio of each further column to the first.
    """
    over = ["2nd/1st", "3rd/1st"][: len(results) - 1] if with_ratios else []
    lines = []
    for heads, ratio, better in ((0, "ratio", "better"), (1, "", "is")):
        cells = "".join(f"{VARIANTS[key].heading[heads]:>14}" for key in results)
        ratios = "".join(f"{ratio or each:>8}" for each in over)
        lines.append(f"{'':34}{cells}{ratios}" + (f"{better:>7}" if over else ""))
    lines.append("-" * len(lines[0]))
    for field, (name, unit, factor, better) in enumerate(_ROWS):
        rounds = {key: [each[field] for each in turns] for key, turns in results.items()}
        cells = "".join(
            f"{_cell([factor * value for value in values]):>14}" for values in rounds.values()
        )
        gains = [median(pairs) for pairs in _ratios(results, field)] if over else []
        line = f"{name:24}{unit:10}{cells}" + "".join(f"{each:>7.2f}x" for each in gains)
        lines.append(line + (f"{better:>7}" if over else ""))
    return "\n".join(lines)


def _cell(values: Sequence[float]) -> str:
    """Return ``640 ±12``; the spread only when there is one."""
    digits = 0 if median(values) >= 100 else 1
    spread = f" ±{(max(values) - min(values)) / 2:.{digits}f}" if len(values) > 1 else ""
    return f"{median(values):.{digits}f}{spread}"


def _ratios(results: Results, field: int) -> list[list[float]]:
    """Return, for each variant but the first, its values over the first's. Those of one round were
    measured one after the other: what disturbs the machine disturbs both.
    """
    first, *others = results.values()
    pairs = (zip(first, each, strict=False) for each in others)
    return [[b[field] / a[field] if a[field] else 1.0 for a, b in each] for each in pairs]


def verdict(workload: str, results: Results, other_cores: float, num_cores: int) -> str:
    """Return what the measurements of a workload mean. ``other_cores``: those that other programs
    kept busy meanwhile.
    """
    gains = _ratios(results, 1)  # in training
    subjects = [VARIANTS[key].subject for key in list(results)[1:]]
    parts = [
        f"with {subject} a light network trains at {median(gain):.2f}x ({min(gain):.2f} to "
        f"{max(gain):.2f}) torch's images/s"
        for subject, gain in zip(subjects, gains, strict=True)
    ]
    last, more = gains[-1], "More rounds tell smaller differences: --rounds 20."
    if other_cores > 0.1 * num_cores:
        found = f"No verdict, as other programs used {other_cores:.1f} of {num_cores} cores"
        more = "Repeat when the machine is quiet; until then trust the CPU time more."
    elif median(last) >= 1 + _MATTERS and min(last) > 1:
        found, more = "Faster", ""
    elif median(last) <= 1 - _MATTERS and max(last) < 1:
        found, more = "Slower", "Keep torch's for this dataset."
    else:
        found = "About level"
    text = f"{found}: {'; '.join(parts)}. {more} {WORKLOADS[workload].why_level}"
    return wrapped(" ".join(text.split()), f"{workload.capitalize() + ':':13}")


def fastest_models(results: Results) -> str:
    """Return how fast a model can be before it waits for each loader."""
    rates = (
        f"{shown_rate(median(each[0] for each in rounds))} with {VARIANTS[key].subject}"
        for key, rounds in results.items()
    )
    return wrapped(
        "A model waits for its loader if it takes more images/s than that loads alone: "
        f"{', '.join(rates)}. At twice as many it waits half of its time. This holds for a model "
        "that leaves the cores to the loader, as one on a GPU does."
    )
