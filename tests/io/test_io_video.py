"""Videos: packets, frames, filters and tensors against PyAV's plain decode."""

import io
import itertools
import struct
from fractions import Fraction
from functools import partial
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from av.stream import Disposition
from support.videos import KINDS, Kind, write_video

from spdl_torch.errors import DecodeError, UnsupportedOptionError
from spdl_torch.io import (
    convert_frames,
    decode_config,
    decode_packets,
    demux_video,
    get_filter_desc,
    get_video_filter_desc,
    load_clip,
    load_video,
    random_clip,
    sample_decode_video,
    strided_frames,
    to_torch,
    uniform_frames,
)

EXAMPLE = write_video(KINDS["b-frames"])
FINE = Kind("mp4", "libx264", {"bf": "2", "g": "12"}, rate=30, step=lambda k: k + 30 * 2100)
"""A video that starts late, as a part of a stream does."""


@pytest.mark.parametrize("ticks", [10_000_000, 3_000_000, 90_000])
def test_times_of_frames_give_these_frames_at_fine_time_bases(ticks):
    """Those of packets and of clips; a number of ticks has more digits than a float then."""
    content = write_video(FINE._replace(muxer={"video_track_timescale": str(ticks)}))
    packets = demux_video(content)
    assert packets.time_base == Fraction(1, ticks)
    whole, times = load_video(content), packets.timestamps
    assert min(times) > 2034
    for number, (start, end) in enumerate(itertools.pairwise(times)):
        assert torch.equal(load_video(content, (start, end)), whole[number : number + 1]), number
    clip = load_clip(content, lambda info: times)
    assert torch.equal(clip.frames, whole)
    again = load_clip(content, lambda info: clip.timestamps)
    assert torch.equal(again.timestamps, clip.timestamps)
    assert torch.equal(again.frames, whole)


def test_packets_say_what_they_are():
    """Sizes, rate and times. No more are read than are needed: from the keyframe before the window
    until a little after it."""
    packets = demux_video(EXAMPLE, timestamp=(0.4, 0.8))
    assert (packets.width, packets.height, packets.pix_fmt) == (64, 48, "yuv420p")
    assert (packets.frame_rate, packets.codec.name) == ((25, 1), "h264")
    assert (packets.timestamp, packets.duration) == ((0.4, 0.8), pytest.approx(0.4))
    assert demux_video(EXAMPLE).duration == pytest.approx(1.6)
    assert len(packets) == 10
    packets = demux_video(write_video(KINDS["long"]), timestamp=(25.0, 25.4))
    assert len(packets) == 2
    assert packets.num_packets <= 50 + 10  # a keyframe every 50 frames


def test_sources_of_every_kind(tmp_path):
    """Paths (with a colon too), bytes, tensors and files, seekable or not."""
    path = tmp_path / "12:30.mp4"
    path.write_bytes(EXAMPLE)
    expected = load_video(EXAMPLE, (0.5, 1.0))
    tensor = torch.frombuffer(bytearray(EXAMPLE), dtype=torch.uint8)
    in_order = write_video(KINDS["fragmented"])
    stream = SimpleNamespace(read=io.BytesIO(in_order).read)
    with path.open("rb") as file:
        for source in (path, str(path), bytearray(EXAMPLE), memoryview(EXAMPLE), tensor, file):
            assert torch.equal(load_video(source, (0.5, 1.0)), expected)
    assert torch.equal(load_video(stream, (0.5, 1.0)), load_video(in_order, (0.5, 1.0)))


def test_threads_decode_the_same_packets(pool):
    """All rightly; a decoder has one thread, so that a pipeline's are all there are, or as many as
    are asked for in SPDL's words."""
    packets = demux_video(EXAMPLE)
    expected = convert_frames(decode_packets(packets))
    with packets.decoder.begun() as context:
        assert context.thread_count == 1
    for found in pool.map(decode_packets, [packets] * 4):
        assert torch.equal(convert_frames(found), expected)
    packets, two = packets.clone(), decode_config(decoder_options={"threads": "2"})
    assert torch.equal(convert_frames(decode_packets(packets, decode_config=two)), expected)
    with packets.decoder.begun() as context:
        assert context.thread_count == 2


@pytest.mark.parametrize(
    ("pix_fmt", "shape"),
    [
        ("rgb24", (48, 64, 3)),
        ("rgba", (48, 64, 4)),
        ("gray8", (48, 64, 1)),
        ("yuv444p", (3, 48, 64)),
        ("yuv420p", (1, 72, 64)),
        ("yuv422p", (1, 96, 64)),
    ],
)
def test_convert_frames_has_the_documented_layout(pix_fmt, shape):
    """Equal to what PyAV makes of each frame."""
    batch = load_video(EXAMPLE, filter_desc=get_video_filter_desc(pix_fmt=pix_fmt))
    assert batch.shape == (40, *shape)
    assert (batch.dtype, batch.is_contiguous()) == (torch.uint8, True)
    with av.open(io.BytesIO(EXAMPLE)) as container:
        frames = [f.to_ndarray(format=pix_fmt) for f in container.decode(video=0)]
    assert np.array_equal(batch.numpy().reshape(40, -1), np.stack(frames).reshape(40, -1))


def test_convert_frames_of_lists():
    """Videos get one dimension more; single frames are put together."""
    packets = demux_video(EXAMPLE)
    frames = decode_packets(packets)
    assert convert_frames([frames, frames]).shape == (2, 40, 48, 64, 3)
    images = sample_decode_video(packets, [3, 7])
    assert convert_frames(images).shape == (2, 48, 64, 3)
    assert convert_frames(images[0]).shape == (48, 64, 3)
    assert len(frames) == frames.num_frames == 40
    own = decode_packets(packets, None, num_frames=7)  # the video's own format
    assert (len(own), own.pix_fmt) == (7, "yuv420p")


@pytest.mark.parametrize("filter_desc", [None, "format=pix_fmts=bgr24", "vflip", "hflip,vflip"])
def test_lines_of_a_raw_avi_may_run_from_the_bottom_up(filter_desc):
    """As most programs write them: then the picture is upside down where lines are not turned."""
    down = write_video(Kind("avi", "rawvideo", pix_fmt="bgr24", num_frames=4))
    place = down.index(b"strf") + 16
    assert struct.unpack_from("<i", down, place) == (-48,)
    up = down[:place] + struct.pack("<i", 48) + down[place + 4 :]
    expected = load_video(down, filter_desc=filter_desc)
    assert torch.equal(load_video(up, filter_desc=filter_desc), expected.flip(1))
    clips = [load_clip(each, lambda info: [0.05]).frames for each in (down, up)]
    assert torch.equal(clips[1], clips[0].flip(1))


def lossless(**colours):
    with av.open(file := io.BytesIO(), "w", "matroska") as container:
        stream = container.add_stream("ffv1", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv444p"
        for name, value in colours.items():
            setattr(stream.codec_context, name, value)
        rng = np.random.default_rng(0)
        planes = rng.integers(20, 235, (3, 48, 64), dtype=np.uint8)
        container.mux(stream.encode(av.VideoFrame.from_ndarray(planes, "yuv444p")))
        container.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize("colours", [{"color_range": 2}, {"colorspace": 1}], ids=str)
def test_colours_are_the_same_through_filters(colours):
    """Full range, and another matrix than usual."""
    content = lossless(**colours)
    frames = load_video(content)
    assert not torch.equal(frames, load_video(lossless()))
    filtered = load_video(content, filter_desc="hflip,format=pix_fmts=rgb24")
    assert torch.equal(filtered.flip(2), frames)
    assert torch.equal(load_clip(content, lambda info: [0], width=64, height=48).frames, frames)


def test_stream_that_the_container_prefers_is_read():
    """Of several, though another one comes first."""
    with av.open(file := io.BytesIO(), "w", "matroska") as container:
        streams = {size: container.add_stream("ffv1", rate=25) for size in (16, 48)}
        for size, stream in streams.items():
            stream.width, stream.height, stream.pix_fmt = size, size, "yuv444p"
        streams[48].disposition = Disposition.default
        for size, stream in streams.items():
            frame = av.VideoFrame.from_ndarray(np.zeros((3, size, size), np.uint8), "yuv444p")
            container.mux([*stream.encode(frame), *stream.encode(None)])
    assert load_video(file.getvalue()).shape == (1, 48, 48, 3)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"pix_fmt": None}, None),
        (
            {"scale_width": 224, "scale_height": 100},
            "scale=w=224:h=100:flags=bicubic:force_original_aspect_ratio=decrease,"
            "pad=w=224:h=100:x=-1:y=-1:color=black,format=pix_fmts=rgb24",
        ),
        (
            {"scale_width": 224, "scale_algo": "area", "filter_desc": "hflip", "pix_fmt": "gray8"},
            "scale=w=224:h=0:flags=area:force_original_aspect_ratio=decrease,"
            "pad=w=224:h=0:x=-1:y=-1:color=black,hflip,format=pix_fmts=gray8",
        ),
    ],
)
def test_get_filter_desc_writes_what_spdl_writes(options, expected):
    """The same description for the same options (seen from spdl 0.8.0)."""
    assert get_video_filter_desc(**options) == expected
    assert get_filter_desc(demux_video(EXAMPLE), **options) == expected


def sampled(*indices):
    return lambda: sample_decode_video(demux_video(EXAMPLE), list(indices))


def filtered(description):
    return partial(load_video, EXAMPLE, filter_desc=description)


def clip_of(moments, **options):
    return partial(load_clip, EXAMPLE, lambda info: moments, **options)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (filtered("nonsense=3"), ValueError, "FFmpeg refuses 'nonsense=3'"),
        (filtered(""), ValueError, "without a name"),
        (filtered("[in]hflip[out]"), UnsupportedOptionError, "only a chain"),
        (filtered("format=gbrp"), UnsupportedOptionError, "gbrp"),
        (
            lambda: load_video(write_video(KINDS["odd size"]), filter_desc="format=yuv420p"),
            *(UnsupportedOptionError, "yuv420p and 61x47"),  # half a row of chroma fits no array
        ),
        (sampled(5, 3), ValueError, "indices must"),
        (sampled(40), IndexError, "indices must"),
        (partial(demux_video, EXAMPLE, timestamp=(2, 1)), ValueError, "start < end"),
        (partial(load_video, EXAMPLE, device_config=1), UnsupportedOptionError, "config must be"),
        (lambda: load_video(3), TypeError, "a video source must be"),
        (partial(load_video, EXAMPLE, timestamp=1), ValueError, r"must be \(start, end\) in sec"),
        (partial(uniform_frames, 2.5), TypeError, "num_frames must be an int, got 2.5"),
        (clip_of([0.1], num_threads=-1), ValueError, "num_threads must be >= 0, got -1"),
        (lambda: convert_frames([]), ValueError, "at least one"),
        (clip_of([float("nan")]), ValueError, "at least one finite moment"),
        (clip_of([100.0]), DecodeError, "<bytes>: no frame at 100 s, the video ends at 1.6 s"),
        (clip_of([0], pix_fmt="gray8"), UnsupportedOptionError, "pix_fmt must be 'rgb24'"),
        (lambda: uniform_frames(3, (2, 1)), ValueError, "window must be"),
        (lambda: random_clip(3, 0), ValueError, "seconds must be > 0"),
        (lambda: strided_frames(3, 1, -1), ValueError, "start must be >= 0"),
    ],
)
def test_call_that_cannot_be_meant_is_refused(call, error, match):
    """With FFmpeg's reason, or with what it should be."""
    with pytest.raises(error, match=match):
        call()


def test_to_torch_shares_memory_where_it_can():
    """Read-only and reversed arrays are copied; all else is a view."""
    array = np.arange(6, dtype=np.uint8).reshape(2, 3)
    assert to_torch(array).data_ptr() == array.ctypes.data
    tensor = torch.zeros(3)
    assert to_torch(tensor) is tensor
    interface = SimpleNamespace(__array_interface__=array.__array_interface__)
    assert to_torch(interface).tolist() == array.tolist()
    frozen = np.frombuffer(b"abc", dtype=np.uint8)
    assert to_torch(frozen).tolist() == [97, 98, 99]
    assert to_torch(array[::-1]).tolist() == [[3, 4, 5], [0, 1, 2]]
    names = ("__dlpack__", "__dlpack_device__")
    capsule = SimpleNamespace(**{name: getattr(tensor, name) for name in names})
    assert to_torch(capsule).data_ptr() == tensor.data_ptr()
