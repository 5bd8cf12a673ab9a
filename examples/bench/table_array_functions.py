"""``array-functions``: bytes in memory to numpy arrays in hand, by the functions alone.

One load is a picture, uint8 (3, 640, 480), and its labels, uint8 (640, 480): two npy files, or one
npz archive of both, stored or deflated. Nothing is read from disk. Deflated pictures are smooth or
noisy (one level up or down at every pixel, which leaves little to compress). Columns end with the
number of threads that load at once.

Ours returns views of npy and of stored npz; ``verified`` checks the checksums of stored arrays, as
numpy and SPDL do; ``copied`` gives every array memory of its own, as numpy does.
"""

from __future__ import annotations

import io
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from .peers import imported, installed, left_out
from .report import Goal, Metric
from .tables import Contender, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .report import Report
    from .tables import BenchOptions

    Load = Callable[[bytes], Any]


KINDS = {
    "npy": ("npy", 0),
    "stored": ("npz", 0),
    "deflated": ("npz-compressed", 0),
    "noisy": ("npz-compressed", 1),
}
"""The format of each, and its noise."""
_HEIGHT, _WIDTH = 640, 480
_THREADS = (1, 2)
_AT_LEAST: dict[str, tuple[float | None, float | None]] = {
    "npy": (30, 3),
    "stored": (50, 10),
    "deflated": (2.5, 1.2),
    "noisy": (None, None),
}
"""Goals over numpy and over SPDL."""
METRICS = tuple(
    Metric(f"{kind}_{threads}", f"{kind} x{threads}, /s") for kind in KINDS for threads in _THREADS
)


def _prepare(options: BenchOptions, folder: Path) -> dict[str, Any]:
    return {"seconds": 0.01 if options.smoke else options.seconds / 4}


def measure(contender: Contender, settings: dict[str, Any]) -> dict[str, float]:
    """Measure every kind and number of threads."""
    load_npy, load_npz = contender.run()
    figures = {}
    for kind, (saved_as, noise) in KINDS.items():
        arrays = _picture_and_labels(noise=noise)
        load = _loader(load_npy, load_npz, _encode(saved_as, arrays))
        for found, expected in zip(load(), arrays.values(), strict=True):
            assert (found == expected).all(), f"{contender.name} loads {kind} wrong"
        for threads in _THREADS:
            figures[f"{kind}_{threads}"] = loads_per_second(load, threads, settings["seconds"])
    return figures


def _picture_and_labels(*, noise: int = 0) -> dict[str, Any]:
    """Return a smooth picture, uint8 (3, 640, 480), and a map of labels, uint8 (640, 480).

    Random bytes would not do: they cannot be compressed. ``noise`` adds up to that many levels to
    every pixel, which makes it as hard to compress as a photograph (3) or nearly so (1).
    """
    import numpy as np

    rng = np.random.default_rng(0)
    picture = np.stack([_field(rng) for _ in range(3)])
    picture += rng.integers(-noise, noise + 1, picture.shape)
    return {
        "image": picture.clip(0, 255).astype(np.uint8),
        "label": (_field(rng) // 32).astype(np.uint8),
    }


def _encode(saved_as: str, arrays: dict[str, Any]) -> list[bytes]:
    """Return the arrays as files: one for each if it is ``npy``, else one for all.

    saved_as: ``npy``, ``npz`` or ``npz-compressed``.
    """
    import numpy as np

    if saved_as == "npy":
        return [_written(np.save, array) for array in arrays.values()]
    return [_written(np.savez if saved_as == "npz" else np.savez_compressed, **arrays)]


def _written(save: Callable[..., object], *arrays: Any, **named: Any) -> bytes:
    buffer = io.BytesIO()
    save(buffer, *arrays, **named)
    return buffer.getvalue()


def _field(rng: Any) -> Any:
    """Return random numbers from 0 to 255 on a coarse grid, interpolated linearly."""
    import numpy as np

    rows, columns = 8, 6
    grid = rng.integers(0, 256, (rows, columns)).astype(float)
    down, across = np.linspace(0, rows - 1, _HEIGHT), np.linspace(0, columns - 1, _WIDTH)
    tall = np.stack([np.interp(down, range(rows), line) for line in grid.T], axis=1)
    return np.stack([np.interp(across, range(columns), line) for line in tall])


def _loader(load_npy: Load, load_npz: Load, files: list[bytes]) -> Callable[[], tuple[Any, Any]]:
    """Return a function that loads both arrays."""
    if len(files) == 2:
        first, second = files
        return lambda: (load_npy(first), load_npy(second))
    (content,) = files

    def load() -> tuple[Any, Any]:
        archive = load_npz(content)
        return archive["image"], archive["label"]

    return load


def _ours(*, verify: bool = False) -> tuple[Load, Load]:
    from spdl_torch.io import load_npy, load_npz

    return load_npy, partial(load_npz, verify=True) if verify else load_npz


def _spdl() -> tuple[Load, Load]:
    of_spdl = imported("spdl.io")
    return of_spdl.load_npy, of_spdl.load_npz


def _numpy() -> tuple[Load, Load]:
    import numpy as np

    def load(content: bytes) -> Any:
        return np.load(io.BytesIO(content))

    return load, load


def loads_per_second(load: Callable[[], object], num_threads: int, seconds: float) -> float:
    """Measure all threads together, for about that long."""
    counts = [0] * num_threads
    barrier = threading.Barrier(num_threads + 1)
    start = time.perf_counter()
    load()
    # The clock is read about once a millisecond, no more often.
    group = max(1, int(1e-3 / (time.perf_counter() - start)))

    def work(place: int) -> None:
        barrier.wait()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for _ in range(group):
                load()
            counts[place] += group

    threads = [threading.Thread(target=work, args=(place,)) for place in range(num_threads)]
    for thread in threads:
        thread.start()
    barrier.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - start)


def _goals() -> Iterator[Goal]:
    for metric in METRICS:
        kind = metric.key.rpartition("_")[0]
        over_numpy, over_spdl = _AT_LEAST[kind]
        yield Goal(metric.key, "ours", "numpy", at_least=over_numpy)
        yield Goal(metric.key, "ours", "SPDL", at_least=over_spdl)
        if kind == "stored":
            yield Goal(metric.key, "ours, verified", "SPDL")


def conclude(report: Report) -> list[str]:
    """Name the library that inflated."""
    if installed("deflate"):
        return []
    return [left_out("deflate", "libdeflate") + "; zlib inflates instead."]


TABLES = (
    Table(
        name="array-functions",
        title="Loads a second of uint8 (3, 640, 480) and (640, 480) from bytes in memory",
        metrics=METRICS,
        contenders=(
            Contender("ours", _ours, smoke=True),
            Contender("ours, verified", partial(_ours, verify=True)),
            Contender("SPDL", _spdl, ("spdl",)),
            Contender("numpy", _numpy, smoke=True),
        ),
        prepare=_prepare,
        measure=measure,
        goals=tuple(_goals()),
        conclude=conclude,
        seconds=(2.0, 4.0),
    ),
)
