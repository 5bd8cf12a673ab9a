"""Recognise the standard image recipes among torchvision's transforms.

A recipe is what the batch kernel can do (crop, resize, flip) and a tail that is left to the
user's own transforms. torchvision's classes are known by name, first and second version alike, so
that nothing of torchvision has to be imported for it; a subclass is never taken for its parent.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from .geometry import Generators, center_crop_window, draw_flip, random_crops, resized_size
from .kernel import PicturePlan
from .pillow import to_pil

if TYPE_CHECKING:
    from .._storage import Storage

Size = tuple[int, int]
"""Height and width, in pixels."""
Crop = tuple[tuple[float, float], tuple[float, float]]
"""``scale`` and ``ratio`` of ``RandomResizedCrop``."""
Resize = tuple[tuple[int, ...], int | None]
"""``size``, of one number or two, and ``max_size`` of ``Resize``."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A list of transforms, taken apart into the kernel's part and the rest."""

    height: int
    """The size in pixels of every picture that leaves the kernel."""
    width: int
    crop: Crop | None
    """Only a part of each picture is wanted, drawn at random, and resized to that size."""
    resize: Resize | None
    """Else the whole picture is resized, and its middle taken."""
    flip: float | None
    """The probability of mirroring left and right; None: the recipe has no flip."""
    batch_tail: tuple[Any, ...]
    """The user's transforms that follow and that may run on the whole batch at once."""
    sample_tail: tuple[Any, ...]
    """The user's transforms after those, which run sample by sample."""
    from_pil: bool
    """Whether ``sample_tail`` takes Pillow images: nothing before it asked for tensors."""

    @property
    def is_batched(self) -> bool:
        """Whether nothing is left to do sample by sample."""
        return not self.sample_tail and not self.from_pil

    @property
    def plans_draw(self) -> bool:
        """Whether anything in a plan is random."""
        return self.crop is not None or self.flip is not None

    @property
    def keeps_bytes(self) -> bool:
        """Whether the batch is the one that the kernel fills, and nothing is done to it."""
        return self.is_batched and all(_name(each) in _TO_TENSOR for each in self.batch_tail)

    def plans(self, sizes: Sequence[Size], generators: Generators = None) -> list[PicturePlan]:
        """Draw the parameters of pictures, for each in the order in which torchvision does."""
        if self.crop is not None:
            crops = random_crops(sizes, *self.crop, self.flip, generators)
            return [
                PicturePlan(size, crop[:4], (self.height, self.width), flip=crop.flip)
                for size, crop in zip(sizes, crops, strict=True)
            ]
        # The whole picture is resized, not only what the crop needs: the kernel of `interpolate`
        # has no fractional offset, so resizing a part would give other pixels.
        assert self.resize is not None, "guaranteed by recognise: one of the two"
        plans = []
        own = [None] * len(sizes) if generators is None else generators
        for size, generator in zip(sizes, own, strict=True):
            resized = resized_size(*size, *self.resize)
            window = center_crop_window(*resized, self.height, self.width)
            is_flipped = self.flip is not None and draw_flip(self.flip, generator)
            plans.append(PicturePlan(size, (0, 0, *size), resized, window, is_flipped))
        return plans

    def finish(self, batch: Tensor, storage: Storage | None = None) -> Tensor:
        """Apply ``batch_tail`` to uint8 (N, 3, H, W): same dtype and values as one by one.

        storage: where the result is made if the tail has a conversion to floats.
        """
        conversions = [_conversion(each) for each in self.batch_tail]
        known = [place for place, each in enumerate(conversions) if each is not None]
        for place, transform in enumerate(self.batch_tail):
            conversion = conversions[place]
            if conversion is not None and batch.dtype is torch.uint8:
                batch = _as_floats(batch, *conversion, storage if known == [place] else None)
            elif _name(transform) == "Normalize":
                batch = _in_place(transform)(batch)
            elif _name(transform) not in _TO_TENSOR:
                # Contiguous as ToTensor's result is: user code may call view on a batch.
                batch = transform(batch.contiguous())
        return batch

    def finish_one(self, image: Tensor) -> Any:
        """Apply ``sample_tail`` to one picture (3, H, W) of the finished batch."""
        sample: Any = to_pil(image) if self.from_pil else image
        for transform in self.sample_tail:
            sample = transform(sample)
        return sample


_Scaling = Literal["none", "div", "mul"]
"""The way from bytes to floats: as they are, divided by 255, or multiplied by its inverse."""


def _as_floats(
    batch: Tensor, dtype: torch.dtype, scaling: _Scaling, storage: Storage | None = None
) -> Tensor:
    """Return a uint8 batch in floats of its own, contiguous."""
    if storage is None:
        floats = batch.to(dtype, memory_format=torch.contiguous_format)
    else:
        room = storage.tensor((batch.numel() * dtype.itemsize,))
        floats = room.view(dtype).view(batch.shape).copy_(batch)
    if scaling == "div":
        return floats.div_(255)
    return floats.mul_(1 / 255) if scaling == "mul" else floats


def _conversion(transform: Any) -> tuple[torch.dtype, _Scaling] | None:
    """Return the floats to which a transform takes bytes, and how; None = it does something else.

    torchvision's two versions scale differently, in the last bit, so all 256 bytes are tried.
    """
    if _name(transform) == "ToTensor":
        return torch.get_default_dtype(), "div"
    dtype = getattr(transform, "dtype", None)
    if _name(transform) not in ("ToDtype", "ConvertImageDtype") or _has_hooks(transform):
        return None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return None
    key = type(transform), dtype, getattr(transform, "scale", None)
    if key not in _conversions:
        levels = torch.arange(256, dtype=torch.uint8, device="cpu").view(1, 1, 16, 16)
        theirs, ways = transform(levels), get_args(_Scaling)
        same = [way for way in ways if torch.equal(theirs, _as_floats(levels, dtype, way))]
        _conversions[key] = (dtype, same[0]) if same else None
    return _conversions[key]


_conversions: dict[Any, tuple[torch.dtype, _Scaling] | None] = {}


def _has_hooks(transform: Any) -> bool:
    return any(vars(transform).get(name) for name in ("_forward_hooks", "_forward_pre_hooks"))


def _in_place(normalize: Any) -> Any:
    """Return the same Normalize, made to overwrite the batch, which nobody else holds yet.

    A second batch of floats costs a third of this tail's time, in page faults alone.
    """
    normalize = copy.copy(normalize)
    normalize.inplace = True
    return normalize


def recognise(transform: object, *, from_tensor: bool) -> Recipe | None:
    """Take ``transform`` apart; return None if the kernel has no part in it.

    Args:
        from_tensor: the transform is written for tensors instead of Pillow images.
    """
    steps = _flatten(transform)
    converted = from_tensor
    if steps and _name(steps[0]) in ("PILToTensor", "ToImage"):
        converted = True
        # ToImage also changes the class, which a later transform may look at: it moves to the end.
        steps = steps[1:] if _name(steps[0]) == "PILToTensor" else _move_behind(steps)
    found = _geometry(steps, converted)
    if found is None:
        return None
    geometry, steps = found
    flip = None
    if steps and _name(steps[0]) == "RandomHorizontalFlip":
        flip, steps = steps[0].p, steps[1:]
    split = _split_tail(steps, converted)
    from_pil = split == 0 and not converted
    tails = tuple(steps[:split]), tuple(steps[split:])
    return Recipe(*geometry, flip, *tails, from_pil)


def _flatten(transform: object) -> list[Any]:
    """Return the transforms inside nested ``Compose`` and ``nn.Sequential``."""
    if _name(transform) == "Compose":
        inner: Iterable[object] = transform.transforms  # type: ignore[attr-defined]  # a Compose
    elif type(transform) is torch.nn.Sequential:
        inner = transform
    else:
        return [] if transform is None else [transform]
    return [step for part in inner for step in _flatten(part)]


def _name(transform: object) -> str | None:
    """Return the class's name if it is torchvision's own, else None."""
    kind = type(transform)
    return kind.__name__ if kind.__module__.startswith("torchvision.transforms") else None


def _move_behind(steps: list[Any]) -> list[Any]:
    """``[ToImage, geometry ..., rest]`` -> ``[geometry ..., ToImage, rest]``."""
    end = 1
    while end < len(steps) and _name(steps[end]) in _GEOMETRIC:
        end += 1
    return [*steps[1:end], steps[0], *steps[end:]]


_GEOMETRIC = frozenset({"RandomResizedCrop", "Resize", "CenterCrop", "RandomHorizontalFlip"})
_TO_TENSOR = frozenset({"PILToTensor", "ToImage", "ToPureTensor"})
_ELEMENTWISE = frozenset({"ToDtype", "ConvertImageDtype", "Normalize"})


def _geometry(
    steps: list[Any], converted: bool
) -> tuple[tuple[int, int, Crop | None, Resize | None], list[Any]] | None:
    """Return the kernel's part at the head of ``steps``, and what follows it."""
    names = [_name(step) for step in steps[:2]]
    if names[:1] == ["RandomResizedCrop"] and _is_bilinear(steps[0], converted):
        crop = steps[0]
        return (*_pair(crop.size), (tuple(crop.scale), tuple(crop.ratio)), None), steps[1:]
    if names[:1] == ["Resize"] and _is_bilinear(steps[0], converted):
        edges, is_cropped = _edges(steps[0]), names[1:] == ["CenterCrop"]
        if edges is not None and (is_cropped or len(edges) == 2):
            size = _pair(steps[1].size if is_cropped else edges)
            return (*size, None, (edges, steps[0].max_size)), steps[1 + is_cropped :]
    return None


def _is_bilinear(transform: Any, converted: bool) -> bool:
    """Return whether the transform resizes like the kernel; Pillow always antialiases."""
    mode = transform.interpolation
    mode = getattr(mode, "value", mode)
    return mode in ("bilinear", 2) and (transform.antialias is True or not converted)


def _edges(resize: Any) -> tuple[int, ...] | None:
    """Return Resize's size as one or two numbers; None where torchvision decides or raises."""
    size = (resize.size,) if isinstance(resize.size, int) else resize.size
    if size is None or (resize.max_size is not None and resize.max_size <= size[0]):
        return None
    return tuple(size)


def _pair(size: Any) -> tuple[int, int]:
    numbers = (size,) if isinstance(size, int) else tuple(size)
    return (numbers[0], numbers[-1])


def _split_tail(tail: list[Any], converted: bool) -> int:
    """Return how many transforms at the head of ``tail`` may run on the whole batch."""
    names = [_name(step) for step in tail]
    if not converted and not (names and names[0] in ("ToTensor", "PILToTensor", "ToImage")):
        return 0
    split = 0
    for place, step in enumerate(tail):
        if not (_may_run_on_batch(step) or (place == 0 and names[0] == "ToTensor")):
            break
        split += 1
    if split < len(tail) and "ToImage" in names[:split]:
        # What follows may look for torchvision's Image class, which a batch does not keep.
        return names.index("ToImage")
    return split


def _may_run_on_batch(transform: Any) -> bool:
    if _name(transform) in _TO_TENSOR:
        return True
    # ToDtype also takes a dict of dtypes by sample class, and a plain batch has none of those.
    dtype = getattr(transform, "dtype", torch.uint8)
    return _name(transform) in _ELEMENTWISE and isinstance(dtype, torch.dtype)
