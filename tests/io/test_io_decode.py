"""decode_image: every kind of file becomes what Pillow makes of it, or one DecodeError."""

import io
import pickle
import re
import struct

import numpy as np
import pytest
import torch
from _pictures import KINDS, encode, photograph, png, png16
from PIL import Image, ImageOps

from spdl_torch.errors import DecodeError
from spdl_torch.io import decode_image, load_image, load_image_batch
from spdl_torch.io._image import pillow as by_pillow


def pillow(content):
    with Image.open(io.BytesIO(content)) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


@pytest.mark.parametrize("strip_rows", [4, None])
@pytest.mark.parametrize("kind", KINDS)
def test_decode_image_equals_pillow(monkeypatch, kind, strip_rows):
    """Every kind of file gives the pixels of Pillow's convert("RGB"); also where Pillow decodes and
    a large picture is converted in strips, the last of which is shorter."""
    expected = pillow(KINDS[kind])
    if strip_rows is not None:
        monkeypatch.setattr(by_pillow, "_STRIP_PIXELS", strip_rows * expected.shape[2])
    image = decode_image(KINDS[kind])
    assert image.dtype == torch.uint8
    assert torch.equal(image, expected)


@pytest.mark.parametrize("strip_pixels", [60, by_pillow._STRIP_PIXELS])
def test_decode_image_keeps_high_byte_of_16_bit_gray(monkeypatch, strip_pixels):
    """16-bit gray keeps its shades (Pillow's convert would saturate nearly all to white), in each
    strip."""
    monkeypatch.setattr(by_pillow, "_STRIP_PIXELS", strip_pixels)
    content, samples = png16(0, 1)
    expected = torch.from_numpy(samples[..., 0] >> 8).to(torch.uint8)
    assert torch.equal(decode_image(content), expected.expand(3, -1, -1))
    tiff = encode(Image.fromarray(samples[..., 0].astype(np.uint16)), "TIFF")
    assert torch.equal(decode_image(tiff), expected.expand(3, -1, -1))
    height, width = expected.shape
    place = struct.pack("<BBBBHHII", width, height, 0, 0, 1, 16, len(content), 22)
    icon = struct.pack("<HHH", 0, 1, 1) + place + content
    assert torch.equal(decode_image(icon), expected.expand(3, -1, -1))


def upright(content):
    """What Pillow turns the picture to."""
    with Image.open(io.BytesIO(content)) as image:
        turned = ImageOps.exif_transpose(image).convert("RGB")
    return torch.from_numpy(np.array(turned)).permute(2, 0, 1)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_decode_image_turns_by_exif_only_when_asked(file_format, orientation):
    """The picture is as stored by default, and upright with apply_exif_orientation."""
    exif = Image.Exif()
    exif[0x112] = orientation
    content = encode(photograph(), file_format, exif=exif)
    assert torch.equal(decode_image(content, apply_exif_orientation=True), upright(content))
    assert torch.equal(decode_image(content), pillow(content))


@pytest.mark.parametrize("change", ["another segment before it", "damaged name"])
def test_decode_image_turns_by_the_segment_that_has_exifs_name(change):
    """Whatever else there is of that kind, as Pillow does."""
    exif = Image.Exif()
    exif[0x112] = 6
    content = encode(photograph(), "JPEG", exif=exif)
    if change == "damaged name":
        content = content.replace(b"Exif\0\0", b"exif\0\0", 1)
    else:
        words = b"http://ns.adobe.com/xap/1.0/\0"
        length = struct.pack(">H", 2 + len(words))
        content = content[:2] + b"\xff\xe1" + length + words + content[2:]
    expected = upright(content)
    assert (expected.shape[1:] == (97, 61)) == (change != "damaged name")
    assert torch.equal(decode_image(content, apply_exif_orientation=True), expected)


def test_decode_image_takes_every_kind_of_source(tmp_path):
    """Path, str, bytes, bytearray, memoryview, tensor and file object give the same picture."""
    content = KINDS["jpeg"]
    path = tmp_path / "photo.png"  # the name lies, the content counts
    path.write_bytes(content)
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    sources = [path, str(path), bytearray(content), memoryview(content), tensor]
    for source in [*sources, io.BytesIO(content)]:
        assert torch.equal(decode_image(source), decode_image(content))
    with path.open("rb") as file:
        assert torch.equal(decode_image(file), decode_image(content))


CUT = ["jpeg", "jpeg progressive", "jpeg CMYK", "png", "png palette", "webp", "gif", "bmp", "tiff"]


@pytest.mark.parametrize("kind", CUT)
@pytest.mark.parametrize("kept", [0.02, 0.3, 0.9])
def test_decode_image_truncated(tmp_path, kind, kept):
    """A file that was cut off is refused by name; half a picture never trains silently."""
    path = tmp_path / "cut.jpg"
    path.write_bytes(KINDS[kind][: int(len(KINDS[kind]) * kept)])
    with pytest.raises(DecodeError, match=re.escape(str(path)) + ": ..."):
        decode_image(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (KINDS["jpeg"][:-200], "Image is incomplete or truncated$"),
        (b"", "the file is empty"),
        (b"<html><body>404</body></html>", "not an image: it starts with b'<html>"),
        (encode(photograph(), "EPS"), "EPS, which Pillow leaves to Ghostscript"),  # a program
    ],
)
def test_decode_image_names_file_and_reason(tmp_path, content, message):
    """Without the codec's source path. What would control a terminal in a name is shown, also in
    the batch's error and after a pickle; nothing else of the text changes."""
    path = tmp_path / "a\x1b[2J\u202eb\n ü.jpg"
    path.write_bytes(content)
    for load in (decode_image, lambda path: load_image_batch([path], width=8, height=8)):
        match = r"/a\\x1b\[2J\\u202eb\n ü\.jpg: .*" + message
        with pytest.raises(DecodeError, match=match) as caught:
            load(path)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        assert load is not decode_image or "truncated" not in message or caught.value.__cause__
        with pytest.raises(DecodeError, match="^<bytes>: .*" + message):
            load(content)


def bomb_png(side=60_000):
    return png(side, side, 8, 2, b"\0" * 5000)


def bomb_jpeg():
    jpeg = KINDS["jpeg progressive"]
    start = jpeg.index(b"\xff\xc2")
    return jpeg[: start + 5] + struct.pack(">HH", 65_000, 65_000) + jpeg[start + 9 :]


@pytest.mark.parametrize("bomb", [bomb_png(), bomb_jpeg()])
def test_decode_image_small_file_with_huge_size(bomb):
    """A header that promises more than the file can hold is refused before any allocation."""
    with pytest.raises(DecodeError, match="too many for"):
        decode_image(bomb)


def test_decode_image_obeys_pillow_pixel_limit(monkeypatch):
    """The limit is Pillow's own, so a script that moved it there is obeyed."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 61 * 97 // 2 - 1)
    for kind in ("jpeg", "png", "webp", "bmp"):
        for load in (decode_image, lambda content: load_image(content, 9, 9, scaled=True)):
            with pytest.raises(DecodeError, match="limit"):
                load(KINDS[kind])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert decode_image(KINDS["jpeg"]).shape == (3, 61, 97)


@pytest.mark.parametrize("lossless", [False, True])
def test_a_webp_longer_than_it_says_is_what_pillow_makes_of_it(lossless):
    """Bytes that came into it make another picture of the rest, where they are not noticed."""
    photograph(24, 20).save(buffer := io.BytesIO(), "WEBP", lossless=lossless)
    good, refused = buffer.getvalue(), 0
    for place in range(20, len(good), 11):
        bad = good[:place] + bytes(range(place % 50)) + good[place:]
        try:
            expected = Image.open(io.BytesIO(bad)).convert("RGB")
        except Exception:
            with pytest.raises(DecodeError, match=r"^<bytes>: "):
                decode_image(bad)
            refused += 1
        else:
            found = decode_image(bad).permute(1, 2, 0)
            assert np.array_equal(found, np.asarray(expected)), place
    assert refused
