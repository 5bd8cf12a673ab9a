"""Whatever decodes JPEGs, the pixels, errors and random numbers are the same: those of torchvision;
of torchcodec, libjpeg-turbo and Pillow where that has no decoders; and of all mixtures."""

import io
import sys
from functools import partial

import pytest
import torch
from _jpegs import KINDS, LIBRARY, OTHER_KINDS, boxes, by, decoding_by, having, jpeg
from _pictures import KINDS as FILES, png16
from hypothesis import given, settings, strategies as st
from PIL import Image
from torchvision.transforms import v2

from spdl_torch import DataLoader, ImageFolder
from spdl_torch.errors import DecodeError
from spdl_torch.io import (
    Crop,
    decode_image,
    image_codec,
    load_image,
    load_image_batch,
    random_resized_crop,
)
from spdl_torch.io._image import decode, libjpeg_turbo

EVERY_KIND = {**FILES, **KINDS, **OTHER_KINDS, "png 16-bit gray": png16(0, 1)[0]}
DECODERS = ["torchvision", "libjpeg-turbo", "torchcodec"]


@pytest.fixture(params=["torchcodec", "libjpeg-turbo alone", "Pillow"])
def codec(request):
    """A library that decodes whole pictures."""
    if request.param == "torchcodec":
        pytest.importorskip("torchcodec", reason="torchcodec is not installed")
    if "libjpeg-turbo" in request.param and LIBRARY is None:
        pytest.skip("libjpeg-turbo 3 is not installed")
    return request.param


def turned(orientation):
    """A square JPEG with an EXIF orientation, which a decoder that obeys it turns unnoticed."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture, buffer = Image.open(io.BytesIO(jpeg(96, 96))), io.BytesIO()
    picture.save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()


TURNED = [turned(each) for each in range(1, 9)]


def test_pixels_are_torchvisions(codec):
    """Every kind of JPEG, and other formats, which are decoded as ever, in one batch."""
    contents = [*EVERY_KIND.values(), *TURNED]

    def load(codec):
        torch.manual_seed(0)
        load_batch = by(codec, load_image_batch)
        return load_batch(contents, width=40, height=30, crop=random_resized_crop)

    assert torch.equal(load(codec), load("torchvision"))
    for content in contents:
        expected = by("torchvision", load_image)(content)
        assert torch.equal(by(codec, load_image)(content), expected)


def hit(content, data):
    """The file as it is, cut short, or with some bytes in it changed."""
    place = data.draw(st.integers(0, len(content) - 1), label="place")
    new = data.draw(st.none() | st.binary(max_size=20), label="new")
    if new is None:
        return content[: place + 1] if data.draw(st.booleans(), label="cut") else content
    return content[:place] + new + content[place + len(new) :]


@given(data=st.data(), decoders=st.sets(st.sampled_from(DECODERS)), scaled=st.booleans())
@settings(deadline=None, max_examples=60)
def test_nothing_depends_on_what_is_installed(data, decoders, scaled):
    """Every kind of file, sound, turned or damaged, as a whole, in part and at a reduced size: the
    same pixels, or refused, for all sets of decoders."""
    content = hit(data.draw(st.sampled_from([*EVERY_KIND.values(), *TURNED])), data)

    def load(decoders):
        with having(decoders):
            try:
                return [
                    decode_image(content),
                    decode_image(content, apply_exif_orientation=True),
                    load_image(content, 20, 10, crop=kept, scaled=scaled),
                ]
            except DecodeError:
                return []

    drawn = {}
    kept = lambda *size: drawn.setdefault(size, Crop(*data.draw(boxes(*size))))  # noqa: E731
    expected, found = load(["torchvision"]), load(decoders)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_torchcodec_decodes_where_torchvision_cannot(monkeypatch):
    """It is torchcodec that decodes, not Pillow."""
    pytest.importorskip("torchcodec", reason="torchcodec is not installed")
    torchcodec, seen = decode.torchcodec_jpeg(), []
    spy = lambda data: seen.append(len(data)) or torchcodec(data)  # noqa: E731
    expected = load_image(KINDS["4:2:0"], 50, 40)
    monkeypatch.setattr(decode, "torchcodec_jpeg", lambda: spy)
    assert torch.equal(by("torchcodec", load_image)(KINDS["4:2:0"], 50, 40), expected)
    assert seen == [len(KINDS["4:2:0"])]


@pytest.mark.parametrize("size", [0, 2, 300, 2000, -100, -1])
def test_truncated_file_has_an_error_that_names_it(codec, size, tmp_path):
    """And in a batch it is left out, with the others unchanged."""
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(KINDS["4:2:0"][:size])
    with pytest.raises(DecodeError, match=r"/bad\.jpg: "):
        by(codec, load_image)(bad, 9, 9)
    load = partial(load_image_batch, width=20, height=20, strict=False)
    good = KINDS["gray"]
    assert torch.equal(by(codec, load)([bad, good]), load([good]))


def test_bytes_before_the_first_segment_are_refused(codec):
    """torchcodec would skip them; torchvision and Pillow do not know such a file for a JPEG."""
    for each in ("torchvision", codec):
        with pytest.raises(DecodeError, match=r"nsupported image file|not an image"):
            by(each, load_image)(KINDS["gray"][:2] + b"\0" + KINDS["gray"][2:], 9, 9)


def test_folder_and_loader_do_not_depend_on_it(codec, tmp_path):
    """Same seed, same epoch, in full and at reduced sizes; the report names the library."""
    (tmp_path / "class").mkdir()
    for number, content in enumerate(KINDS.values()):
        (tmp_path / "class" / f"{number}.jpg").write_bytes(content)
    transform = v2.Compose([v2.RandomResizedCrop(24), v2.RandomHorizontalFlip(), v2.PILToTensor()])

    def epoch(codec, scaled, num_workers):
        dataset = ImageFolder(tmp_path, transform, scaled=scaled)
        loader = DataLoader(dataset, 2, seed=3, num_workers=num_workers)
        with decoding_by(codec):
            batches = [batch[0] for batch in loader]
            (remark,) = [r for r in loader.report().verdict.remarks if "JPEG" in r] or [""]
        return batches, remark

    decoder = LIBRARY.path if "libjpeg-turbo" in codec else codec
    for scaled in (False, True):
        expected, _ = epoch("torchvision", scaled, 0)
        for num_workers in (0, 2):
            found, remark = epoch(codec, scaled, num_workers)
            assert all(map(torch.equal, found, expected))
            assert not num_workers or (decoder if not scaled else "a reduced size") in remark


def test_image_codec_names_what_decodes(codec):
    """torchcodec with its own number."""
    version = getattr(sys.modules.get("torchcodec"), "__version__", None)
    expected = {"torchcodec": f"torchcodec ({version})", "Pillow": "Pillow"}
    assert by(codec, image_codec)() == expected.get(codec, f"libjpeg-turbo ({LIBRARY.path})")


@pytest.mark.skipif(LIBRARY is None, reason="libjpeg-turbo 3 is not installed")
def test_libjpeg_turbo_is_found_where_torchvision_has_no_decoders():
    """And it decodes whole pictures, too, without the GIL; Pillow those that it does not take."""
    find = libjpeg_turbo.find_library.__wrapped__
    with decoding_by("libjpeg-turbo alone"):
        assert find().path == LIBRARY.path
    asked, decode_region = [], libjpeg_turbo.LibJpegTurbo.decode_region

    def spy(*args):
        asked.append(decode_region(*args))
        return asked[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(libjpeg_turbo.LibJpegTurbo, "decode_region", spy)
        by("libjpeg-turbo alone", load_image_batch)([*KINDS.values()], width=9, height=9)
    assert len(asked) == len(KINDS)
    assert None not in asked
