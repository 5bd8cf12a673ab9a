"""Crop, resize and flip pictures of many sizes in few kernels, since each launch costs time.

Resizing is linear, and rows and columns are resized separately. So a picture is multiplied by a
matrix on each side, whose entries are the weights of Pillow's antialiased filter; a flip reverses
one of them. Pictures of many sizes lie one after the other in one block of bytes. Their crops are
gathered from it at the size of the largest one and multiplied as a batch; whatever is gathered from
beyond a crop has weight zero. Crops of similar size go together, as many at once as there is memory
for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from .geometry import Crop

_MOST_BYTES = 256 << 20
_LEAST_TOGETHER = 12  # it takes some 70 kernels for all of them, and 6 for each that is done alone
_BYTES_PER_PIXEL = 3 * (4 + 1 + 4)  # of each colour: where it lies, the byte, the float


def resize_crops(
    images: Sequence[Tensor],
    boxes: Sequence[Crop],
    out: Tensor,
    *,
    most_bytes: int = _MOST_BYTES,
    least_together: int = _LEAST_TOGETHER,
) -> None:
    """Fill a batch with the crops of pictures, resized (bilinear, antialiased) and flipped.

    Within one level (of 255) of torch's own kernel on one picture at a time.

    Args:
        images: uint8, (3, H, W) each, on one device.
        out: uint8, (N, 3, height, width), on that device.
        most_bytes: device memory to work in; a larger picture is done alone.
        least_together: groups smaller than this are done one picture at a time.
    """
    # The calling thread's autocast would multiply the weights in half precision.
    with torch.autocast(out.device.type, enabled=False):
        _resize_all(images, boxes, out, most_bytes, least_together)


def _resize_all(
    images: Sequence[Tensor],
    boxes: Sequence[Crop],
    out: Tensor,
    most_bytes: int,
    least_together: int,
) -> None:
    order = sorted(range(len(images)), key=lambda place: boxes[place].height * boxes[place].width)
    for places in _groups(order, images, boxes, most_bytes):
        if len(places) < least_together:
            for place in places:
                out[place] = _bytes_of(_alone(images[place], boxes[place], out.shape[-2:]))
            continue
        some = [images[place] for place in places]
        floats = _together(some, [boxes[place] for place in places], out.shape[-2:])
        out[_tensor(places, torch.int64, out.device)] = _bytes_of(floats)


def _groups(
    order: list[int], images: Sequence[Tensor], boxes: Sequence[Crop], most_bytes: int
) -> Iterator[list[int]]:
    group: list[int] = []
    height = width = in_block = 0
    for place in order:
        box, num_bytes = boxes[place], images[place].numel()
        height, width = max(height, box.height), max(width, box.width)
        in_crops = (len(group) + 1) * height * width * _BYTES_PER_PIXEL
        if group and in_crops + in_block + num_bytes > most_bytes:
            yield group
            group, height, width, in_block = [], box.height, box.width, 0
        group.append(place)
        in_block += num_bytes
    yield group


def _bytes_of(floats: Tensor) -> Tensor:
    return floats.round_().clamp_(0, 255).to(torch.uint8)


def _alone(image: Tensor, box: Crop, size: Sequence[int]) -> Tensor:
    top, left, height, width, is_flipped = box
    part = image[None, :, top : top + height, left : left + width].float()
    resized: Tensor = torch.ops.aten._upsample_bilinear2d_aa(part, list(size), False, None, None)
    return resized[0].flip(2) if is_flipped else resized[0]


def _together(images: list[Tensor], boxes: list[Crop], size: Sequence[int]) -> Tensor:
    """Return floats (N, 3, height, width)."""
    device = images[0].device
    sizes = [tuple(image.shape[1:]) for image in images]
    ends = torch.tensor([image.numel() for image in images], device="cpu").cumsum(0).tolist()
    table = _tensor(
        [
            (start, *whole, *box)
            for start, whole, box in zip([0, *ends], sizes, boxes, strict=False)
        ],
        torch.int32,
        device,
    )
    starts, heights, widths, tops, lefts, box_heights, box_widths, flips = table.unbind(1)
    high, wide = max(box.height for box in boxes), max(box.width for box in boxes)
    rows = _numbers(high, device).minimum(box_heights[:, None] - 1) + tops[:, None]
    columns = _numbers(wide, device).minimum(box_widths[:, None] - 1) + lefts[:, None]
    planes = starts[:, None] + _numbers(3, device) * (heights * widths)[:, None]
    lines = planes[:, :, None] + (rows * widths[:, None])[:, None, :]
    index = lines[..., None] + columns[:, None, None, :]
    block = torch.cat([image.reshape(-1) for image in images])
    crops = block.index_select(0, index.view(-1)).view(index.shape).float()
    weights = _weights(
        _tensor([[size[0]]] * len(images) + [[size[1]]] * len(images), torch.int32, device),
        max(size),
        torch.cat([box_heights, box_widths])[:, None],
        max(high, wide),
        torch.cat([torch.zeros_like(flips), flips])[:, None],
    )
    vertical, horizontal = weights[: len(images)], weights[len(images) :]
    return (
        vertical[:, None, : size[0], :high]
        @ crops
        @ horizontal[:, None, : size[1], :wide].transpose(2, 3)
    )


def _weights(
    lengths_out: Tensor, most_out: int, lengths: Tensor, most_in: int, flips: Tensor
) -> Tensor:
    """Return the weights (N, most_out, most_in) of the triangle filter from ``lengths`` (N, 1) to
    ``lengths_out`` (N, 1) pixels: zero beyond a length in, undefined beyond a length out.
    """
    out = _numbers(most_out, lengths.device)[None, :]
    out = torch.where(flips != 0, lengths_out - 1 - out, out)
    scales = lengths / lengths_out
    centers = (scales * (out + 0.5))[..., None]
    reach = scales.clamp(min=1)[..., None]
    pixels = _numbers(most_in, lengths.device)
    first = (centers - reach + 0.5).int().clamp_(min=0)
    last = (centers + reach + 0.5).int().minimum(lengths[..., None])
    weights = (1 - ((pixels - centers + 0.5) / reach).abs_()).clamp_(min=0)
    weights *= (pixels >= first) & (pixels < last)
    return weights.div_(weights.sum(2, keepdim=True))


def _numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


def _tensor(values: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu").to(device)
