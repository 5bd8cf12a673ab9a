"""The batch kernel: read, decode, crop, resize and flip a whole batch in one call.

The functions of this file run in one of three ways, with equal results: as the extension in C++,
where it was built; compiled by TorchScript, where torch has that and torchvision its operators; or
as plain Python. The first two take a whole batch through without the GIL, so that it does not hold
up the trainer's thread.

Crop boxes are drawn in one call, too, though each takes microseconds: a call of torch's releases
the GIL, and a thread among many that has released it waits for its turn to get it back. On 16 cores
that was most of what loading took.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Generator, Tensor

from ...handlers import unless_of_handler
from ...locks import lock_held_at_forks
from . import extension

T = TypeVar("T")


class PicturePlan(NamedTuple):
    """The geometry applied to one decoded picture, in pixels.

    Crop the box out of the picture, resize the box, lay the resized box on the output so that the
    output's corner falls on ``window`` (outside it: zeros), flip.
    """

    size: tuple[int, int]
    """Height and width of the decoded picture that the plan was made for."""
    box: tuple[int, int, int, int]
    """The box to crop, as top, left, height, width, within ``size``."""
    resized: tuple[int, int]
    """Height and width that the box is resized to."""
    window: tuple[int, int] = (0, 0)
    """Top and left of the output within the resized box; negative: zeros come first."""
    flip: bool = False


class Seeds:
    """A seed for each picture, in place of a generator."""

    def __init__(self, seeds: list[int]) -> None:
        self.seeds = seeds

    def __iter__(self) -> Iterator[Generator]:
        """Seed one generator for each picture in turn."""
        generator = torch.Generator()
        for seed in self.seeds:
            yield generator.manual_seed(seed)


def read_files(paths: list[str]) -> list[Tensor]:
    """Read whole files without the GIL.

    Returns: uint8 tensors of one dimension, CPU, each with memory of its own.
    Raises: RuntimeError: a file is missing, unreadable or empty.
    """
    return _call(_read_files, paths)


def fill_batch(
    data: list[Tensor], plans: Sequence[PicturePlan], batch: Tensor, decoder: str | None
) -> None:
    """Decode, crop, resize and flip every picture into its place in the batch.

    Args:
        data: encoded bytes (uint8, one dimension) or decoded pictures (uint8, (3, H, W)).
        batch: uint8, (N, 3, height, width), CPU; fast when in channels_last memory.
        decoder: the operator that decodes bytes; of others than torchvision's the extension alone
            knows.

    Raises: RuntimeError: a picture cannot be decoded, or is not of the size its plan says.
    """
    _call(_fill_batch, data, *map(list, zip(*plans, strict=True)), batch, decoder or "")


def draw_boxes(
    sizes: list[tuple[int, int]],
    scale: tuple[float, float],
    log_ratio: tuple[float, float],
    flip: float,
    generators: list[Generator] | Seeds | None,
) -> list[tuple[int, int, int, int, bool]]:
    """Draw the boxes of ``RandomResizedCrop`` and the flips that follow, in torchvision's order.

    sizes: height and width of each picture. flip: the probability, as a float32; negative = no
    number is drawn for it. generators: one for each picture, or its seed; None = torch's global one
    for all.

    Returns: top, left, height and width of each box, and whether to flip; a height of 0 = none of
        ten boxes lay within the picture.
    """
    seeds: list[int] = []
    if isinstance(generators, Seeds):
        seeds, generators = generators.seeds, [torch.Generator()]
    args = sizes, scale, log_ratio, flip, generators, seeds
    # A mode of torch's functions may redirect what names no generator, and sees nothing of what
    # compiled code draws.
    if generators is None and torch._C._len_torch_function_stack():
        return _draw_boxes(*args)
    return _call(_draw_boxes, *args)


def has_codec() -> bool:
    """Return whether torchvision has its own decoders; Pillow decodes otherwise."""
    load_operators()
    return hasattr(torch.ops.image, "decode_image")


def is_compiled() -> bool:
    """Return whether batches go through compiled code (compiles it on the first call)."""
    return _compiled() is not None


def is_extension() -> bool:
    """Return whether that is the extension's."""
    compiled = _compiled()  # which loads it, one thread at a time
    return compiled is not None and compiled is extension.load()


def _read_files(paths: list[str]) -> list[Tensor]:
    files: list[Tensor] = []
    for path in paths:
        # read_file maps the file. The copy waits for the disk here, where nothing is held, and
        # a file that shrinks later cannot kill the process.
        files.append(torch.ops.image.read_file(path).clone())  # noqa: PERF401 - TorchScript
    return files


def _fill_batch(
    data: list[Tensor],
    sizes: list[tuple[int, int]],
    boxes: list[tuple[int, int, int, int]],
    resized: list[tuple[int, int]],
    windows: list[tuple[int, int]],
    flips: list[bool],
    batch: Tensor,
    decoder: str,
) -> None:
    height = batch.size(2)
    width = batch.size(3)
    for i in range(len(data)):
        image = data[i]
        if image.dim() == 1:
            image = torch.ops.image.decode_image(image, 3, False)
        if image.dim() != 3 or image.size(1) != sizes[i][0] or image.size(2) != sizes[i][1]:
            raise RuntimeError("the decoded size is not the size in the header")
        top, left, box_height, box_width = boxes[i]
        crop = image[:, top : top + box_height, left : left + box_width].unsqueeze(0)
        new_height, new_width = resized[i]
        y, x = windows[i]
        place = batch[i : i + 1]
        if box_height == 0 or box_width == 0:
            place.zero_()  # as Pillow does where torchvision draws such a box
        elif y == 0 and x == 0 and new_height == height and new_width == width:
            torch.ops.aten._upsample_bilinear2d_aa(
                crop, [height, width], False, None, None, out=place
            )
        else:
            whole = torch.ops.aten._upsample_bilinear2d_aa(
                crop, [new_height, new_width], False, None, None
            )
            from_y, from_x = max(y, 0), max(x, 0)
            to_y, to_x = max(-y, 0), max(-x, 0)
            rows = min(new_height - from_y, height - to_y)
            columns = min(new_width - from_x, width - to_x)
            if rows < height or columns < width:
                place.zero_()
            place[:, :, to_y : to_y + rows, to_x : to_x + columns].copy_(
                whole[:, :, from_y : from_y + rows, from_x : from_x + columns]
            )
        if flips[i]:
            place.copy_(place.flip(3))


def _draw_boxes(
    sizes: list[tuple[int, int]],
    scale: tuple[float, float],
    log_ratio: tuple[float, float],
    flip: float,
    generators: list[Generator] | None,
    seeds: list[int],
) -> list[tuple[int, int, int, int, bool]]:
    low, high = scale
    log_low, log_high = log_ratio
    number = torch.empty([1])
    boxes: list[tuple[int, int, int, int, bool]] = []
    for i in range(len(sizes)):
        generator: Generator | None = None
        if generators is not None:
            generator = generators[0].manual_seed(seeds[i]) if len(seeds) > 0 else generators[i]
        height, width = sizes[i]
        top, left, box_height, box_width = 0, 0, 0, 0
        for _ in range(10):
            target_area = height * width * float(number.uniform_(low, high, generator=generator))
            # The exponential in float32, as torchvision takes it: math.exp rounds differently.
            aspect_ratio = float(number.uniform_(log_low, log_high, generator=generator).exp_())
            columns = int(round(math.sqrt(target_area * aspect_ratio)))  # noqa: RUF046 - TorchScript
            rows = int(round(math.sqrt(target_area / aspect_ratio)))  # noqa: RUF046 - TorchScript
            if columns > 0 and columns <= width and rows > 0 and rows <= height:
                box_height, box_width = rows, columns
                top = int(torch.randint(0, height - rows + 1, [1], generator=generator))
                left = int(torch.randint(0, width - columns + 1, [1], generator=generator))
                break
        is_flipped = False
        if flip >= 0.0:
            is_flipped = float(number.uniform_(0.0, 1.0, generator=generator)) < flip
        boxes.append((top, left, box_height, box_width, is_flipped))
    return boxes


_SCRIPTED = (_read_files, _fill_batch, _draw_boxes)

_lock = lock_held_at_forks()


@functools.lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any] | None:
    """Return what calls this file's functions by name, compiled; None where they are not."""
    with _lock:
        return extension.load() or _scripted()


def _call(function: Callable[..., T], *args: object) -> T:
    compiled = _compiled()
    result: T = function(*args) if compiled is None else compiled(function.__name__, *args)
    return result


def _scripted() -> Callable[..., Any] | None:
    """Return what calls the functions as TorchScript, compiled in some 5 ms; None without it."""
    load_operators()
    try:
        source = "\n".join(inspect.getsource(function) for function in _SCRIPTED)
        # A CompilationUnit, not torch.jit.script: that one warns (FutureWarning), and its
        # warning could be silenced only for all threads at once. It also takes longer.
        unit = torch.jit.CompilationUnit(source)
        run = functools.partial(_run, unit)
        run(_read_files.__name__, [])
    except unless_of_handler(Exception):
        return None  # no TorchScript, no source text, an operator gone: the eager path serves
    return run


def _run(unit: Any, name: str, *args: object) -> Any:
    # Without this, TorchScript's profiling executor optimizes the first calls of each function,
    # for tens of milliseconds and nothing in return. The flag belongs to the thread.
    with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]  # untyped in torch
        try:
            return getattr(unit, name)(*args)
        except torch.jit.Error as error:  # what becomes of a `raise` in compiled code
            raise RuntimeError(str(error)) from error


@functools.lru_cache(maxsize=1)
def load_operators() -> None:
    """Register ``torch.ops.image``, by torchvision's shared library alone: 1 ms.

    Importing torchvision.io registers it too, but with models, datasets and a compiler: 0.8 s,
    which every forked worker would pay in its first batch.
    """
    # One thread at a time: torch changes the process's flags for loading libraries, and two that
    # do so at once would leave the changed ones behind.
    with _lock:
        for path in _operator_libraries():
            try:
                torch.ops.load_library(path)  # type: ignore[no-untyped-call]  # untyped in torch
            except unless_of_handler(OSError):
                continue  # built for another torch; the import warns if torchvision is set to
            return
        import torchvision.io  # noqa: F401


def _operator_libraries() -> list[str]:
    """Return the paths of torchvision's codec libraries; [] on Windows, where it prepares them."""
    package = importlib.util.find_spec("torchvision")
    if sys.platform == "win32" or package is None or not package.submodule_search_locations:
        return []
    folder = Path(package.submodule_search_locations[0])
    # The second is what the first was called until torchvision 0.28.
    return [str(path) for name in ("image_stable", "image") for path in folder.glob(f"{name}.*so")]
