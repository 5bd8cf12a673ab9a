"""Whatever decodes JPEGs, the pixels, errors and random numbers are the same: those of torchvision;
of libjpeg-turbo, which decodes regions; of torchcodec and Pillow where torchvision has no decoders;
and of all mixtures."""

from ctypes.util import find_library
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.jpegs import KINDS, LIBRARY, OTHER_KINDS, WAYS, boxes, by, decoding_by, having, running
from support.pictures import KINDS as FILES, encode, photograph, png16
from test_io_decode import tagged

from spdl_torch import io
from spdl_torch.errors import DecodeError
from spdl_torch.io._image import decode, libjpeg_turbo

EVERY_KIND = {**FILES, **KINDS, **OTHER_KINDS, "png 16-bit gray": png16(0, 1)[0]}
DECODERS = st.sets(st.sampled_from(["torchvision", "libjpeg-turbo", "torchcodec"]))
needs_library = pytest.mark.skipif(LIBRARY is None, reason="libjpeg-turbo 3 is not installed")


@pytest.fixture(params=["libjpeg-turbo", "libjpeg-turbo alone", "torchcodec", "Pillow"])
def codec(request):
    """What decodes in place of torchvision alone."""
    if request.param == "torchcodec":
        pytest.importorskip("torchcodec", reason="torchcodec is not installed")
    if "libjpeg-turbo" in request.param and LIBRARY is None:
        pytest.skip("libjpeg-turbo 3 is not installed")
    return request.param


@pytest.fixture
def regions(monkeypatch):
    """For each picture of which libjpeg-turbo is asked for a region, whether it gave one."""
    asked, decode_region = [], libjpeg_turbo.LibJpegTurbo.decode_region

    def spy(self, *args):
        found = decode_region(self, *args)
        asked.append(found is not None)
        return found

    monkeypatch.setattr(libjpeg_turbo.LibJpegTurbo, "decode_region", spy)
    return asked


# A decoder that obeys the orientation turns these unnoticed.
TURNED = [encode(photograph(96, 96), "JPEG", exif=tagged(each)) for each in range(1, 9)]


@needs_library
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60)
def test_region_has_the_pixels_of_the_whole_picture(kind, data):
    """Bit for bit, wherever the box lies and however small it is: also at the region's edges,
    where colours are interpolated from samples on both sides."""
    whole = io.decode_image(KINDS[kind])
    top, left, height, width = box = data.draw(boxes(*whole.shape[1:]), label="box")
    load = by("libjpeg-turbo", io.load_image)
    part = load(KINDS[kind], width, height, crop=lambda *_: io.Crop(*box))
    assert torch.equal(part, whole[:, top : top + height, left : left + width])


def test_pixels_are_torchvisions(codec, regions):
    """Every kind of JPEG, and other formats, in one batch and alone."""
    contents = [*EVERY_KIND.values(), *TURNED]

    def load(codec):
        torch.manual_seed(0)
        crop = partial(io.random_resized_crop, scale=(0.1, 0.5))
        return by(codec, io.load_image_batch)(contents, width=40, height=30, crop=crop)

    expected = load("torchvision")
    assert regions == []
    found = load(codec)
    assert "libjpeg-turbo" not in codec or regions.count(True) >= len(KINDS)
    alone = [by("torchvision", io.load_image)(each) for each in contents]
    # An old torchvision has an old libjpeg: there this kind is another picture in Pillow, too.
    old = [*EVERY_KIND].index("4:4:0")
    is_old = not torch.equal(by("Pillow", io.load_image)(contents[old]), alone[old])
    for number, content in enumerate(contents):
        if number != old or not is_old:
            assert torch.equal(found[number], expected[number])
            assert torch.equal(by(codec, io.load_image)(content), alone[number])


def hit(content, data):
    """The file as it is, cut short, or with some bytes in it changed."""
    place = data.draw(st.integers(0, len(content) - 1), label="place")
    new = data.draw(st.none() | st.binary(max_size=20), label="new")
    if new is None:
        return content[: place + 1] if data.draw(st.booleans(), label="cut") else content
    return content[:place] + new + content[place + len(new) :]


@given(data=st.data(), decoders=DECODERS, way=st.sampled_from(WAYS), scaled=st.booleans())
@settings(max_examples=120)
def test_nothing_depends_on_what_is_installed(data, decoders, way, scaled):
    """Every kind of file, sound, turned or damaged, as a whole, in part and at a reduced size: the
    same pixels, or refused, for all sets of decoders and ways of the kernel."""
    content = hit(data.draw(st.sampled_from([*EVERY_KIND.values(), *TURNED])), data)

    def load(decoders, way):
        with having(decoders), running(way):
            try:
                return [
                    io.decode_image(content),
                    io.decode_image(content, apply_exif_orientation=True),
                    io.load_image(content, 20, 10, crop=kept, scaled=scaled),
                ]
            except DecodeError as error:
                return [torch.tensor([*str(error).encode()[:9]])]  # the name

    drawn = {}
    kept = lambda *size: drawn.setdefault(size, io.Crop(*data.draw(boxes(*size))))  # noqa: E731
    expected, found = load(["torchvision"], "eager"), load(decoders, way)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@needs_library
def test_libjpeg_turbo_decodes_whole_pictures_where_torchvision_cannot(regions):
    """It is found there, too, and decodes without the GIL."""
    find = libjpeg_turbo.find_library.__wrapped__
    with decoding_by("libjpeg-turbo alone"):
        assert find().path == LIBRARY.path
    regions.clear()
    by("libjpeg-turbo alone", io.load_image_batch)([*KINDS.values()], width=9, height=9)
    assert regions == [True] * len(KINDS)


def test_torchcodec_decodes_where_torchvision_cannot(monkeypatch):
    """It is torchcodec that decodes, not Pillow."""
    pytest.importorskip("torchcodec", reason="torchcodec is not installed")
    torchcodec, seen = decode.torchcodec_jpeg(), []
    spy = lambda data: seen.append(len(data)) or torchcodec(data)  # noqa: E731
    expected = io.load_image(KINDS["4:2:0"], 50, 40)
    monkeypatch.setattr(decode, "torchcodec_jpeg", lambda: spy)
    for way in WAYS:
        seen.clear()
        with running(way):
            assert torch.equal(by("torchcodec", io.load_image)(KINDS["4:2:0"], 50, 40), expected)
        # The extension calls torchcodec's operator.
        assert seen == ([] if way == "extension" else [len(KINDS["4:2:0"])])


def test_bytes_before_the_first_segment_are_refused(codec):
    """torchcodec would skip them; torchvision and Pillow do not know such a file for a JPEG."""
    for each in ("torchvision", codec):
        with pytest.raises(DecodeError, match=r"nsupported image file|cannot identify"):
            by(each, io.load_image)(KINDS["gray"][:2] + b"\0" + KINDS["gray"][2:], 9, 9)


@pytest.mark.parametrize("wrong", ["not a library", "too old", "other pixels"])
def test_library_that_cannot_serve_is_passed_over(wrong, monkeypatch, tmp_path):
    """A broken file, or a library without version 3's functions, is not an error; and the results
    may not depend on the codec, however a library was built."""
    (path := tmp_path / "libturbojpeg.so.0").write_bytes(b"not a library")
    if wrong == "other pixels":
        own = libjpeg_turbo.LibJpegTurbo.decode_region
        darker = lambda self, *args: own(self, *args) // 2  # noqa: E731
        monkeypatch.setattr(libjpeg_turbo.LibJpegTurbo, "decode_region", darker)
    else:
        found = {"not a library": str(path), "too old": find_library("c")}[wrong]
        monkeypatch.setattr(libjpeg_turbo, "_candidates", lambda: iter([found]))
    assert libjpeg_turbo.find_library.__wrapped__() is None
