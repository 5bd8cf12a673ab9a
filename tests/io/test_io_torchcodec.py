"""codec="torchcodec": the pixels, the errors and the random numbers of torchvision's decoders."""

import io
import sys
from functools import partial

import pytest
import torch
from _jpegs import KINDS, OTHER_KINDS, jpeg
from _pictures import KINDS as FILES
from PIL import Image
from torchvision.transforms import v2

from spdl_torch import DataLoader, ImageFolder
from spdl_torch.errors import DecodeError
from spdl_torch.io import image_codec, load_image, load_image_batch, random_resized_crop
from spdl_torch.io._image import kernel, torchcodec_jpeg

EVERY_KIND = {**FILES, **KINDS, **OTHER_KINDS}


@pytest.fixture
def library():
    """torchcodec, or a skipped test."""
    return pytest.importorskip("torchcodec", reason="torchcodec is not installed")


def turned(orientation):
    """A square JPEG with an EXIF orientation, which a decoder that obeys it turns unnoticed."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture, buffer = Image.open(io.BytesIO(jpeg(96, 96))), io.BytesIO()
    picture.save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()


def test_pixels_are_torchvisions(library):
    """Every kind of JPEG, and other formats, which are decoded as ever, in one batch."""
    contents = [*EVERY_KIND.values(), *map(turned, range(1, 9))]

    def load(codec):
        torch.manual_seed(0)
        options = {"width": 40, "height": 30, "codec": codec}
        return load_image_batch(contents, **options, crop=random_resized_crop)

    assert torch.equal(load("torchcodec"), load("torchvision"))
    for content in contents:
        expected = load_image(content, codec="torchvision")
        assert torch.equal(load_image(content, codec="torchcodec"), expected)


def test_decodes_where_torchvision_cannot(library, monkeypatch):
    """It is torchcodec that decodes, not Pillow; what it refuses, Pillow reads or names."""
    decode, seen = torchcodec_jpeg.jpeg_decoder(), []
    spy = lambda data: seen.append(len(data)) or decode(data)  # noqa: E731
    expected = load_image(KINDS["4:2:0"], 50, 40)
    monkeypatch.setattr(torchcodec_jpeg, "jpeg_decoder", lambda: spy)
    monkeypatch.setattr(kernel, "has_codec", lambda: False)
    assert torch.equal(load_image(KINDS["4:2:0"], 50, 40, codec="torchcodec"), expected)
    assert seen == [len(KINDS["4:2:0"])]


@pytest.mark.parametrize("size", [0, 2, 300, 2000, -100, -1])
def test_truncated_file_has_the_same_error(library, size):
    """And in a batch it is left out, with the others unchanged."""
    bad, texts = KINDS["4:2:0"][:size], []
    for codec in ("torchvision", "torchcodec"):
        with pytest.raises(DecodeError, match="<bytes>") as caught:
            load_image(bad, 9, 9, codec=codec)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    load = partial(load_image_batch, width=20, height=20, strict=False)
    good = KINDS["gray"]
    assert torch.equal(load([bad, good], codec="torchcodec"), load([good], codec="torchvision"))


def test_bytes_before_the_first_segment_are_refused_by_both(library):
    """torchcodec would skip them; torchvision and Pillow do not know such a file for a JPEG."""
    for codec in ("torchvision", "torchcodec"):
        with pytest.raises(DecodeError, match="Unsupported image file"):
            load_image(KINDS["gray"][:2] + b"\0" + KINDS["gray"][2:], 9, 9, codec=codec)


def test_folder_and_loader_do_not_depend_on_it(library, tmp_path):
    """Same seed, same epoch, in full and at reduced sizes; the report names the library."""
    (tmp_path / "class").mkdir()
    for number, content in enumerate(KINDS.values()):
        (tmp_path / "class" / f"{number}.jpg").write_bytes(content)
    transform = v2.Compose([v2.RandomResizedCrop(24), v2.RandomHorizontalFlip(), v2.PILToTensor()])

    def epoch(codec, scaled, num_workers):
        dataset = ImageFolder(tmp_path, transform, codec=codec, scaled=scaled)
        loader = DataLoader(dataset, 2, seed=3, num_workers=num_workers)
        return [batch[0] for batch in loader], loader

    for scaled, decoder in ((False, f"torchcodec ({library.__version__})"), (True, "Pillow")):
        expected, _ = epoch("torchvision", scaled, 0)
        for num_workers in (0, 2):
            found, loader = epoch("torchcodec", scaled, num_workers)
            assert all(map(torch.equal, found, expected))
        (remark,) = [r for r in loader.report().verdict.remarks if "JPEG" in r]
        assert decoder in remark


def test_image_codec_names_the_version(library):
    """The library's own number."""
    assert image_codec("torchcodec") == f"torchcodec ({library.__version__})"


@pytest.mark.parametrize("where", ["load_image", "load_image_batch", "ImageFolder", "image_codec"])
def test_library_asked_for_has_to_be_there(where, monkeypatch, tmp_path):
    """The error names the extra, wherever the codec is given."""
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    torchcodec_jpeg.jpeg_decoder.cache_clear()
    calls = {
        "load_image": lambda: load_image(b"", 9, 9, codec="torchcodec"),
        "load_image_batch": lambda: load_image_batch([b""], width=9, height=9, codec="torchcodec"),
        "ImageFolder": lambda: ImageFolder(tmp_path, codec="torchcodec"),
        "image_codec": lambda: image_codec("torchcodec"),
    }
    with pytest.raises(ImportError, match=rf"{where}: .*pip install torchcodec \(the extra"):
        calls[where]()
