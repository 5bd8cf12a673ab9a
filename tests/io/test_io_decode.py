"""decode_image: every kind of file becomes what Pillow makes of it, or one DecodeError. And what
programs written for Pillow and torchvision rely on: formats, ``info``, and their errors."""

import pickle
import re
import struct
import warnings
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, ImageOps
from support.pictures import KINDS, encode, photograph, png, png16
from torchvision import datasets, transforms

from spdl_torch import ImageFolder, io
from spdl_torch.data.sources import TarShards
from spdl_torch.errors import DecodeError
from spdl_torch.io._remote import is_transient


def pillow(content, turn=lambda image: image):
    with Image.open(BytesIO(content)) as image:
        return torch.from_numpy(np.array(turn(image).convert("RGB"))).permute(2, 0, 1)


def tagged(orientation=6):
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


@pytest.mark.parametrize("kind", KINDS)
def test_decode_image_equals_pillow(kind):
    """Every kind of file gives the pixels of Pillow's convert("RGB")."""
    image = io.decode_image(KINDS[kind])
    assert image.dtype == torch.uint8
    assert torch.equal(image, pillow(KINDS[kind]))


def test_decode_image_keeps_high_byte_of_16_bit_gray():
    """16-bit gray keeps its shades (Pillow's convert would saturate nearly all to white)."""
    content, samples = png16(0, 1)
    expected = torch.from_numpy(samples[..., 0] >> 8).to(torch.uint8)
    tiff = encode(Image.fromarray(samples[..., 0].astype(np.uint16)), "TIFF")
    height, width = expected.shape
    place = struct.pack("<BBBBHHII", width, height, 0, 0, 1, 16, len(content), 22)
    icon = struct.pack("<HHH", 0, 1, 1) + place + content
    for each in (content, tiff, icon):
        assert torch.equal(io.decode_image(each), expected.expand(3, -1, -1))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_decode_image_turns_by_exif_only_when_asked(file_format, orientation):
    """The picture is as stored by default, and upright with apply_exif_orientation."""
    content = encode(photograph(), file_format, exif=tagged(orientation))
    upright = pillow(content, ImageOps.exif_transpose)
    assert torch.equal(io.decode_image(content, apply_exif_orientation=True), upright)
    assert torch.equal(io.decode_image(content), pillow(content))


@pytest.mark.parametrize("change", ["another segment before it", "damaged name"])
def test_decode_image_turns_by_the_segment_that_has_exifs_name(change):
    """Whatever else there is of that kind, as Pillow does."""
    content = encode(photograph(), "JPEG", exif=tagged())
    if change == "damaged name":
        content = content.replace(b"Exif\0\0", b"exif\0\0", 1)
    else:
        words = b"http://ns.adobe.com/xap/1.0/\0"
        length = struct.pack(">H", 2 + len(words))
        content = content[:2] + b"\xff\xe1" + length + words + content[2:]
    expected = pillow(content, ImageOps.exif_transpose)
    assert (expected.shape[1:] == (97, 61)) == (change != "damaged name")
    assert torch.equal(io.decode_image(content, apply_exif_orientation=True), expected)


CUT = ["jpeg", "jpeg progressive", "jpeg CMYK", "png", "png palette", "webp", "gif", "bmp", "tiff"]


@pytest.mark.parametrize("kind", CUT)
@pytest.mark.parametrize("kept", [0.02, 0.3, 0.9])
def test_decode_image_truncated(tmp_path, kind, kept):
    """A file that was cut off is refused by name; half a picture never trains silently."""
    path = tmp_path / "cut.jpg"
    path.write_bytes(KINDS[kind][: int(len(KINDS[kind]) * kept)])
    with pytest.raises(DecodeError, match=re.escape(str(path)) + ": ..."):
        io.decode_image(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (KINDS["jpeg"][:-200], "Image is incomplete or truncated$"),
        (b"", "the file is empty"),
        (b"<html><body>404</body></html>", "cannot identify image file$"),
        (encode(photograph(), "EPS"), "cannot identify image file$"),  # Pillow starts a program
    ],
)
def test_decode_image_names_file_and_reason(tmp_path, content, message):
    """Without the codec's source path. What would control a terminal in a name is shown, also in
    the batch's error and after a pickle; nothing else of the text changes."""
    path = tmp_path / "a\x1b[2J\u202eb\n ü.jpg"
    path.write_bytes(content)
    for load in (io.decode_image, lambda path: io.load_image_batch([path], width=8, height=8)):
        match = r"/a\\x1b\[2J\\u202eb\n ü\.jpg: .*" + message
        with pytest.raises(DecodeError, match=match) as caught:
            load(path)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        assert load is not io.decode_image or "truncated" not in message or caught.value.__cause__
        with pytest.raises(DecodeError, match="^<bytes>: .*" + message):
            load(content)


def test_decode_image_small_file_with_huge_size():
    """A header that promises more than Pillow's limit is refused before any allocation."""
    jpeg = KINDS["jpeg progressive"]
    place = jpeg.index(b"\xff\xc2") + 5
    huge = jpeg[:place] + struct.pack(">HH", 65_000, 65_000) + jpeg[place + 4 :]
    for bomb in (png(60_000, 60_000, 8, 2, bytes(5000)), huge):
        with pytest.raises(DecodeError, match="limit"):
            io.decode_image(bomb)


def test_decode_image_obeys_pillow_pixel_limit(monkeypatch):
    """The limit is Pillow's own, so a script that moved it there is obeyed."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 61 * 97 // 2 - 1)
    for kind in ("jpeg", "png", "webp", "bmp"):
        for load in (io.decode_image, lambda content: io.load_image(content, 9, 9, scaled=True)):
            with pytest.raises(DecodeError, match="limit"):
                load(KINDS[kind])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert io.decode_image(KINDS["jpeg"]).shape == (3, 61, 97)


RNG = np.random.default_rng(0)
PICTURE = Image.fromarray(np.kron(RNG.integers(0, 256, (4, 6, 3)), np.ones((8, 8, 1))).astype("u1"))

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
    folder = tmp_path_factory.mktemp("images")
    (folder / "a").mkdir()
    for name, content in FILES.items():
        (folder / "a" / name).write_bytes(content)
    return folder


RESIZE, CENTER = [transforms.Resize((24, 24))], [transforms.Resize(24), transforms.CenterCrop(20)]


@pytest.mark.parametrize("steps", [[], RESIZE, CENTER, [ImageOps.exif_transpose]])
@pytest.mark.parametrize("cache", [None, "memory"])
def test_transforms_get_the_images_of_torchvision(root, steps, cache):
    """Mode and size, alone and behind what runs on a whole batch, before that info, too; upright by
    Pillow's own function, as photographs of phones have to be turned."""
    has_info = steps in ([], [ImageOps.exif_transpose])
    steps = transforms.Compose([*steps, lambda image: image]) if steps else None
    ours = ImageFolder(root, steps, cache=cache)
    batch = ours.__getitems__(range(len(ours)))
    for k, (expected, _) in enumerate(datasets.ImageFolder(root, steps)):
        for image in (ours[k][0], batch[k][0]):
            assert (image.mode, image.size) == (expected.mode, expected.size)
            assert not has_info or image.info == expected.info, ours.samples[k][0]
            assert not has_info or image.getexif() == expected.getexif()
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
    with pytest.raises(DecodeError, match="<bytes>: cannot identify image file"):
        io.decode_image(content)
    for name in ("OPEN", "ID"):
        monkeypatch.setattr(Image, name, getattr(Image, name).copy())
    Image.register_open("SOMEHEIF", Plugin, lambda head: head[:8] == b"SOMEHEIF")
    expected = torch.arange(48, dtype=torch.uint8).view(4, 4, 3).permute(2, 0, 1)
    assert torch.equal(io.decode_image(content), expected)


def test_decode_errors_are_what_pillow_and_spdl_raise(tmp_path):
    """OSError for programs that leave out what Pillow cannot read; ValueError as before."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "cut.jpg").write_bytes(FILES["phone.jpg"][:-200])
    (tmp_path / "a" / "page.jpg").write_bytes(b"<html>404</html>")
    folder = ImageFolder(tmp_path, transforms.PILToTensor())
    for load in (
        lambda: folder[0],
        lambda: folder[1],
        lambda: io.load_clip(b"no video", lambda info: [0.0]),
        lambda: list(TarShards(str(tmp_path / "a" / "page.jpg"), index=False)),
        lambda: io.load_npy(b"no array"),
    ):
        for kind in (OSError, ValueError):
            with pytest.raises(kind, match=r"page\.jpg|cut\.jpg|<bytes>") as caught:
                load()
            assert isinstance(caught.value, DecodeError)
            assert not is_transient(caught.value)
            assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_cut_files_are_read_as_pillow_is_told_to(monkeypatch):
    """However few bytes are left of a large picture."""
    noise = Image.fromarray(RNG.integers(0, 256, (1024, 1024, 3), dtype="u1"))
    for content in (encode(noise, "JPEG")[:900], encode(noise, "PNG")[:300]):
        with pytest.raises(DecodeError, match="<bytes>: "):
            io.decode_image(content)
        monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
        expected = pillow(content)
        assert torch.equal(io.decode_image(content), expected)
        (one,) = io.load_image_batch([content], width=1024, height=1024)
        assert torch.equal(one.permute(2, 0, 1), expected)
        monkeypatch.undo()


@pytest.mark.parametrize("name", ["turned.webp", "turned.png"])
def test_a_warning_of_many_pixels_is_pillows(monkeypatch, name):
    """Given once for every picture that it opens, and an error for programs that make it one; these
    may ask for the good ones alone."""
    small = encode(Image.new("RGB", (4, 4), "red"), "JPEG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", PICTURE.width * PICTURE.height - 1)
    for load in (
        io.decode_image,
        lambda content: io.load_image_batch([content], width=8, height=8),
        lambda content: io.load_image(content, 8, 8, scaled=True),
    ):
        with pytest.warns(Image.DecompressionBombWarning, match="1536 pixels") as seen:
            load(FILES[name])
        assert len(seen) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with pytest.raises(Image.DecompressionBombWarning, match=r"^<bytes>: .*1536 pixels"):
                load(FILES[name])
            files = [FILES[name], small]
            assert len(io.load_image_batch(files, width=8, height=8, strict=False)) == 1
            with pytest.raises(DecodeError, match=r"none of the 1 images .*1536 pixels"):
                io.load_image_batch(files[:1], width=8, height=8, strict=False)
