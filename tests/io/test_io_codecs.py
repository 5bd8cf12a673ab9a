"""Decoding less: libjpeg-turbo's regions have the pixels, the errors and the random numbers of
torchvision's whole pictures."""

import io
import itertools
from ctypes.util import find_library

import pytest
import torch
from _jpegs import KINDS, LIBRARY, OTHER_KINDS, boxes, by, decoding_by, jpeg, photograph
from _readings import shown
from hypothesis import given, settings, strategies as st
from torchvision.transforms import v2

from spdl_torch import DataLoader, ImageFolder
from spdl_torch.errors import DecodeError
from spdl_torch.io import Crop, image_codec, load_image, load_image_batch, random_resized_crop
from spdl_torch.io._image import kernel, libjpeg_turbo
from spdl_torch.io._image.decode import decode_image
from spdl_torch.io._image.header import is_scan, plain_jpeg_scan, read_header

needs_library = pytest.mark.skipif(LIBRARY is None, reason="libjpeg-turbo 3 is not installed")


def whole_and_part(content, box):
    """The box, cut out of torchvision's picture, and as libjpeg-turbo's region holds it."""
    top, left, height, width = box
    whole = decode_image(content)
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    region = LIBRARY.decode_region(data, tuple(whole.shape[1:]), box)
    return whole[:, top : top + height, left : left + width], region


@needs_library
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_region_has_the_pixels_of_the_whole_picture(kind, data):
    """Bit for bit, wherever the box lies and however small it is: also at the region's edges,
    where colours are interpolated from samples on both sides."""
    header = read_header(memoryview(KINDS[kind]))
    expected, part = whole_and_part(
        KINDS[kind], data.draw(boxes(header.height, header.width), label="box")
    )
    assert torch.equal(part, expected)


@needs_library
def test_every_kind_gives_the_same_batch(monkeypatch):
    """Common JPEGs by region, all others by torchvision or Pillow, in one batch of equal bits."""
    asked = []
    decode_region = libjpeg_turbo.LibJpegTurbo.decode_region

    def spy(self, *args):
        found = decode_region(self, *args)
        asked.append(found is not None)
        return found

    monkeypatch.setattr(libjpeg_turbo.LibJpegTurbo, "decode_region", spy)
    buffer = io.BytesIO()
    photograph(150, 201, 3).save(buffer, "PNG")
    contents = [*KINDS.values(), *OTHER_KINDS.values(), buffer.getvalue(), jpeg(30, 40)]

    def load(codec):
        torch.manual_seed(2)
        crop = lambda *size: random_resized_crop(*size, scale=(0.1, 0.5))  # noqa: E731
        return by(codec, load_image_batch)(contents, width=50, height=40, crop=crop)

    expected = load("torchvision")
    assert asked == []
    assert torch.equal(load("libjpeg-turbo"), expected)
    # Those of other samplings are refused by the library; the others, it does not get to see.
    assert asked == [True] * len(KINDS) + [False] * 2


@needs_library
def test_whole_pictures_are_left_to_the_batch_kernel(monkeypatch):
    """Without a crop, or with one that takes nearly everything, there is nothing to save."""

    def refuse(*args):
        raise AssertionError("not to be called")

    monkeypatch.setattr(libjpeg_turbo.LibJpegTurbo, "decode_region", refuse)
    content = KINDS["4:2:0"]
    load_image_batch([content], width=9, height=9)
    load_image(content, 9, 9, crop=lambda h, w: Crop(3, 3, h - 6, w - 6))


@needs_library
@pytest.mark.parametrize("size", [0, 2, 300, 2000, -100, -1])
def test_truncated_file_has_the_same_error(size):
    """Also where the region lies above what is missing."""
    content = KINDS["4:2:0"][:size]
    messages = []
    for codec in ("torchvision", "libjpeg-turbo"):
        with pytest.raises(DecodeError, match="<bytes>") as caught:
            by(codec, load_image)(content, 9, 9, crop=lambda h, w: Crop(0, 0, 20, 20))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@needs_library
def test_bad_file_in_a_batch_is_named_or_left_out(tmp_path):
    """Both codecs treat it alike, and give the same rest of the batch."""
    for number in range(4):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(120, 140, seed=number))
    bad = tmp_path / "2.jpg"
    bad.write_bytes(bad.read_bytes()[:-300])
    paths = sorted(tmp_path.iterdir())

    def load(codec, strict):
        torch.manual_seed(1)
        crop = lambda *size: random_resized_crop(*size, scale=(0.1, 0.5))  # noqa: E731
        load_batch = by(codec, load_image_batch)
        return load_batch(paths, width=30, height=30, crop=crop, strict=strict)

    with pytest.raises(DecodeError, match=r"2\.jpg"):
        load("libjpeg-turbo", True)
    rest = load("libjpeg-turbo", False)
    assert len(rest) == 3
    assert torch.equal(rest, load("torchvision", False))


@needs_library
def test_damage_that_it_warns_about_is_torchvisions_case():
    """libjpeg-turbo goes on after a warning; then torchvision has the word, pixels and all."""
    content = bytearray(KINDS["4:2:0"])
    middle = len(content) // 2
    content[middle : middle + 40] = bytes(40)
    images = [
        by(each, load_image)(bytes(content), 50, 50, crop=lambda h, w: Crop(h // 2, 0, h // 2, w))
        for each in ("torchvision", "libjpeg-turbo")
    ]
    assert torch.equal(*images)


@needs_library
def test_folder_and_loader_do_not_depend_on_the_codec(tmp_path):
    """Same seed, same epoch, for any number of workers and either codec."""
    for number in range(12):
        folder = tmp_path / f"class{number % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(jpeg(140, 160 + number, seed=number))
    transform = v2.Compose([v2.RandomResizedCrop(48), v2.RandomHorizontalFlip(), v2.PILToTensor()])

    def epoch(codec, num_workers):
        dataset = ImageFolder(tmp_path, transform)
        order = torch.Generator().manual_seed(3)
        loader = DataLoader(
            dataset, 4, shuffle=True, generator=order, seed=3, num_workers=num_workers
        )
        with decoding_by(codec):
            return [tensor for batch in loader for tensor in batch]

    expected = epoch("torchvision", 0)
    for num_workers in (0, 2):
        assert all(map(torch.equal, expected, epoch("libjpeg-turbo", num_workers)))


@needs_library
def test_report_tells_the_codec(tmp_path):
    """A note beside the verdict, wherever the folder is wrapped."""
    folder = tmp_path / "class"
    folder.mkdir()
    (folder / "0.jpg").write_bytes(jpeg(100, 100))
    transform = v2.Compose([v2.RandomResizedCrop(48), v2.PILToTensor()])
    for codec, expected in (("libjpeg-turbo", LIBRARY.path), ("torchvision", "torchvision")):
        dataset = ImageFolder(tmp_path, transform)
        for each in (dataset, torch.utils.data.Subset(dataset, [0])):
            loader = DataLoader(each, num_workers=1)
            with decoding_by(codec):
                list(loader)
                (remark,) = [r for r in loader.report().verdict.remarks if "JPEG" in r]
                assert expected in remark
                assert remark in shown(loader.report())


@needs_library
def test_image_codec_names_the_library():
    """The file that it was loaded from; torchvision, where there is none."""
    assert image_codec() == f"libjpeg-turbo ({LIBRARY.path})"
    assert by("torchvision", image_codec)() == "torchvision"


@pytest.mark.parametrize("wrong", ["not a library", "too old"])
def test_library_that_cannot_serve_is_passed_over(wrong, monkeypatch, tmp_path):
    """A broken file, or a library without version 3's functions, is not an error."""
    path = tmp_path / "libturbojpeg.so.0"
    path.write_bytes(b"not a library")
    found = {"not a library": str(path), "too old": find_library("c")}[wrong]
    monkeypatch.setattr(libjpeg_turbo, "_candidates", lambda: iter([found]))
    assert libjpeg_turbo.find_library.__wrapped__() is None


@needs_library
def test_library_with_other_pixels_is_passed_over(monkeypatch):
    """The results may not depend on the codec, however a library was built."""
    decode_region = libjpeg_turbo.LibJpegTurbo.decode_region

    def darker(self, *args):
        return decode_region(self, *args) // 2

    monkeypatch.setattr(libjpeg_turbo.LibJpegTurbo, "decode_region", darker)
    assert libjpeg_turbo.find_library.__wrapped__() is None


@pytest.mark.parametrize("kind", [*KINDS, *OTHER_KINDS])
def test_plain_jpegs_are_recognised_by_their_header(kind):
    """Sequential, all in one scan, its end in place; of the sampling the library knows."""
    content = {**KINDS, **OTHER_KINDS}[kind]
    start = plain_jpeg_scan(memoryview(content))
    assert (start is not None) == (kind not in ("progressive", "CMYK", "bytes after the end"))
    assert plain_jpeg_scan(memoryview(content)[:-1]) is None
    for end in range(0, 700, 7):
        assert plain_jpeg_scan(memoryview(content)[:end]) is None


@given(coded=st.lists(st.sampled_from([0x00, 0x01, 0xD0, 0xD7, 0xD8, 0xDA, 0xFF]), max_size=12))
@settings(deadline=None)
def test_markers_in_a_scan_are_found(coded):
    """The kernel finds every marker there is; those of restarts may be there."""
    data = torch.tensor([1, 2, 3, *coded, 0xFF, 0xD9], dtype=torch.uint8)
    pairs = list(itertools.pairwise([*coded, 0xFF]))
    foreign = [b for a, b in pairs if a == 0xFF and b in (0x01, 0xD8, 0xDA)]
    (found,) = kernel.has_markers([data], [3])
    assert found == any(a == 0xFF and b != 0 for a, b in pairs)
    assert is_scan(memoryview(bytes(coded))) == (not foreign)
