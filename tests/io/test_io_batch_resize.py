"""Pictures of many sizes, resized together as they are one by one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from spdl_torch.io._image import batch_resize
from spdl_torch.io._image.batch_resize import resize_crops
from spdl_torch.io._image.geometry import Crop

SIDES = st.integers(1, 90)


@st.composite
def pictures(draw):
    """Pictures of random bytes, and a box in each."""
    images, boxes = [], []
    for seed in range(draw(st.integers(1, 7))):
        height, width = draw(SIDES), draw(SIDES)
        generator = torch.Generator().manual_seed(seed)
        shape = 3, height, width
        images.append(torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8))
        rows, columns = draw(st.integers(1, height)), draw(st.integers(1, width))
        top, left = draw(st.integers(0, height - rows)), draw(st.integers(0, width - columns))
        boxes.append(Crop(top, left, rows, columns, draw(st.booleans())))
    return images, boxes


def one_by_one(images, boxes, size):
    """By torch's own kernel."""
    rows = []
    for image, (top, left, height, width, flip) in zip(images, boxes, strict=True):
        part = image[None, :, top : top + height, left : left + width].float()
        resized = torch.nn.functional.interpolate(part, size, mode="bilinear", antialias=True)
        rows.append(resized.flip(3) if flip else resized)
    return torch.cat(rows)


@settings(deadline=None, max_examples=60)
@given(
    pictures(), st.tuples(SIDES, SIDES), st.sampled_from([0, 1 << 17, 1 << 28]), st.integers(1, 4)
)
def test_pictures_are_those_of_one_by_one(drawn, size, most_bytes, least):
    """Within what rounding to bytes leaves, larger and smaller, flipped or not, in any groups."""
    images, boxes = drawn
    out = torch.full((len(images), 3, *size), 77, dtype=torch.uint8)
    resize_crops(images, boxes, out, most_bytes=most_bytes, least_together=least)
    assert (out - one_by_one(images, boxes, size)).abs().max() <= 0.51


def test_flip_that_is_forgotten_is_noticed(monkeypatch):
    """The test before can fail."""
    image = torch.arange(3 * 8 * 8, dtype=torch.uint8).view(3, 8, 8)
    boxes = [Crop(0, 0, 8, 8, True), Crop(0, 0, 8, 8, False)]
    weights = batch_resize._weights
    monkeypatch.setattr(batch_resize, "_weights", lambda *args: weights(*args[:4], args[4] * 0))
    out = torch.empty(2, 3, 4, 4, dtype=torch.uint8)
    resize_crops([image] * 2, boxes, out, least_together=2)
    assert torch.equal(out[0], out[1])


@pytest.mark.parametrize("least", [1, 9])
def test_autocast_of_who_calls_takes_no_precision(least):
    """As in the loop of a model that trains in half of it; together and one by one."""
    generator = torch.Generator().manual_seed(0)
    images = [torch.randint(0, 256, (3, 90, 90), generator=generator, dtype=torch.uint8)] * 3
    boxes = [Crop(3, 5, 80, 70, True)] * 3
    found, expected = (torch.empty(3, 3, 24, 32, dtype=torch.uint8) for _ in range(2))
    resize_crops(images, boxes, expected, least_together=least)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        resize_crops(images, boxes, found, least_together=least)
    assert torch.equal(found, expected)


class Operations(TorchDispatchMode):
    """Counts what would be launched."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        views = ("view", "slice", "select", "unsqueeze", "transpose", "unbind", "expand", "t.")
        self.count += not any(str(function).startswith(f"aten.{name}") for name in views)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("number", [2, 12, 60])
def test_number_of_kernels_is_that_of_groups(number):
    """Not that of pictures: one by one they take six each, and few of them go one by one."""
    images = [torch.zeros(3, 20 + k, 30, dtype=torch.uint8) for k in range(number)]
    boxes = [Crop(1, 1, 10 + k, 20, False) for k in range(number)]
    out = torch.empty(number, 3, 8, 8, dtype=torch.uint8)
    with Operations() as operations:
        resize_crops(images, boxes, out)
    assert operations.count <= 70
