"""Clips: the frames on display at the moments that a sampler asks for. Bad videos: a DecodeError
that names the file, or the right frames."""

import io
import pickle
import re
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from support.videos import KINDS, Kind, decode_plainly, write_video
from test_io_audio import KINDS as SOUNDS, write as write_sound

from spdl_torch.errors import DecodeError
from spdl_torch.io import (
    VideoInfo,
    demux_video,
    load_clip,
    load_video,
    random_clip,
    strided_frames,
    uniform_frames,
)

EXAMPLE, FRAGMENTED = (write_video(KINDS[kind]) for kind in ("b-frames", "fragmented"))
INFO = VideoInfo(
    source="x.mp4",
    codec="h264",
    start_seconds=1.0,
    duration_seconds=10.0,
    frame_rate=25.0,
    num_frames=250,
    width=64,
    height=48,
)


def test_sizes_of_clips():
    """Both, one of them (the shape is kept), or neither; a turned video is measured upright."""
    sizes = {(20, 30): (30, 20), (32, None): (24, 32), (None, 24): (24, 32), (None, None): (48, 64)}
    for (width, height), shape in sizes.items():
        clip = load_clip(EXAMPLE, uniform_frames(3), width=width, height=height)
        assert clip.frames.shape == (3, *shape, 3)
        assert clip.frames.is_contiguous()
    turned = load_clip(write_video(KINDS["rotated"]), uniform_frames(2), width=24)
    assert turned.frames.shape == (2, 32, 24, 3)


def test_samplers_ask_for_what_they_say():
    """The examples of their docstrings."""
    assert uniform_frames(4, (0, 8))(INFO) == [1, 3, 5, 7]
    assert uniform_frames(2)(INFO) == [3.5, 8.5]
    numbers = [(moment - 1) * 25 for moment in strided_frames(3, 4, 10)(INFO)]
    assert numbers == pytest.approx([10.5, 14.5, 18.5])
    last = [(moment - 1) * 25 for moment in strided_frames(3, 100, 100)(INFO)]
    assert last == pytest.approx([100.5, 200.5, 249.5])


@settings(max_examples=50)
@given(st.integers(1, 40), st.floats(0.01, 30), st.integers(1, 20), st.integers(0, 2**31))
def test_random_samplers_stay_within_the_video(num_frames, seconds, stride, seed):
    """Ascending moments, within the video, drawn from torch's global generator."""
    state = torch.get_rng_state()
    for sampler in (random_clip(num_frames, seconds), strided_frames(num_frames, stride, "random")):
        torch.manual_seed(seed)
        moments = sampler(INFO)
        torch.manual_seed(seed)
        assert pickle.loads(pickle.dumps(sampler))(INFO) == moments
        assert len(moments) == num_frames
        assert moments[0] >= 1
        assert moments[-1] <= 11
        assert (np.diff(moments) >= 0).all()
    torch.set_rng_state(state)


def uneven_video(container, step, bf="2", **more):
    """H.264 at 25 frames a second, whose frames come at such places."""
    options = {"bf": bf, "g": "8"}
    return write_video(Kind(container, "libx264", options, step=step, num_frames=30, **more))


PAUSES = {
    "near the end": lambda number: number + 23 * (number >= 27),
    "near the beginning": lambda number: number + 75 * (number >= 1),
    "several": lambda number: number + 13 * (number // 7) + 35 * (number >= 28),
}
each_pause = pytest.mark.parametrize("step", PAUSES.values(), ids=PAUSES)


@pytest.mark.parametrize(("container", "bf"), [("mp4", "0"), ("matroska", "0"), ("matroska", "2")])
@each_pause
def test_a_sampler_is_told_the_duration_of_a_variable_rate(container, step, bf):
    """That of the frames: MP4 states the steps between packets, which are others."""
    told = []
    content = uneven_video(container, step, bf)
    clip = load_clip(content, lambda info: told.append(info) or uniform_frames(8)(info))
    assert told[0].duration_seconds == pytest.approx((step(29) + 1) / 25, abs=0.03)
    if container != "matroska":  # which does not state how many frames there are
        assert told[0].num_frames == 30
        assert told[0].frame_rate == pytest.approx(30 / told[0].duration_seconds)
    moments = uniform_frames(8)(told[0])
    shown = [max(k for k in range(30) if step(k) <= 25 * moment + 1e-6) for moment in moments]
    assert clip.timestamps.tolist() == pytest.approx([step(k) / 25 for k in shown], abs=1e-3)


def test_a_late_start_does_not_change_the_duration():
    """FFmpeg takes the end for a duration where it does not see the start."""
    told = []
    kind = Kind("matroska", "libx264", num_frames=2, step=lambda number: 12 + 75 * number)
    load_clip(write_video(kind), lambda info: told.append(info) or uniform_frames(8)(info))
    facts = told[0].start_seconds, told[0].duration_seconds
    assert facts == pytest.approx((0.48, 3.04), abs=1e-3)


def test_a_moment_up_to_the_stated_end_gives_the_last_frame():
    """An MP4 that is whole may state more than its frames last."""
    content = bytearray(
        uneven_video("mp4", PAUSES["near the beginning"], muxer={"use_editlist": "0"})
    )
    place = content.index(b"mdhd") + 16
    ticks, duration = struct.unpack_from(">II", content, place)
    struct.pack_into(">I", content, place + 4, duration + 3 * ticks)
    clip = load_clip(content, lambda info: [info.start_seconds + info.duration_seconds])
    assert torch.equal(clip.frames, load_video(content)[-1:])
    with pytest.raises(DecodeError, match="no frame at 99 s, the video ends at 7"):
        load_clip(content, lambda info: [99.0])


@each_pause
def test_a_cut_video_of_a_variable_rate_is_refused(step):
    """Its list of packets comes first, and has those that are not there any more."""
    content = uneven_video("mp4", step, muxer={"moov_size": "4096"})
    start = content.index(b"mdat")
    content = content[: start + (len(content) - start) // 2]
    with pytest.raises(DecodeError, match=r"^<bytes>: no frame at .* cut off, and states \d\.\d+"):
        load_clip(content, uniform_frames(30))


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "Invalid data"),
        (b"no video at all" * 100, "Invalid data"),
        (FRAGMENTED[:300], "bad.mp4: "),
        (write_sound(*SOUNDS["wav"]), "no video stream in it, only: audio"),
        (b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:9/x.ts\n#EXT-X-ENDLIST\n", "bad.mp4: "),
        (b"ffconcat version 1.0\nfile /etc/hostname\n", "bad.mp4: "),
    ],
    ids=["empty", "text", "truncated", "sound", "playlist", "concat"],
)
def test_what_is_no_video_raises_decode_error(tmp_path, content, match):
    """It names the file; bytes are named so."""
    path = tmp_path / "bad.mp4"
    path.write_bytes(content)
    for load in (load_video, demux_video, lambda source: load_clip(source, uniform_frames(2))):
        with pytest.raises(DecodeError, match=match):
            load(path)
        with pytest.raises(DecodeError, match=r"^<bytes>: "):
            load(content)
        with open(path, "rb") as file, pytest.raises(DecodeError, match=r"bad\.mp4: "):
            load(file)  # of an empty one the system refuses to say where its last byte is


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("list.mp4", "ffconcat version 1.0\nfile other.ts\n"),
        ("list.m3u8", "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nother.ts\n#EXT-X-ENDLIST\n"),
        ("picture%d.jpg", "ends in a number"),
    ],
)
def test_files_that_name_others_are_not_followed(tmp_path, name, text):
    """A path opens that file and no other, though FFmpeg would; the error says what may be done."""
    (tmp_path / "other.ts").write_bytes(write_video(KINDS["h264 in ts"]))
    Image.new("RGB", (32, 32)).save(tmp_path / "picture1.jpg")
    (tmp_path / name).write_text(text)
    assert decode_plainly(tmp_path / name).frames.shape[0] > 0
    for load in (load_video, demux_video, lambda source: load_clip(source, uniform_frames(2))):
        with pytest.raises(DecodeError, match=rf"{name}: Invalid argument.*may name other files"):
            load(tmp_path / name)


@pytest.mark.parametrize("kind", sorted({kind.container for kind in KINDS.values()}))
def test_formats_that_hold_their_video_are_opened_by_name(tmp_path, kind):
    """Whatever the file is called."""
    content = write_video(next(k for k in KINDS.values() if k.container == kind))
    (tmp_path / "video.dat").write_bytes(content)
    assert torch.equal(load_video(tmp_path / "video.dat"), load_video(content))


def test_missing_files_raise_oserror(tmp_path):
    """As open() does, with the path as it was given."""
    with pytest.raises(FileNotFoundError, match=r"missing\.mp4") as caught:
        load_video(tmp_path / "missing.mp4")
    assert caught.value.filename == str(tmp_path / "missing.mp4")
    with pytest.raises(IsADirectoryError, match="Is a directory"):
        load_video(tmp_path)
    with pytest.raises(FileNotFoundError, match="nothing"):
        load_video("memory://nothing.mp4")


def test_errors_of_the_users_own_file_survive():
    """They are not turned into a DecodeError."""

    class File(io.BytesIO):
        def read(self, size):
            if self.tell() >= 5000:
                raise error
            return super().read(min(size, 1000))

    for error in (KeyError("mine"), IndexError("mine"), OSError(5, "mine")):
        with pytest.raises(type(error), match="mine"):
            load_video(File(FRAGMENTED))


def test_streams_that_come_up_late_do_no_harm():
    """PyAV ends with an IndexError after the last packet if FFmpeg finds a stream on the way."""
    content = bytearray(write_video(KINDS["mpeg2 in ts"], num_frames=10))
    content[3 * 188 + 46] = 0xB7  # of the sequence's header
    content[30 * 188 + 2] = 0x40  # a packet of a stream that nothing announces
    assert demux_video(content).num_packets == 10
    with pytest.raises(DecodeError, match=r"^<bytes>: "):
        load_video(content)


@pytest.mark.parametrize("kind", ["b-frames", "variable rate", "mpeg4 in avi", "h264 in ts"])
@pytest.mark.parametrize("moment", [100, 1e16, 1e308])
def test_moments_far_beyond_any_video_raise_decode_error(kind, moment):
    """Also those in whose ticks no 64 bits suffice, and those that are no number of ticks."""
    content = write_video(KINDS[kind])
    with pytest.raises(DecodeError, match=re.escape(f"<bytes>: no frame in [{moment:g}, ")):
        load_video(content, (moment, 1.1 * moment))
    for moments in ([moment], [0.0, moment]):
        with pytest.raises(DecodeError, match=r"^<bytes>: no frame at 1.* the video ends at "):
            load_clip(content, lambda info, moments=moments: moments)
    assert len(load_video(content, (-moment, moment))) == KINDS[kind].num_frames
    assert len(load_clip(content, lambda info: [-moment]).frames) == 1


@pytest.mark.parametrize("name", ["fragmented", "h264 in ts", "mpeg4 in avi"])
def test_truncated_videos_give_right_frames_or_decode_error(name):
    """Wherever the file breaks off; a window before that is whole."""
    content = write_video(KINDS[name])
    frames = decode_plainly(content).frames
    for size in range(0, len(content), len(content) // 23):
        try:
            loaded = load_video(content[:size])
        except DecodeError:
            continue
        # A transport stream does not say how long a frame is: FFmpeg does not notice that the
        # last one is cut off.
        num_sure = len(loaded) - (name == "h264 in ts")
        assert torch.equal(loaded[:num_sure], frames[:num_sure]), size
    half = content[: len(content) * 3 // 4]
    assert torch.equal(load_video(half, (0.1, 0.4)), load_video(content, (0.1, 0.4)))
