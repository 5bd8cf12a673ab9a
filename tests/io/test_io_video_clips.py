"""Clips: the frames on display at the moments that a sampler asks for."""

import io
import pickle
import random
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from _videos import KINDS, REAL, decode_plainly, write_video
from hypothesis import given, settings, strategies as st

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

EXAMPLE = write_video(KINDS["b-frames"])
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


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
def test_videos_of_other_encoders_have_the_frames_of_a_plain_decode(path):
    """Whole, in windows and in clips, bit for bit."""
    frames, known = decode_plainly(path)
    assert torch.equal(load_video(path), frames)
    times = demux_video(path).timestamps
    assert None in known or times == pytest.approx(known)
    rng = random.Random(0)
    for first in range(0, len(times) - 9, max(1, len(times) // 7)):
        window = load_video(path, (times[first], times[first + 9]))
        assert torch.equal(window, frames[first : first + 9])
        places = [rng.randrange(len(times) - 1) for _ in range(5)]
        moments = [rng.uniform(times[place] + 1e-5, times[place + 1] - 1e-5) for place in places]
        clip = load_clip(path, lambda info, moments=moments: moments)
        assert torch.equal(clip.frames, frames[places])
        assert clip.timestamps.tolist() == pytest.approx([times[place] for place in places])


def test_sizes_of_clips():
    """Both, one of them (the shape is kept), or neither; a turned video is measured upright."""
    for resize in ("swscale", "antialias"):
        for size, shape in (
            ({"width": 20, "height": 30}, (30, 20)),
            ({"width": 32}, (24, 32)),
            ({"height": 24}, (24, 32)),
            ({}, (48, 64)),
        ):
            clip = load_clip(EXAMPLE, uniform_frames(3), resize=resize, **size)
            assert clip.frames.shape == (3, *shape, 3)
            assert clip.frames.is_contiguous()
        turned = load_clip(
            write_video(KINDS["rotated"]), uniform_frames(2), resize=resize, width=24
        )
        assert turned.frames.shape == (2, 32, 24, 3)


def test_samplers_ask_for_what_they_say():
    """The examples of their docstrings."""
    assert uniform_frames(4, (0, 8))(INFO) == [1, 3, 5, 7]
    assert uniform_frames(2)(INFO) == [3.5, 8.5]
    numbers = [(moment - 1) * 25 for moment in strided_frames(3, 4, 10)(INFO)]
    assert numbers == pytest.approx([10.5, 14.5, 18.5])
    last = [(moment - 1) * 25 for moment in strided_frames(3, 100, 100)(INFO)]
    assert last == pytest.approx([100.5, 200.5, 249.5])


@settings(max_examples=50, deadline=None)
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


def uneven_video(container, step, bf, num_frames=30, **options):
    """H.264 of frames at such times, in milliseconds."""
    with av.open(file := io.BytesIO(), "w", container, options=options) as out:
        given = {"bf": bf, "preset": "veryfast", "x264-params": "log-level=none"}
        stream = out.add_stream("libx264", rate=25, options=given)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        for number in range(num_frames):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 8 * number, np.uint8), "rgb24")
            frame.pts, frame.time_base = step(number), Fraction(1, 1000)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return file.getvalue()


def pause_near_the_end(number):
    return 40 * number + 920 * (number >= 27)


def pause_near_the_beginning(number):
    return 40 * number + 3000 * (number >= 1)


def pauses(number):
    return 40 * number + 500 * (number // 7) + 1400 * (number >= 28)


@pytest.mark.parametrize("bf", ["0", "2"])
@pytest.mark.parametrize("container", ["mp4", "matroska"])
@pytest.mark.parametrize("step", [pause_near_the_end, pause_near_the_beginning, pauses])
def test_a_sampler_is_told_the_duration_of_a_variable_rate(container, step, bf):
    """The steps between packets, which MP4 states, are not those between reordered frames."""
    told = []
    content = uneven_video(container, step, bf)
    clip = load_clip(content, lambda info: told.append(info) or uniform_frames(8)(info))
    assert told[0].duration_seconds == pytest.approx((step(29) + 40) / 1000, abs=0.03)
    if container != "matroska":  # which does not state how many frames there are
        assert told[0].num_frames == 30
        assert told[0].frame_rate == pytest.approx(30 / told[0].duration_seconds)
    moments = uniform_frames(8)(told[0])
    shown = [max(k for k in range(30) if step(k) <= 1000 * moment) for moment in moments]
    assert clip.timestamps.tolist() == pytest.approx([step(k) / 1000 for k in shown], abs=1e-3)


def test_packets_and_a_late_start_do_not_change_the_duration():
    """Packets last as long as their frames, not the steps between packets; also in fragments, which
    have no list. FFmpeg takes the end for a duration where it does not see the start."""
    for options in ({}, {"movflags": "frag_keyframe+empty_moov"}):
        packets = demux_video(uneven_video("mp4", pause_near_the_end, "2", **options))
        assert packets.duration == pytest.approx(2.12, abs=1e-3)
    told = []
    content = uneven_video("matroska", lambda number: 500 + 3000 * number, "0", num_frames=2)
    load_clip(content, lambda info: told.append(info) or uniform_frames(8)(info))
    assert (told[0].start_seconds, told[0].duration_seconds) == pytest.approx((0.5, 3.04), abs=1e-3)


@pytest.mark.parametrize("step", [pause_near_the_beginning, pause_near_the_end, pauses])
def test_a_cut_video_of_a_variable_rate_is_refused(step):
    """Its list of packets comes first, and has those that are not there any more."""
    content = uneven_video("mp4", step, "2", moov_size="4096")
    start = content.index(b"mdat")
    content = content[: start + (len(content) - start) * 4 // 5]
    with pytest.raises(
        DecodeError, match=r"^<bytes>: no frame at .* cut off, and states \d\.\d+ s"
    ):
        load_clip(content, uniform_frames(30))
