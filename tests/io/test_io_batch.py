"""Loading at one size: the batch kernel against torchvision and its own eager twin."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.folders import PHOTOGRAPHS
from support.jpegs import CODECS, KINDS, WAYS, by, running
from support.pictures import KINDS as FILES, encode, photograph
from torchvision import transforms as v1
from torchvision.transforms import v2

from spdl_torch import io
from spdl_torch.errors import DecodeError, UnsupportedOptionError
from spdl_torch.io._image import images, kernel

SIZES = [(375, 500), (500, 375), (300, 300), (61, 97), (224, 224), (120, 640), (9, 7), (1, 1)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """JPEGs of all shapes, other pictures, and real photographs where the machine has them."""
    folder = tmp_path_factory.mktemp("photographs")
    for seed, size in enumerate(SIZES):
        photograph(*size, seed).save(folder / f"{seed}.jpg", quality=90)
    for kind in ("jpeg gray", "jpeg CMYK", "png alpha", "gif", "webp"):
        (folder / f"a {kind}").write_bytes(FILES[kind])
    return [*sorted(folder.iterdir()), *sorted(PHOTOGRAPHS.rglob("*.JPEG"))[::20]]


def test_load_image_has_its_planes_in_front_at_every_size(paths):
    """As decode_image has; a side that is left open follows the picture's shape."""
    for path in paths:
        stored = io.decode_image(path)
        assert torch.equal(io.load_image(path), stored)
        height, width = stored.shape[1:]
        assert io.load_image(path, 2 * width).shape == (3, 2 * height, 2 * width)
        assert io.load_image(path, height=3 * height).shape == (3, 3 * height, 3 * width)
        half = io.load_image(path, crop=lambda h, w: io.Crop(0, 0, -(-h // 2), w))
        assert torch.equal(half, stored[:, : -(-height // 2)])


def test_load_image_batch_equals_torchvision(paths):
    """Bit for bit torchvision v2's antialiased resize of each picture, of paths and of bytes."""
    batch = io.load_image_batch(paths, width=96, height=64)
    contents = [path.read_bytes() for path in paths]
    assert torch.equal(io.load_image_batch(contents, width=96, height=64), batch)
    assert batch.shape == (len(paths), 64, 96, 3)
    assert batch.is_contiguous()
    for path, image in zip(paths, batch, strict=True):
        expected = v2.functional.resize(io.decode_image(path), [64, 96], antialias=True)
        assert torch.equal(image.permute(2, 0, 1), expected)
        assert torch.equal(io.load_image(path, 96, 64), expected)


def test_random_resized_crop_equals_torchvision(paths):
    """Same seed, same crops and flips, same pixels as torchvision's two transforms; the same bits
    in every way in which the kernel runs."""
    transform = v2.Compose([v2.RandomResizedCrop((64, 96)), v2.RandomHorizontalFlip()])
    torch.manual_seed(11)
    expected = torch.stack([transform(io.decode_image(path)) for path in paths])
    for way in WAYS:
        torch.manual_seed(11)
        with running(way):
            batch = io.load_image_batch(paths, width=96, height=64, crop=io.random_resized_crop)
        assert torch.equal(batch.permute(0, 3, 1, 2), expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ratio", [(3 / 4, 4 / 3), (2.0, 3.0), (0.1, 0.2)])
@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.9, 1.0)])
def test_random_resized_crop_draws_torchvisions_box(scale, ratio, way):
    """Same seed, same box, and the generator ends in the same state (fallback box included);
    nothing is drawn for a flip that is not wanted."""
    for seed, (height, width) in enumerate([*SIZES, (20, 900), (900, 20)] * 5):
        torch.manual_seed(seed)
        picture = torch.empty(3, height, width)
        expected = v1.RandomResizedCrop.get_params(picture, list(scale), list(ratio))
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        with running(way):
            crop = io.random_resized_crop(height, width, scale=scale, ratio=ratio, flip=None)
        assert crop == io.Crop(*expected, flip=False)
        assert torch.equal(torch.get_rng_state(), state)


@st.composite
def plans(draw):
    """Of a picture of 40 x 50: empty boxes, and windows beside which there is nothing, as well."""
    height, width = draw(st.integers(0, 40)), draw(st.integers(0, 50))
    top, left = draw(st.integers(0, 40 - height)), draw(st.integers(0, 50 - width))
    resized = draw(st.just((12, 10)) | st.tuples(st.integers(1, 30), st.integers(1, 30)))
    offsets = st.integers(-11, resized[0] - 1), st.integers(-9, resized[1] - 1)
    window = draw(st.just((0, 0)) | st.tuples(*offsets))
    box = top, left, height, width
    return kernel.PicturePlan((40, 50), box, resized, window, draw(st.booleans()))


@settings(max_examples=60)
@given(st.lists(st.tuples(plans(), st.booleans()), min_size=1, max_size=4))
def test_kernel_has_the_same_bits_in_every_way(given):
    """Pictures as bytes and as pixels, in every geometry; another size than planned is refused."""
    data = torch.frombuffer(bytearray(DAMAGED[1]), dtype=torch.uint8)
    pictures = [data if is_bytes else io.decode_image(data) for _, is_bytes in given]
    found = []
    for way in WAYS:
        batch = torch.full((len(given), 12, 10, 3), 7, dtype=torch.uint8).permute(0, 3, 1, 2)
        fill = partial(kernel.fill_batch, pictures, batch=batch, decoder="image::decode_image")
        with running(way):
            fill([plan for plan, _ in given])
            with pytest.raises(RuntimeError, match="not the size in the header"):
                fill([plan._replace(size=(50, 40)) for plan, _ in given])
        found.append(batch)
    assert all(torch.equal(each, found[0]) for each in found)


def load_one(path, width=8, height=8, **options):
    return io.load_image_batch([path], width=width, height=height, **options)


SIZE = {"width": 8, "height": 8}


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        *(
            (
                partial(load, crop=lambda height, width: io.Crop(0, 0, 999, 9), **SIZE),
                *(ValueError, r"Crop\(top=0.*outside the picture of height=375"),
            )
            for load in (io.load_image, load_one)
        ),
        (partial(io.load_image, width=2.5), TypeError, "cannot be interpreted as an integer"),
        (partial(load_one, device_config=1), UnsupportedOptionError, "Pass None and move the"),
        (lambda _: io.load_image_batch([], **SIZE), ValueError, "at least one image"),
        (lambda path: io.decode_image(path.with_name("gone.jpg")), FileNotFoundError, r"gone\.jpg"),
        (lambda _: io.decode_image(7), TypeError, "got int"),
        (lambda _: io.decode_image(torch.zeros(3, 4, 4)), TypeError, "uint8 with one dimension"),
    ],
)
def test_call_that_cannot_be_meant_is_refused(paths, call, error, match):
    """The caller's mistake, not the data's: it says where, what was given, and what to do."""
    with pytest.raises(error, match=match):
        call(paths[0])


def test_what_numpy_holds_is_taken(paths):
    """Sizes, as whatever has an index, and paths, as those of a table."""
    assert io.load_image(paths[0], np.int64(6), torch.tensor(5)).shape == (3, 5, 6)
    names = np.array([str(path) for path in paths])
    assert len(io.load_image_batch(names, width=6, height=5)) == len(paths)


@pytest.fixture
def mixed(tmp_path):
    """A folder as folders are: PNG, GIF and WebP between the JPEGs."""
    for seed, kind in enumerate(["JPEG", "PNG", "JPEG", "JPEG", "GIF", "WEBP", "PNG"]):
        photograph(50 + 10 * seed, 90, seed).save(tmp_path / f"{seed}.img", kind)
    return sorted(tmp_path.iterdir())


def test_load_image_batch_not_strict_drops_bad_files(mixed):
    """JPEG or PNG; strict=False keeps the good images in order, and raises if there are none or one
    is missing: otherwise, one error has a file's name."""
    for bad in (2, 1):
        mixed[bad].write_bytes(mixed[bad].read_bytes()[:-100])
        with pytest.raises(DecodeError, match=rf"/{bad}\.img: .*truncated"):
            io.load_image_batch(mixed, width=40, height=40)
    mixed[4].write_bytes(b"")
    good = [path for k, path in enumerate(mixed) if k not in (1, 2, 4)]
    kept = io.load_image_batch(mixed, width=40, height=40, strict=False)
    assert torch.equal(kept, io.load_image_batch(good, width=40, height=40))
    with pytest.raises(DecodeError, match=r"none of the 2 images can be decoded.*[24]\.img"):
        io.load_image_batch([mixed[2], mixed[4]], width=40, height=40, strict=False)
    with pytest.raises(FileNotFoundError, match=r"gone\.jpg"):  # which is not the data's fault
        io.load_image_batch([mixed[0], mixed[0].with_name("gone.jpg")], **SIZE, strict=False)


def test_load_image_batch_header_that_lies(mixed, monkeypatch):
    """Crop boxes were made for the size in the header: another size is refused, not cropped."""
    monkeypatch.setattr(images.decode, "header_size", lambda data, name, **_: (30, 40))
    with pytest.raises(DecodeError, match=r"0\.img: the header says height and width \(30, 40\)"):
        io.load_image_batch(mixed, width=40, height=40)


DAMAGED = [KINDS["4:2:0"], encode(photograph(40, 50), "JPEG"), encode(photograph(40, 50), "PNG")]


@settings(max_examples=80)
@given(
    st.sampled_from(DAMAGED),
    st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), max_size=6),
    st.none() | st.floats(0, 1),
    st.sampled_from(CODECS),
    st.sampled_from(WAYS),
    st.booleans(),
)
def test_damaged_neighbour_changes_no_other_image(content, edits, cut, codec, way, scaled):
    """Whatever becomes of a damaged file, the other images of the batch are as without it."""
    content = bytearray(content)
    for place, value in edits:
        content[int(place**2 * len(content))] = value  # squared: more edits near the header
    content = bytes(content if cut is None else content[: int(cut * len(content))])
    good = KINDS["gray"]
    load = partial(by(codec, io.load_image_batch), width=16, height=16, scaled=scaled)
    with running(way):
        batch, expected = load([good, content, good], strict=False), load([good])[0]
    assert len(batch) in (2, 3)
    assert torch.equal(batch[0], expected)
    assert torch.equal(batch[-1], expected)
    if len(batch) == 2:
        with pytest.raises(DecodeError, match=r"^<bytes>: "):
            load([good, content])
