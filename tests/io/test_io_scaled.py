"""scaled=True: JPEGs at the next size above the one wanted are Pillow's, and near whole pictures;
whatever cannot be decoded so, and every error, is as without it."""

import io
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from support.jpegs import CODECS, KINDS, OTHER_KINDS, boxes, by, jpeg
from support.pictures import encode, photograph
from torchvision import datasets
from torchvision.transforms import v2

from spdl_torch import ImageFolder
from spdl_torch.data import cached
from spdl_torch.errors import DecodeError, UnsupportedOptionError
from spdl_torch.io import Crop, load_image

EVERY_KIND = {**KINDS, **OTHER_KINDS}
OTHER_FORMATS = {kind: encode(photograph(150, 201), kind) for kind in ("PNG", "WEBP", "GIF")}


def size_of(content):
    with Image.open(io.BytesIO(content)) as image:
        return image.height, image.width


def divisor(box, wanted):
    """How many times as large as wanted the box is, of 1, 2, 4 and 8."""
    times = min(box[2] / wanted[0], box[3] / wanted[1])
    return max(each for each in (1, 2, 4, 8) if each <= max(1, times))


def by_pillow(content, box, wanted, by):
    """The box out of Pillow's reduced picture, resized by Pillow to height and width."""
    image = Image.open(io.BytesIO(content))
    width, height = image.size
    image.draft(None, (max(1, width // by), max(1, height // by)))
    assert image.size == (math.ceil(width / by), math.ceil(height / by))
    top, left, height, width = (length / by for length in box)
    inner = left, top, left + width, top + height
    resized = image.convert("RGB").resize(wanted[::-1], Image.Resampling.BILINEAR, inner)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)


@pytest.mark.parametrize("kind", [*EVERY_KIND, *OTHER_FORMATS, None])
@given(data=st.data(), codec=st.sampled_from(CODECS), flip=st.booleans())
@settings(max_examples=40)
def test_pixels_are_pillows(kind, data, codec, flip):
    """Bit for bit Pillow's draft and resize at the largest reduction that leaves the size wanted,
    wherever the box lies and whichever library decodes; without a reduction, as without scaled.
    Also of pictures of a few blocks, and of part of one. Other formats are as ever."""
    if kind is None:
        height, width = data.draw(st.tuples(st.integers(1, 70), st.integers(1, 70)))
        content = jpeg(height, width, subsampling=data.draw(st.integers(0, 2)))
    else:
        content = {**EVERY_KIND, **OTHER_FORMATS}[kind]
    size = size_of(content)
    box = data.draw(boxes(*size) | st.just((0, 0, *size)), label="box")
    most = 60 if kind else max(1, min(size) // 2)
    wanted = data.draw(st.tuples(st.integers(1, most), st.integers(1, most)), label="wanted")
    load = partial(by(codec, load_image), content, wanted[1], wanted[0])
    crop = lambda height, width: Crop(*box, flip)  # noqa: E731
    found = load(crop=crop, scaled=True)
    times = 1 if kind in OTHER_FORMATS else divisor(box, wanted)
    if times == 1:
        assert torch.equal(found, load(crop=crop))
    else:
        expected = by_pillow(content, box, wanted, times)
        assert torch.equal(found, expected.flip(2) if flip else expected)


@pytest.mark.parametrize("codec", CODECS)
def test_errors_are_those_of_the_whole_picture(codec, tmp_path):
    """Empty, cut short, without tables: the same text, from every codec."""
    content = KINDS["4:2:0"]
    place = content.index(b"\xff\xdb")
    cut = [content[:end] for end in (0, 2, 300, 2000, -300, -1)]
    path = tmp_path / "bad.jpg"
    for bad in (*cut, content[:place] + content[place + 134 :]):
        path.write_bytes(bad)
        texts = set()
        for scaled in (False, True):
            with pytest.raises(DecodeError, match=r"bad\.jpg") as caught:
                by(codec, load_image)(path, 9, 9, scaled=scaled)
            texts.add(str(caught.value))
        assert len(texts) == 1


def test_damage_in_the_middle_decodes_as_in_pillow():
    """Bits that are wrong but end in time: Pillow's pixels, as libjpeg-turbo only warns."""
    content = bytearray(KINDS["4:2:0"])
    content[len(content) // 2 : len(content) // 2 + 40] = bytes(40)
    box = (0, 0, *size_of(bytes(content)))
    for codec in CODECS:
        found = by(codec, load_image)(bytes(content), 30, 30, scaled=True)
        assert torch.equal(found, by_pillow(bytes(content), box, (30, 30), 4))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two classes of large JPEGs, and a PNG."""
    root = tmp_path_factory.mktemp("large")
    for number, content in enumerate(EVERY_KIND.values()):
        folder = root / f"class{number % 2}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number:02}.jpg").write_bytes(content)
    photograph(300, 420).save(root / "class0" / "last.png")
    return root


TRAIN = v2.Compose([v2.RandomResizedCrop(24), v2.RandomHorizontalFlip(), v2.PILToTensor()])
VALIDATION = v2.Compose([v2.Resize(40), v2.CenterCrop(32), v2.PILToTensor()])


def test_folder_scales_validation_recipes(root):
    """Resize and CenterCrop: Pillow's reduced picture, resized as a whole, its middle cut out."""
    dataset = ImageFolder(root, VALIDATION, scaled=True)
    for (image, _), (path, _) in zip(dataset, dataset.samples, strict=True):
        if path.endswith(".png"):
            continue
        with open(path, "rb") as file:
            content = file.read()
        height, width = size_of(content)
        resized = v2.functional.resize(torch.empty(1, height, width), [40]).shape[1:]
        by = divisor((0, 0, height, width), resized)
        assert by > 1
        whole = by_pillow(content, (0, 0, height, width), tuple(resized), by)
        assert torch.equal(image, v2.functional.center_crop(whole, [32]))


@pytest.mark.parametrize(
    "options",
    [
        {"transform": v2.Compose([v2.ColorJitter(0.1), *TRAIN.transforms])},
        {"transform": v2.RandomResizedCrop(24, interpolation=3)},
        {"transform": TRAIN, "loader": datasets.folder.pil_loader},
    ],
)
def test_folder_that_cannot_scale_says_so(root, options):
    """Silently doing without would hide that nothing got faster."""
    with pytest.raises(UnsupportedOptionError, match=r"scaled=True needs .*begins with a bilinear"):
        ImageFolder(root, **options, scaled=True)


def test_cached_samples_of_both_kinds_are_kept_apart(root, tmp_path):
    """A cache of whole pictures' samples is not taken for one of reduced ones."""
    inner = {scaled: ImageFolder(root, VALIDATION, scaled=scaled) for scaled in (False, True)}
    for scaled in (False, True, False, True):
        (found, _), (expected, _) = cached(inner[scaled], tmp_path)[0], inner[scaled][0]
        assert torch.equal(found, expected)
