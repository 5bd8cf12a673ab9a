"""Every container and codec that PyAV can write, also broken: the frame that was asked for, or an
error. What is right is what a decode of the whole file gives, from its first packet on."""

import io
import itertools
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from PIL import Image
from support.pictures import encode
from support.tars import Pipe
from support.video_files import BY_CHANCE, KINDS, VARIANTS, Tally, decoded
from support.videos import REAL, Kind, decode_plainly, write_video

from spdl_torch.errors import DecodeError
from spdl_torch.io import (
    convert_frames,
    decode_packets,
    demux_video,
    load_clip,
    load_video,
    sample_decode_video,
    uniform_frames,
)
from spdl_torch.io._video import clips, opening

SHORT = (
    "MPEG program stream, MPEG-2",
    "transport stream, H.264 intra-refresh, B-frames",
    "AVI, MPEG-4 with B-frames",
    "AVI, raw with a palette",
    "MOV, QuickTime Animation, 8 bit",
    "MP4, H.264 intra-refresh",
    "MP4, H.264 inexact recovery points",
    "MP4, H.264 mirrored",
    "MP4, H.264 edit list, rotated",
    "MP4, H.264 a fragment for each frame",
    "MP4, HEVC open GOP",
    "Matroska, H.264 variable rate",
    "Matroska, H.264 equal times",
    "Matroska, H.264 a frame in 6 s",
    "WebM, VP8 with hidden frames",
    "WebM, AV1",
    "GIF",
    "FLV, H.264",
    "raw H.264",
)
BROKEN = (
    ("MPEG program stream, MPEG-2", "two glued together"),
    ("transport stream, MPEG-2", "two glued together"),
    ("transport stream, H.264", "cut at the front"),
    ("transport stream, MPEG-2", "cut in the middle"),
    ("FLV, H.264", "cut in the middle"),
    ("raw MPEG-4", "cut at the front"),
    ("AVI, H.264", "cut at the end"),
)
WHOLE = [(kind, "whole") for kind in SHORT]
TABLE = [each for each in itertools.product(KINDS, VARIANTS) if each not in BY_CHANCE]


def long(kinds):
    """Those that belong to the long forms."""
    return [pytest.param(*each, marks=pytest.mark.long) for each in kinds]


@pytest.mark.parametrize(("kind", "variant"), [*WHOLE, *BROKEN, *long(TABLE)])
def test_frames_and_times_are_those_of_a_decode_of_all(request, kind, variant):
    """Whole, in windows, in clips, by index and by stride; or an error that names a file which was
    cut, or two one after the other. In long the whole table of the documentation, but for
    Matroska's glued files (see below)."""
    is_long = request.node.get_closest_marker("long")
    if KINDS[kind].container in ("matroska", "webm") and variant == "two glued together":
        return
    assert is_long or decoded(kind, variant) is not None
    if decoded(kind, variant) is not None:
        Tally(kind, variant).check(40 if is_long else 4)


@pytest.mark.parametrize("kind", SHORT[::3])
@pytest.mark.parametrize("is_window", [False, True])
def test_packets_are_decoded_again_alike(kind, is_window):
    """By their own decoder, with more threads, and by a twin's, for which a file object is read
    again from where it was."""
    times = sorted(Tally(kind).times)
    window = (times[5], times[-3]) if is_window else None
    packets = demux_video(io.BytesIO(decoded(kind).source), timestamp=window)
    expected = load_video(decoded(kind).source, window)
    for num_threads, again in enumerate((packets, packets.clone(), packets.clone()), 1):
        for _ in range(2):
            frames = decode_packets(again, num_threads=num_threads)
            assert torch.equal(convert_frames(frames), expected)
            assert frames.get_timestamps() == pytest.approx(packets.timestamps)
    assert torch.equal(convert_frames(sample_decode_video(packets, [3])), expected[[3]])
    with pytest.raises(IndexError, match=rf"indices must be in \[0, {len(expected)}\)"):
        sample_decode_video(packets, [len(expected)])  # of frames, not packets: some are hidden


OTHERS = [(kind, "whole") for kind in KINDS if kind not in (*SHORT, "MP4, H.264 variable rate")]
CUT = [(f"transport stream, {codec}", "cut at the front") for codec in ("H.264", "HEVC")]


@pytest.mark.parametrize(("kind", "variant"), [*WHOLE, *CUT, *long(OTHERS)])
def test_samplers_are_told_the_facts_of_a_decode_of_all(kind, variant):
    """Start, duration and number of frames; at a constant rate each index is that frame's. (MP4
    states others at a variable rate with B-frames.)"""
    Tally(kind, variant).facts()


@pytest.mark.parametrize("kind", ["Matroska, MPEG-2", "WebM, VP9", "WebM, VP8"])
def test_a_moment_that_a_cut_file_no_longer_has_is_refused(kind):
    """Matroska states the whole duration at its beginning. The last frame is no other moment's."""
    whole = decoded(kind)
    content = whole.source[: len(whole.source) // 2]
    with pytest.raises(DecodeError, match=r"^<bytes>: no frame at .* cut off, and states 0\.96 s"):
        load_clip(content, uniform_frames(12))
    assert torch.equal(load_clip(content, lambda _: [0.1]).frames[0], whole.frames[2])


def without_references_in_layers(content):
    """The same HEVC in MP4, whose frames of upper temporal layers say that they are no references:
    none of their own layer refers to them, as encoders of phones write it."""
    content, num_changed = bytearray(content), 0
    with av.open(io.BytesIO(bytes(content))) as container:
        places = [(each.pos, each.size) for each in container.demux(video=0) if each.size]
    for start, size in places:
        place = start
        while place < start + size:
            head, layer = content[place + 4], (content[place + 5] & 7) - 1
            if head >> 1 in (1, 3, 5) and layer > 0:
                content[place + 4] -= 2
                num_changed += 1
            place += 4 + int.from_bytes(content[place : place + 4], "big")
    assert num_changed
    return bytes(content)


FAST = (
    *("MOV, ProRes", "MP4, AV1", "MP4, H.264 B-pyramid", "MP4, H.264 open GOP", "MP4, HEVC"),
    *("MP4, H.264 variable rate", "MP4, MPEG-4 with B-frames", "Matroska, FFV1"),
    *("Matroska, H.264 intra-refresh", "WebM, VP8 with hidden frames", "WebM, VP9"),
)


@pytest.mark.parametrize("kind", [*FAST, "MP4, HEVC temporal layers"])
def test_frames_are_found_without_a_decode_of_all(kind, monkeypatch):
    """From the keyframe before. HEVC's non-references may be references of higher layers."""
    video = decoded(kind)
    content = without_references_in_layers(video.source) if "layers" in kind else video.source

    def refuse(*args):
        raise AssertionError("the way from the first packet on is not needed")

    monkeypatch.setattr(clips, "_from_first", refuse)
    for time, frame in zip(video.times, video.frames, strict=True):
        found = load_clip(content, lambda info, time=time: [time])
        assert torch.equal(found.frames[0], frame)


def test_files_that_were_glued_together_say_so_where_times_are_asked_for():
    """Whole they have all frames; a time does not say which of two is meant, and a window that ends
    before is of the first. The list of Matroska's ends with the first."""
    kind = "MPEG program stream, MPEG-2"
    video, one = decoded(kind, "two glued together"), decoded(kind)
    assert len(load_video(video.source)) == len(demux_video(video.source)) == 48
    frames = sample_decode_video(demux_video(video.source), [3, 27])
    assert torch.equal(convert_frames(frames), one.frames[[3, 3]])
    for load in (
        lambda: load_clip(video.source, lambda info: [0.7]),
        lambda: load_video(video.source, (0.6, 9)),
    ):
        with pytest.raises(DecodeError, match=r"^<bytes>: after the frame at .* glued together"):
            load()
    first = demux_video(one.source).timestamps
    window = load_video(video.source, (first[3], first[9]))
    assert torch.equal(window, one.frames[3:9])
    kind = "Matroska, H.264 late start"
    video, one = decoded(kind, "two glued together"), decoded(kind)
    assert len(video.frames) == 48
    assert torch.equal(load_video(video.source), video.frames)
    assert torch.equal(load_clip(video.source, lambda info: [2.5]).frames, one.frames[12:13])
    assert torch.equal(load_video(video.source, (2.5, 2.6)), one.frames[13:15])


def test_frames_that_come_out_of_order_are_no_other_moments():
    """As from a decoder whose references are lost: each moment has its frame, or an error."""
    tally = Tally("FLV, H.264", "cut in the middle")
    assert tally.times != sorted(tally.times)
    for time in tally.times:
        tally.clip([time + 0.01])
        tally.window(time - 0.01, time + 0.01)
    assert tally.refused


def of_jpegs(jpegs, container, size, pix_fmt):
    with av.open(file := io.BytesIO(), "w", container) as out:
        stream = out.add_stream("mjpeg", rate=25)
        (stream.width, stream.height), stream.pix_fmt = size, pix_fmt
        stream.codec_context.open()
        for number, content in enumerate(jpegs):
            packet = av.Packet(content)
            packet.pts = packet.dts = number
            packet.time_base, packet.is_keyframe, packet.stream = Fraction(1, 25), True, stream
            out.mux(packet)
    return file.getvalue()


def test_side_data_that_pyav_does_not_know_does_no_harm():
    """Such as the EXIF of a JPEG within a video."""
    tags = Image.Exif()
    tags[0x010E] = "a description"
    jpegs = []
    for number in range(3):
        picture = Image.new("RGB", (16, 16), (80 * number, 0, 0))
        jpegs.append(encode(picture, "JPEG", exif=tags, subsampling=0))
    frames = load_video(of_jpegs(jpegs, "matroska", (16, 16), "yuvj444p"))
    expected = np.stack([Image.open(io.BytesIO(each)) for each in jpegs]).astype(int)
    assert abs(frames.numpy() - expected).max() <= 2


def remuxed(content, container, *, first=0, keys=None):
    """The packets from one on, without another encoding; keys: what all are marked as."""
    file = io.BytesIO()
    with av.open(io.BytesIO(content)) as source, av.open(file, "w", container) as out:
        stream = out.add_stream_from_template(source.streams.video[0])
        packets = [packet for packet in source.demux(video=0) if packet.size]
        for packet in packets[first:]:
            packet.is_keyframe = packet.is_keyframe if keys is None else keys
            packet.stream = stream
            out.mux(packet)
    return file.getvalue()


def check_against_plain(content, num_examples=4):
    video = decode_plainly(content)
    tally = Tally(None, "whole", video)
    tally.check(num_examples)
    packets = demux_video(content, timestamp=(tally.times[-3], tally.times[-1]))
    for each in (packets.clone(), packets):  # which may have to be read again, each by itself
        assert torch.equal(convert_frames(decode_packets(each)), video.frames[-3:-1])


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
def test_videos_of_other_encoders_have_the_frames_of_a_plain_decode(path):
    """Whole, in windows and in clips, bit for bit."""
    check_against_plain(path.read_bytes(), 2)


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_moments_before_the_first_keyframe_give_the_first_frame(container):
    """Of a file that begins within a group of pictures; windows from there on have their frames."""
    whole = write_video(Kind("mp4", "libx264", {"g": "12", "bf": "2"}))
    content = remuxed(whole, container, first=1)
    _, frames, times = decode_plainly(content)
    for moment in (times[0] - 0.3, times[0] - 0.1, times[0] + 0.01):
        clip = load_clip(content, lambda info, moment=moment: [moment, times[-1]])
        assert clip.timestamps.tolist() == pytest.approx([times[0], times[-1]])
        window = load_video(content, (moment - 0.02, times[3] - 0.01))
        assert torch.equal(window, frames[:3])


@pytest.mark.parametrize(
    ("first", "codec", "container", "keys"),
    [
        *(("matroska", codec, "matroska", False) for codec in ("libx264", "mpeg4")),
        *(("avi", codec, "avi", True) for codec in ("h263", "h263p")),
        *(("flv", "flv", "flv", True), ("matroska", "ffv1", "mp4", True)),
    ],
)
def test_wrong_marks_of_keyframes_do_no_harm(first, codec, container, keys):
    """All packets are marked, as AVI does with H.263: decoding begins at those whose header says
    so. Or none: FFmpeg does not find the way back to Matroska's first packet then."""
    video = write_video(Kind(first, codec, {"g": "8"}, size=(176, 144)))
    check_against_plain(remuxed(video, container, keys=keys))


@pytest.mark.parametrize("most_in_memory", [1 << 26, 100])
@pytest.mark.parametrize(
    "kind",
    [
        *("Matroska, MPEG-2", "AVI, MPEG-4", "transport stream, H.264", "GIF"),
        *("raw MPEG-4", "MP4, H.264"),
    ],
)
def test_sources_that_cannot_seek_have_the_same_frames(kind, most_in_memory, monkeypatch):
    """Also where a list stands at the end; large ones are kept in a file."""
    monkeypatch.setattr(opening, "_MOST_IN_MEMORY", most_in_memory)
    Tally(kind, opened=Pipe).check(2)


def test_frames_of_hevc_before_the_first_keyframe_that_need_only_it_are_whole():
    """What comes first out of the decoder is no keyframe, and undamaged all the same."""
    options = "log-level=none:keyint=8:min-keyint=8:scenecut=0:open-gop=0:radl=2:bframes=3"
    whole = write_video(Kind("mpegts", "libx265", {"x265-params": options}))
    content = remuxed(whole, "mpegts", first=6)  # which is the second keyframe
    labels = demux_video(content).labels
    leading = sum(label.pts < labels[0].pts for label in labels)
    assert (labels[0].is_entry, leading > 0) == (True, True)
    frames = decode_plainly(whole).frames[8 - leading :]
    assert torch.equal(load_video(content), frames)


def test_frames_are_counted_where_no_packet_has_a_time():
    """H.264 with B-frames in ASF: at the frame rate, in the order of display."""
    content = write_video(Kind("asf", "libx264", {"bf": "2", "g": "12"}))
    frames = decode_plainly(content).frames
    assert np.allclose(demux_video(content).timestamps, np.arange(len(frames)) / 25)
    assert torch.equal(load_video(content, (0.4, 0.8)), frames[10:20])
    assert torch.equal(load_clip(content, lambda info: [0.3, 1.2]).frames, frames[[7, 30]])


@pytest.mark.parametrize("container", ["avi", "mov", "matroska"])
@pytest.mark.parametrize("size", [(96, 64), (96, 32)])
def test_pictures_that_change_their_size_are_decoded_from_anywhere(container, size):
    """Those of each size by themselves, low ones too; not in one tensor, unless they are scaled."""
    packets = []
    for each in ((64, 48), size):
        one = write_video(Kind("avi", "mjpeg", pix_fmt="yuvj420p", size=each, num_frames=6))
        with av.open(io.BytesIO(one)) as source:
            packets += [bytes(packet) for packet in source.demux(video=0) if packet.size]
    content = of_jpegs(packets, container, (64, 48), "yuvj420p")
    with av.open(io.BytesIO(content)) as source:
        frames = [frame.to_ndarray(format="rgb24") for frame in source.decode(video=0)]
    assert [frame.shape[:2] for frame in frames[4:8]] == [(48, 64)] * 2 + [size[::-1]] * 2
    for number in (2, 5, 6, 9):
        moment = number / 25 + 0.01
        for found in (
            load_video(content, (moment - 0.02, moment + 0.01)),
            convert_frames(sample_decode_video(demux_video(content), [number])),
            load_clip(content, lambda _, m=moment: [m]).frames,
        ):
            assert np.array_equal(found, frames[number][None])
    with pytest.raises(DecodeError, match=r"^<bytes>: the frames change from .*64x48 to .*Scale"):
        load_video(content)
    with pytest.raises(DecodeError, match=r"^<bytes>: the frames change .* Give width and height"):
        load_clip(content, lambda _: [0.1, 0.3])
    assert load_clip(content, lambda _: [0.1, 0.3], width=8, height=8).frames.shape == (2, 8, 8, 3)
