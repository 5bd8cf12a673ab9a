"""Video files of all kinds that PyAV can write, broken ones too, and what a decode of all gives."""

import bisect
import functools
import itertools
import re

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from spdl_torch.errors import DecodeError
from spdl_torch.io import (
    convert_frames,
    decode_packets,
    demux_video,
    load_clip,
    load_video,
    sample_decode_video,
    strided_frames,
)
from support.videos import Kind, decode_plainly, write_video

QUIET = "log-level=none"


def x264(params="", **options):
    """Options of small, quick H.264 with B-frames and a keyframe every 8 frames."""
    given = {"preset": "veryfast", "bf": "2", "g": "8", "sc_threshold": "0"}
    return given | {"x264-params": f"{QUIET}{params}"} | options


def x265(params=""):
    """The same for HEVC."""
    return {"preset": "ultrafast", "x265-params": f"{QUIET}:keyint=8{params}"}


def of(container, codec, options=(), pix_fmt="yuv420p", **more):
    """A kind of 24 frames."""
    return Kind(container, codec, dict(options), pix_fmt, **({"num_frames": 24} | more))


MPEG = {"bf": "2", "g": "8"}
REFRESH = x264(":intra-refresh=1", bf="0")
REFRESH_B = x264(":intra-refresh=1")
OPEN = x264(":open-gop=1")
VP9 = {"g": "8", "deadline": "realtime"}
H264 = "libx264", x264()
FRAGMENTS = {"movflags": "frag_keyframe+empty_moov"}
EACH_FRAME = {"movflags": "frag_every_frame+empty_moov+default_base_moof"}
AV1 = {"g": "8", "preset": "12", "svtav1-params": "lp=1"}


def uneven(number):
    return number * number // 7 + number


def from_fifty(number):
    return number + 50


def six_seconds_each(number):
    return 150 * number


def from_minus_five(number):
    return number - 5


KINDS = {
    "MPEG program stream, MPEG-2": of("mpeg", "mpeg2video", MPEG),
    "MPEG program stream, MPEG-1": of("mpeg", "mpeg1video", MPEG),
    "transport stream, MPEG-2": of("mpegts", "mpeg2video", MPEG),
    "transport stream, H.264": of("mpegts", *H264),
    "transport stream, H.264 open GOP": of("mpegts", "libx264", OPEN),
    "transport stream, H.264 intra-refresh": of("mpegts", "libx264", REFRESH, num_frames=40),
    "transport stream, H.264 intra-refresh, B-frames": of(
        "mpegts", "libx264", REFRESH_B, num_frames=40
    ),
    "transport stream, H.264 interlaced": of("mpegts", "libx264", x264(flags="+ildct+ilme")),
    "transport stream, HEVC": of("mpegts", "libx265", x265()),
    "AVI, MPEG-4": of("avi", "mpeg4", {"g": "8"}),
    "AVI, MPEG-4 with B-frames": of("avi", "mpeg4", MPEG),
    "AVI, MPEG-4, all marked": of("avi", "mpeg4", {"g": "8"}, marks_all=True),
    "AVI, H.263, all marked": of("avi", "h263", {"g": "8"}, size=(176, 144), marks_all=True),
    "AVI, H.264": of("avi", *H264),
    "AVI, MJPEG": of("avi", "mjpeg", pix_fmt="yuvj420p"),
    "AVI, raw with a palette that changes": of(
        "avi", "rawvideo", pix_fmt="pal8", rate=10, palette_changes=True
    ),
    "AVI, raw with a palette": of("avi", "rawvideo", pix_fmt="pal8", rate=10),
    "AVI, ZMBV with a palette": of("avi", "zmbv", {"g": "4"}, "pal8"),
    "AVI, MS-RLE with a palette": of("avi", "msrle", {"g": "4"}, "pal8"),
    "AVI, Cinepak": of("avi", "cinepak", {"g": "4"}, "rgb24", num_frames=8),
    "MOV, raw with a palette that changes": of(
        "mov", "rawvideo", pix_fmt="pal8", rate=10, palette_changes=True
    ),
    "MOV, QuickTime Animation, 8 bit": of("mov", "qtrle", {"g": "4"}, "gray"),
    "MOV, ProRes": of("mov", "prores_ks", pix_fmt="yuv422p10le"),
    "MP4, H.264": of("mp4", *H264),
    "MP4, H.264 open GOP": of("mp4", "libx264", OPEN),
    "MP4, H.264 B-pyramid": of("mp4", "libx264", x264(":b-pyramid=normal", bf="3")),
    "MP4, H.264 intra-refresh": of("mp4", "libx264", REFRESH, num_frames=40),
    "MP4, H.264 inexact recovery points": of(
        "mp4", "libx264", x264(bf="0", g="99"), recovery=(8, 16)
    ),
    "MP4, H.264 rotated": of("mp4", *H264, rotation=(90,)),
    "MP4, H.264 mirrored": of("mp4", *H264, rotation=(180, True)),
    "MP4, H.264 odd size": of("mp4", *H264, "yuv444p", size=(61, 47)),
    "MP4, H.264 variable rate": of("mp4", *H264, step=uneven),
    "MP4, H.264 late start": of("mp4", *H264, step=from_fifty),
    "MP4, H.264 negative times": of("mp4", *H264, step=from_minus_five),
    "MP4, H.264 negative offsets": of("mp4", *H264, muxer={"movflags": "negative_cts_offsets"}),
    "MP4, H.264 without edit list": of("mp4", *H264, muxer={"use_editlist": "0"}),
    "MP4, H.264 edit list from the middle": of("mp4", *H264, edit=(8, None)),
    "MP4, H.264 edit list, both ends cut": of("mp4", *H264, edit=(5, 600)),
    "MP4, H.264 edit list, rotated": of("mp4", *H264, rotation=(90,), edit=(5, 600)),
    "MP4, H.264 fragments": of("mp4", *H264, muxer=FRAGMENTS),
    "MP4, H.264 a fragment for each frame": of("mp4", *H264, muxer=EACH_FRAME),
    "MP4, H.264 fragments after samples": of("mp4", *H264, muxer={"movflags": "frag_keyframe"}),
    "MP4, HEVC": of("mp4", "libx265", x265()),
    "MP4, HEVC open GOP": of("mp4", "libx265", x265(":open-gop=1:bframes=3")),
    "MP4, HEVC temporal layers": of("mp4", "libx265", x265(":temporal-layers=3")),
    "MP4, HEVC temporal layers, deep": of("mp4", "libx265", x265(":temporal-layers=5")),
    "MP4, MPEG-4 with B-frames": of("mp4", "mpeg4", MPEG),
    "MP4, AV1": of("mp4", "libsvtav1", AV1, size=(64, 64)),
    "Matroska, H.264 variable rate": of("matroska", *H264, step=uneven),
    "Matroska, H.264 negative times": of(
        "matroska", *H264, step=from_minus_five, muxer={"avoid_negative_ts": "disabled"}
    ),
    "Matroska, H.264 a frame in 6 s": of("matroska", *H264, step=six_seconds_each),
    "Matroska, H.264 late start": of("matroska", *H264, step=from_fifty),
    "Matroska, H.264 intra-refresh": of("matroska", "libx264", REFRESH, num_frames=40),
    "Matroska, H.264 equal times": of("matroska", "libx264", x264(bf="0"), same_time=(10, 11)),
    "Matroska, HEVC 10 bit": of("matroska", "libx265", x265(), "yuv420p10le"),
    "Matroska, MPEG-2": of("matroska", "mpeg2video", MPEG),
    "Matroska, MPEG-4 with B-frames": of("matroska", "mpeg4", MPEG),
    "Matroska, FFV1": of("matroska", "ffv1", {"g": "4"}),
    "Matroska, MJPEG": of("matroska", "mjpeg", pix_fmt="yuvj420p"),
    "WebM, VP9": of("webm", "libvpx-vp9", VP9),
    "WebM, VP8": of("webm", "libvpx", VP9),
    "WebM, VP8 with hidden frames": of("webm", "libvpx", VP9, hidden=(3, 12, 13)),
    "WebM, VP9 without a duration, longer sound": of(
        "webm", "libvpx-vp9", VP9, seconds_of_sound=3, has_durations=False
    ),
    "Matroska, VP9 with a duration, longer sound": of(
        "matroska", "libvpx-vp9", VP9, seconds_of_sound=3
    ),
    "WebM, AV1": of("webm", "libsvtav1", AV1, size=(64, 64)),
    "GIF": of("gif", "gif", pix_fmt="rgb8", rate=10),
    "APNG": of("apng", "apng", pix_fmt="rgb24", rate=10),
    "FLV, H.264": of("flv", *H264),
    "FLV, Sorenson": of("flv", "flv", {"g": "8"}),
    "DV": of("dv", "dvvideo", size=(720, 576), num_frames=10),  # whose ticks seem to be its rate
    "ASF, WMV2": of("asf", "wmv2", {"g": "8"}),
    "NUT, MPEG-4 with B-frames": of("nut", "mpeg4", MPEG),
    "Ogg, VP8": of("ogg", "libvpx", VP9),
    "MXF, MPEG-2": of("mxf", "mpeg2video", MPEG),
    "IVF, VP9": of("ivf", "libvpx-vp9", VP9),
    "raw H.264": of("h264", *H264),
    "raw HEVC": of("hevc", "libx265", x265()),
    "raw MPEG-2": of("mpeg2video", "mpeg2video", MPEG),
    "raw MPEG-4": of("m4v", "mpeg4", MPEG),
    "Y4M": of("yuv4mpegpipe", "wrapped_avframe"),
}

TURNS = {(): np.asarray, (90,): np.rot90, (180, True): np.flipud}
"""What puts the frames of a kind upright, by its rotation."""

VARIANTS = {
    "whole": lambda content: content,
    "cut at the front": lambda content: content[len(content) // 4 :],
    "cut in the middle": lambda content: (
        content[: len(content) // 3] + content[len(content) // 2 :]
    ),
    "cut at the end": lambda content: content[: len(content) * 3 // 4],
    "two glued together": lambda content: content + content,
}

BY_CHANCE = {
    ("AVI, MJPEG", "cut in the middle"),
    ("Matroska, MJPEG", "cut in the middle"),
    ("Matroska, H.264 a frame in 6 s", "cut in the middle"),
}
"""Files with a picture of which FFmpeg decodes one part and leaves the other to chance, unsaid; or
with frames that it makes up, for what they refer to is lost."""


@functools.cache
def decoded(kind, variant="whole"):
    """A file of a kind, decoded plainly; None if PyAV cannot read what is left of it."""
    content = VARIANTS[variant](write_video(KINDS[kind]))
    try:
        return decode_plainly(content, TURNS[KINDS[kind].rotation])
    except (av.FFmpegError, IndexError):
        return None


class Tally:
    """Compares what is loaded of a file with the decode of all, or takes an error that names it."""

    def __init__(self, kind, variant="whole", video=None, opened=lambda content: content):
        self.kind, self.variant = kind, variant
        self.video = video or decoded(kind, variant)
        self.source = lambda: opened(self.video.source)
        self.refused = []

    def compare(self, load, places):
        """Compare what is loaded with the frames at some places; whether it came."""
        try:
            frames = load()
        except DecodeError as error:
            self.refused.append(str(error))
        else:
            assert len(frames) == len(places)
            for frame, place in zip(frames, places, strict=True):
                assert torch.equal(frame, self.video.frames[place]), place
            return True
        # A file that is as it was written is never refused.
        assert self.variant != "whole", self.refused
        assert re.match("<bytes>: ", self.refused[-1]), self.refused
        return False

    @functools.cached_property
    def times(self):
        """Our own times of all frames; None if the file is refused whole."""
        times = []

        def load():
            packets = demux_video(self.source())
            times.extend(packets.timestamps)
            assert len(packets) == len(times)
            return convert_frames(decode_packets(packets))

        if not self.compare(load, range(len(self.video.frames))):
            return None
        assert len(times) == len(self.video.frames)
        if self.variant == "whole" and None not in self.video.times:
            assert np.allclose(times, self.video.times, atol=1e-6)
        return times

    def clip(self, moments):
        """Compare the frames on display at some moments."""
        shown = sorted(self.times)
        places = sorted(range(len(shown)), key=lambda place: (self.times[place], place))
        wanted = [max(0, bisect.bisect_right(shown, moment + 1e-6) - 1) for moment in moments]

        def load():
            clip = load_clip(self.source(), lambda info: moments)
            assert clip.timestamps.dtype == torch.float64
            assert np.allclose(clip.timestamps, [shown[number] for number in wanted])
            return clip.frames

        self.compare(load, [places[number] for number in wanted])

    def facts(self):
        """Compare what a sampler is told with the frames and times of the decode of all."""
        told = []
        load_clip(self.source(), lambda info: told.append(info) or [0.0])
        (info,) = told
        times = sorted(self.times)
        kind = KINDS[self.kind]
        assert (info.source, info.width, info.height) == ("<bytes>", *kind.size)
        assert np.isclose(info.start_seconds, times[0], atol=1e-6)
        assert info.num_frames >= len(times)
        end, longest = info.start_seconds + info.duration_seconds, max(np.diff(times))
        assert times[-1] - 1e-6 <= end <= times[-1] + 1.5 * longest + 1e-6
        if kind.step in (None, from_fifty, from_minus_five) and not (kind.same_time or kind.hidden):
            assert info.frame_rate == pytest.approx(kind.rate)
            moments = strided_frames(len(times), 1)(info)
            shown = [bisect.bisect_right(times, moment + 1e-6) - 1 for moment in moments]
            assert shown == list(range(len(times)))

    def window(self, start, end):
        """Compare the frames of start <= time < end, which are some; of two videos the first's."""
        steps = enumerate(itertools.pairwise(self.times), 1)
        glue = next((k for k, (before, after) in steps if after < before), None)
        times = self.times[:glue] if self.variant == "two glued together" else self.times
        places = [k for k, time in enumerate(times) if start - 1e-6 <= time < end - 1e-6]
        self.compare(lambda: load_video(self.source(), (start, end)), places)

    def indices(self, wanted):
        """Compare the frames at some indices, ascending."""
        self.compare(
            lambda: convert_frames(sample_decode_video(demux_video(self.source()), wanted)),
            wanted,
        )

    def check(self, num_examples):
        """Compare by every way of access, at what hypothesis chooses."""
        if not self.times:
            return
        times = sorted(self.times)
        moments, ends = st.floats(times[0] - 1, times[-1]), [*times, times[-1] + 1]

        @settings(max_examples=num_examples, deadline=None, database=None)
        @given(
            st.lists(moments | st.sampled_from(times), min_size=1, max_size=4),
            st.sets(st.sampled_from(ends), min_size=2, max_size=2),
            st.sets(st.sampled_from(range(len(times))), min_size=1, max_size=5),
        )
        def chosen(moments, window, indices):
            self.clip(moments)
            self.window(min(window), max(window))
            self.indices(sorted(indices))

        chosen()
