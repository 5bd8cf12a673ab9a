"""spdl_torch.spdl.io called as spdl.io: the same calls and results, or an error that says why."""

import io
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from support import spdl_calls
from support.spdl_calls import IMAGE, VIDEO
from support.videos import KINDS, REAL, write_video

import spdl_torch.spdl.io
from spdl_torch.errors import DecodeError, UnsupportedOptionError
from spdl_torch.io import decode_image
from spdl_torch.spdl.io import (
    convert_frames,
    cpu_storage,
    decode_config,
    decode_packets,
    demux_image,
    demux_video,
    load_image,
    load_image_batch,
    to_numpy,
)

MADE = ["b-frames", "open gop", "no b-frames", "variable rate", "odd size", "vp9 in webm", "mjpeg"]

DIFFERS = {
    # SPDL loses the frames before the first keyframe behind the start, and of AVI the B-frames.
    *(f"test_b.avi: {name}" for name in ("window", "facts", "fps")),
}
"""Where SPDL's results are known to be others."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of small videos and images, with real ones where they are at hand."""
    folder = tmp_path_factory.mktemp("files")
    for name in MADE:
        (folder / f"{name}.mp4").write_bytes(write_video(KINDS[name]))
    ramp = Image.radial_gradient("L").resize((96, 80))
    colours = Image.merge("RGB", [ramp, ramp.transpose(Image.Transpose.ROTATE_180), ramp])
    colours.save(folder / "colours.jpg", quality=90)
    colours.convert("RGBA").save(folder / "alpha.png")
    for path in REAL:
        if path.name in ("k400_arm_wrestling.mp4", "test_b.avi"):
            shutil.copy(path, folder)
    return folder


def test_results_are_spdl_s_to_the_bit(files, tmp_path):
    """For every call and every file: videos, images, and the attributes of their objects."""
    pytest.importorskip("spdl.io")
    theirs = spdl_calls.results_of_spdl(files, tmp_path / "out.npz")
    ours = spdl_calls.results(spdl_torch.spdl.io, files)
    assert ours.keys() == theirs.keys()
    assert len(ours) > len(MADE) * len(VIDEO) + len(IMAGE)
    for name, expected in theirs.items():
        found = ours[name]
        if name in DIFFERS:
            assert not np.array_equal(found, expected), f"{name}: SPDL was mended"
        elif expected.dtype == np.float64:
            assert found == pytest.approx(expected), name
        else:
            assert np.array_equal(found, expected), name


def test_plain_image_is_decode_image_s(files):
    """Without a size and a filter: the picture as stored, with its colours at the end."""
    for name in ("colours.jpg", "alpha.png"):
        image = load_image(files / name)
        assert image.is_contiguous()
        assert torch.equal(image.permute(2, 0, 1), decode_image(files / name))
        assert torch.equal(load_image((files / name).read_bytes(), name="x"), image)
        batch = load_image_batch([files / name] * 2, width=None, height=None)
        assert torch.equal(batch, torch.stack([image, image]))


def test_one_size_keeps_the_shape(files):
    """With one side given; and if neither is, all pictures of a batch have to agree."""
    path = files / "colours.jpg"
    assert load_image_batch([path], width=48, height=None).shape == (1, 40, 48, 3)
    assert load_image_batch([path], width=None, height=40).shape == (1, 40, 48, 3)
    small = io.BytesIO()
    Image.new("RGB", (8, 6)).save(small, "png")
    with pytest.raises(DecodeError, match=r"in size: .*colours.jpg is 96x80, <bytes> is 8x6"):
        load_image_batch([path, small.getvalue()], width=None, height=None)


def test_storage_is_written_over(files):
    """The batch lies in it, and the next one takes its place."""
    storage = cpu_storage(2 * 24 * 40 * 3, pin_memory=False)
    assert repr(storage) == "<CPUStorage of 5760 bytes, pageable>"
    size = {"width": 40, "height": 24}
    one = load_image_batch([files / "colours.jpg"], **size, storage=storage)
    assert torch.equal(one, load_image_batch([files / "colours.jpg"], **size))
    other = load_image_batch([files / "alpha.png"], **size, storage=storage)
    assert one.data_ptr() == other.data_ptr()
    assert torch.equal(one, other)
    with pytest.raises(ValueError, match=r"8640 bytes are needed .* got 5760.*cpu_storage\(8640\)"):
        load_image_batch([files / "alpha.png"] * 3, **size, storage=storage)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=r"pinned memory needs CUDA.*pin_memory=False"):
            cpu_storage(8)
    with pytest.raises(ValueError, match="size must be >= 1, got 0"):
        cpu_storage(0, False)


def test_image_packets_can_be_decoded_again_and_copied(files):
    """As those of videos; they stay images."""
    packets = demux_image(files / "colours.jpg", name="a picture")
    image = convert_frames(decode_packets(packets))
    for again in (packets, packets.clone()):
        frames = decode_packets(again)
        assert (type(again).__name__, type(frames).__name__) == ("ImagePackets", "ImageFrames")
        assert torch.equal(convert_frames(frames), image)
    assert (packets.width, packets.height, packets.pix_fmt) == (96, 80, "yuvj420p")
    assert decode_packets(packets).pts == 0.0


@pytest.mark.parametrize("name", ["100%03d.jpg", "a*[b]?.jpg", "ab::c.jpg"])
def test_image_is_opened_by_its_very_name(files, tmp_path, name):
    """Nothing in it is a pattern or a protocol."""
    shutil.copy(files / "colours.jpg", tmp_path / name)
    found = convert_frames(decode_packets(demux_image(tmp_path / name)))
    assert torch.equal(found, convert_frames(decode_packets(demux_image(files / "colours.jpg"))))


@pytest.mark.parametrize(
    ("call", "error", "complaint"),
    [
        (
            lambda p, v: load_image_batch([p], width=8, height=8, pix_fmt="gray"),
            *(UnsupportedOptionError, "pix_fmt must be 'rgb24', got 'gray'. Use demux_image"),
        ),
        (
            lambda p, v: convert_frames(decode_packets(demux_image(p), "format=pix_fmts=gbrp")),
            *(UnsupportedOptionError, "frames of gbrp and 96x80 do not fill an array"),
        ),
        (lambda p, v: load_image(p, filter_desc="none"), ValueError, "FFmpeg refuses 'none"),
        (
            lambda p, v: decode_config(decoder_options={"threads": "2", "flags": "x"}),
            *(UnsupportedOptionError, "got also {'flags': 'x'}"),
        ),
        (lambda p, v: demux_image(b"abc", name="thing"), DecodeError, "thing: "),
        (lambda p, v: to_numpy(3), TypeError, "what has __array_interface__, got int"),
    ],
)
def test_call_is_refused_with_what_is_wrong(files, call, error, complaint):
    """Never ignored without a word."""
    with pytest.raises(error, match=complaint):
        call(files / "colours.jpg", files / "b-frames.mp4")


def test_array_is_shared_with_numpy():
    """Both ways, without a copy."""
    tensor = torch.arange(6, dtype=torch.uint8).view(2, 3)
    array = to_numpy(tensor)
    array[0, 0] = 9
    assert tensor[0, 0] == 9
    assert to_numpy(array) is array
    assert np.array_equal(to_numpy(torch.ones(2, requires_grad=True)), [1, 1])
    assert isinstance(array, spdl_torch.spdl.io.ArrayInterface)
    assert isinstance(tensor, spdl_torch.spdl.io.CPUBuffer)


def test_frames_are_taken_by_place(files):
    """As a sequence's, with its errors."""
    frames = decode_packets(demux_video(files / "no b-frames.mp4"))
    assert [f.pts for f in (frames[0], frames[-1])] == pytest.approx([0.0, 39 / 25])
    with pytest.raises(IndexError, match="list index out of range"):
        frames[40]
