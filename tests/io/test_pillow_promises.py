"""What programs written for Pillow and torchvision rely on: formats, ``info``, and their errors."""

import io
import pickle
import warnings

import numpy as np
import pytest
import torch
from _pictures import encode
from PIL import Image, ImageFile, ImageOps
from torchvision import datasets, transforms

from spdl_torch import ImageFolder
from spdl_torch.data.sources import TarShards
from spdl_torch.errors import DecodeError
from spdl_torch.io import (
    decode_image,
    image_loader,
    load_clip,
    load_image,
    load_image_batch,
    load_npy,
)
from spdl_torch.io._retry import is_transient

RNG = np.random.default_rng(0)
PICTURE = Image.fromarray(np.kron(RNG.integers(0, 256, (4, 6, 3)), np.ones((8, 8, 1))).astype("u1"))


def tagged():
    """EXIF that turns the picture."""
    tags = Image.Exif()
    tags[0x0112] = 6
    return tags


FILES = {
    "phone.jpg": encode(PICTURE, "JPEG", exif=tagged(), dpi=(72, 72), icc_profile=b"profile"),
    "plain.jpg": encode(PICTURE, "JPEG", comment="words", progressive=True),
    "gray.jpg": encode(PICTURE.convert("L"), "JPEG", exif=tagged()),
    "inks.jpg": encode(PICTURE.convert("CMYK"), "JPEG"),
    "turned.png": encode(PICTURE, "PNG", exif=tagged(), dpi=(100, 100), icc_profile=b"profile"),
    "clear.png": encode(PICTURE.convert("L"), "PNG", transparency=7),
    "palette.png": encode(PICTURE.quantize(16), "PNG", transparency=3),
    "turned.webp": encode(PICTURE, "WEBP", exif=tagged(), icc_profile=b"profile"),
    "palette.gif": encode(PICTURE.quantize(16), "GIF", transparency=3, comment=b"words"),
    "turned.tif": encode(PICTURE, "TIFF", exif=tagged(), dpi=(72, 72)),
    "plain.bmp": encode(PICTURE, "BMP"),
    **{f"{kind}.jpg": encode(PICTURE, kind) for kind in ("TGA", "PCX", "SGI", "DDS", "QOI")},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder of all of them."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "a").mkdir()
    for name, content in FILES.items():
        (folder / "a" / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [transforms.Resize((24, 24))],
        [transforms.Resize(24), transforms.CenterCrop(20)],
        [ImageOps.exif_transpose],
    ],
)
@pytest.mark.parametrize("cache", [None, "memory"])
def test_transforms_get_the_images_of_torchvision(root, steps, cache):
    """Mode, size and info, alone and behind what runs on a whole batch; also upright, by Pillow's
    own function, as photographs of phones have to be turned."""
    steps = transforms.Compose([*steps, lambda image: image]) if steps else None
    ours = ImageFolder(root, steps, cache=cache)
    batch = ours.__getitems__(range(len(ours)))
    for k, (expected, _) in enumerate(datasets.ImageFolder(root, steps)):
        for image in (ours[k][0], batch[k][0]):
            assert (image.mode, image.size) == (expected.mode, expected.size)
            assert image.info == expected.info, ours.samples[k][0]
            assert image.getexif() == expected.getexif()
            difference = np.asarray(image).astype(int) - np.asarray(expected)
            assert abs(difference).max() <= 1, ours.samples[k][0]


def test_formats_of_plugins_are_decoded(monkeypatch):
    """As soon as the program has registered them."""

    class Plugin(ImageFile.ImageFile):
        format, format_description = "SOMEHEIF", "a format of the program's own"

        def _open(self):
            self._mode, self._size = "RGB", (4, 4)
            self.tile = [("raw", (0, 0, 4, 4), 8, ("RGB", 0, 1))]

    content = b"SOMEHEIF" + bytes(range(48))
    with pytest.raises(DecodeError, match="<bytes>: not an image: it starts with b'SOMEHEIF'"):
        decode_image(content)
    for name in ("OPEN", "ID"):
        monkeypatch.setattr(Image, name, getattr(Image, name).copy())
    Image.register_open("SOMEHEIF", Plugin, lambda head: head[:8] == b"SOMEHEIF")
    expected = torch.arange(48, dtype=torch.uint8).view(4, 4, 3).permute(2, 0, 1)
    assert torch.equal(decode_image(content), expected)


def test_decode_errors_are_what_pillow_and_spdl_raise(tmp_path):
    """OSError for programs that leave out what Pillow cannot read; ValueError as before."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "cut.jpg").write_bytes(FILES["phone.jpg"][:-200])
    (tmp_path / "a" / "page.jpg").write_bytes(b"<html>404</html>")
    folder = ImageFolder(tmp_path, transforms.PILToTensor())
    for load in (
        lambda: folder[0],
        lambda: folder[1],
        lambda: load_clip(b"no video", lambda info: [0.0]),
        lambda: list(TarShards(str(tmp_path / "a" / "page.jpg"), index=False)),
        lambda: load_npy(b"no array"),
    ):
        for kind in (OSError, ValueError):
            with pytest.raises(kind, match=r"page\.jpg|cut\.jpg|<bytes>") as caught:
                load()
            assert isinstance(caught.value, DecodeError)
            assert not is_transient(caught.value)
            assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_cut_files_are_read_as_pillow_is_told_to(monkeypatch):
    """However few bytes are left of a large picture."""
    noise = Image.fromarray(RNG.integers(0, 256, (512, 512, 3), dtype="u1"))
    whole = encode(noise, "PNG")
    cut = whole[:300] if Image.open(io.BytesIO(whole[:300])).size else whole
    jpeg = encode(noise, "JPEG")[:900]
    for content in (jpeg, cut):
        with pytest.raises(DecodeError, match="<bytes>: "):
            decode_image(content)
        monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
        expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        assert np.array_equal(decode_image(content).permute(1, 2, 0), expected)
        (one,) = load_image_batch([content], width=512, height=512)
        assert np.array_equal(one, expected)
        monkeypatch.undo()


@pytest.mark.parametrize("name", ["plain.jpg", "turned.webp", "turned.png"])
def test_a_warning_of_many_pixels_is_pillows(monkeypatch, name):
    """Given once for every picture that has them, and an error for programs that make it one; these
    may ask for the good ones alone."""
    small = encode(Image.new("RGB", (4, 4), "red"), "JPEG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", PICTURE.width * PICTURE.height - 1)
    for load in (
        decode_image,
        lambda content: load_image_batch([content], width=8, height=8),
        lambda content: load_image(content, 8, 8, scaled=True),
    ):
        with pytest.warns(Image.DecompressionBombWarning, match="1536 pixels") as seen:
            load(FILES[name])
        assert len(seen) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with pytest.raises(Image.DecompressionBombWarning, match=r"^<bytes>: .*1536 pixels"):
                load(FILES[name])
            files = [FILES[name], small]
            assert len(load_image_batch(files, width=8, height=8, strict=False)) == 1
            with pytest.raises(DecodeError, match=r"none of the 1 images .*1536 pixels"):
                load_image_batch(files[:1], width=8, height=8, strict=False)


@pytest.mark.parametrize(("kind", "name"), [("JPEG", "phone.jpg"), ("WEBP", "turned.webp")])
def test_a_plugin_that_replaces_pillows_own_is_asked(monkeypatch, root, kind, name):
    """Wherever a picture is decoded, alone and in batches."""
    Image.init()
    own, accept = Image.OPEN[kind]

    def opened(file, filename):
        image = own(file, filename).convert("RGB")
        return ImageOps.invert(image)

    inverted = torch.from_numpy(255 - np.asarray(Image.open(root / "a" / name).convert("RGB")))
    monkeypatch.setitem(Image.OPEN, kind, (opened, accept))
    assert torch.equal(decode_image(root / "a" / name).permute(1, 2, 0), inverted)
    assert torch.equal(image_loader(root / "a" / name, at_least=(8, 8)).permute(1, 2, 0), inverted)
    size = {"width": PICTURE.width, "height": PICTURE.height}
    (one,) = load_image_batch([root / "a" / name], **size)
    assert torch.equal(one, inverted)
    folder = ImageFolder(root, lambda image: np.asarray(image))
    place = [path for path, _ in folder.samples].index(str(root / "a" / name))
    assert np.array_equal(folder[place][0], inverted)


def test_arrays_follow_each_other_in_a_file():
    """As numpy leaves the position after the array."""
    file = io.BytesIO()
    arrays = [np.arange(3), np.zeros((2, 0)), np.arange(4.0)]
    for array in arrays:
        np.save(file, array)
    file.write(b"the rest")
    file.seek(0)
    for array in arrays:
        assert np.array_equal(load_npy(file), array)
    assert file.read() == b"the rest"
