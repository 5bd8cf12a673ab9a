"""Small videos made for the tests, and what PyAV alone makes of a video."""

import io
import struct
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import NamedTuple

import av
import numpy as np
import torch

from support.folders import DATA

REAL = sorted((DATA / "videos").glob("*.*"))


class Kind(NamedTuple):
    """How a video is made."""

    container: str
    codec: str
    options: dict = MappingProxyType({})
    pix_fmt: str = "yuv420p"
    size: tuple = (64, 48)
    rate: int = 25
    num_frames: int = 40
    step: object = None  # of the frames' times, in frames; None for constant
    rotation: tuple = ()
    muxer: dict = MappingProxyType({})
    hidden: tuple = ()  # the packets of VP8 whose frames are not to be displayed
    same_time: tuple = ()  # two packets, the second of which gets the time of the first
    edit: object = None  # the first frame and the ticks that an edit list leaves
    recovery: tuple = ()  # marked packets of H.264 whose pictures are not exact
    marks_all: bool = False  # whether the container marks every packet as a keyframe
    palette_changes: bool = False
    seconds_of_sound: int = 0  # in a stream of its own
    has_durations: bool = True  # the tags of Matroska's streams


KINDS = {
    "b-frames": Kind("mp4", "libx264", {"bf": "3", "g": "12", "x264-params": "b-pyramid=normal"}),
    "open gop": Kind("mp4", "libx264", {"g": "10", "bf": "2", "x264-params": "open-gop=1"}),
    "no b-frames": Kind("mp4", "libx264", {"bf": "0", "g": "8"}),
    "variable rate": Kind(
        "matroska", "libx264", {"bf": "2", "g": "10"}, step=lambda k: k * k // 7 + k
    ),
    "odd size": Kind("mp4", "libx264", {"g": "9"}, "yuv444p", (61, 47)),
    "rotated": Kind("mp4", "libx264", {"g": "9"}, rotation=(90,)),
    "mpeg4 in avi": Kind("avi", "mpeg4", {"bf": "2", "g": "12"}),
    "mpeg2 in ts": Kind("mpegts", "mpeg2video", {"bf": "2", "g": "12"}),
    "h264 in ts": Kind("mpegts", "libx264", {"bf": "2", "g": "12"}),
    "vp9 in webm": Kind("webm", "libvpx-vp9", {"g": "12", "deadline": "realtime"}),
    "hevc": Kind("mp4", "libx265", {"x265-params": "log-level=none:keyint=12"}),
    "raw h264": Kind("h264", "libx264", {"bf": "2", "g": "12"}),
    "fragmented": Kind("mp4", "libx264", {"g": "12"}, muxer={"movflags": "frag_keyframe"}),
    "mjpeg": Kind("avi", "mjpeg", pix_fmt="yuvj420p"),
    "long": Kind("mp4", "libx264", {"g": "50"}, rate=5, num_frames=200),
}


_written = {}
"""What was made before, by all that its kind says, with the kind: its functions stay alive."""


def write_video(kind, num_frames=None):
    """The bytes of a moving picture, every frame of which differs from the others; as many as the
    kind has, or as are asked for. It is made once: dozens of tests want the same ones."""
    num_frames = num_frames or kind.num_frames
    key = repr(kind), num_frames
    if key not in _written:
        # On a thread that ends: run by root, SVT-AV1 gives its caller's a real-time priority, and
        # whatever a thread that has it starts takes the cores from all others.
        with ThreadPoolExecutor(1) as other:
            _written[key] = kind, other.submit(_encoded, kind, num_frames).result()
    return _written[key][1]


def _encoded(kind, num_frames):
    file = io.BytesIO()
    width, height = kind.size
    with av.open(file, "w", kind.container, options=dict(kind.muxer)) as container:
        stream = container.add_stream(kind.codec, rate=kind.rate, options=dict(kind.options))
        stream.width, stream.height, stream.pix_fmt = width, height, kind.pix_fmt
        stream.codec_context.thread_count = 1
        if kind.rotation:
            stream.set_display_rotation(*kind.rotation)
        sound = container.add_stream("libopus", rate=48_000) if kind.seconds_of_sound else None
        rng = np.random.default_rng(0)
        packets = []
        canvas = np.kron(rng.integers(0, 256, (30, 60, 3)), np.ones((8, 8, 1))).astype(np.uint8)
        for number in range(num_frames):
            left = 5 * number % 300
            view = np.ascontiguousarray(canvas[number % 100 :, left:][:height, :width])
            frame = _picture(view, kind.pix_fmt, number if kind.palette_changes else 0)
            frame.pts = number if kind.step is None else kind.step(number)
            packets += stream.encode(frame)
        packets += stream.encode(None)
        packets = _edited(packets, kind)
        for number in range(50 * kind.seconds_of_sound):
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 1920), np.int16), "s16", "stereo")
            silence.sample_rate, silence.pts = 48_000, 960 * number
            packets += sound.encode(silence)
        container.mux([*packets, *(sound.encode(None) if sound else ())])
    content = file.getvalue()
    content = content if kind.has_durations else content.replace(b"DURATION", b"TRAJANUS")
    return content if kind.edit is None else _with_edit_list(content, *kind.edit)


def _with_edit_list(content, first, ticks):
    """An MP4 whose edit list begins with a frame, and leaves as many ticks; None: all after it."""
    content, place = bytearray(content), content.index(b"elst")
    content[place + 16 : place + 20] = struct.pack(">i", 1024 + 512 * first)
    if ticks is not None:  # of the movie's clock
        content[place + 12 : place + 16] = struct.pack(">I", ticks)
    return bytes(content)


def _picture(view, pix_fmt, turn):
    if pix_fmt != "pal8":
        return av.VideoFrame.from_ndarray(view).reformat(format=pix_fmt)
    shades = np.arange(256)
    palette = np.stack([255 + 0 * shades, shades, 255 - shades, 77 + 0 * shades], axis=1)
    palette[:, 1:] = np.roll(palette[:, 1:], 8 * turn, axis=0)
    return av.VideoFrame.from_ndarray(
        (view[..., 0].copy(), palette.astype(np.uint8)), format="pal8"
    )


def _edited(packets, kind):
    for packet in packets if kind.marks_all else ():
        packet.is_keyframe = True
    for number in kind.recovery:
        message = b"\0\0\0\1\6\6\1\x84\x80"  # after 0 frames, not exactly
        old, new = packets[number], av.Packet(message + bytes(packets[number]))
        new.pts, new.dts, new.time_base, new.stream = old.pts, old.dts, old.time_base, old.stream
        packets[number], new.is_keyframe = new, True
    for number in kind.hidden:
        content = bytearray(bytes(packets[number]))
        content[0] &= ~0x10
        packets[number].update(bytes(content))
    if kind.same_time:
        first, second = (packets[number] for number in kind.same_time)
        between = packets[kind.same_time[0] : kind.same_time[1] + 1]
        assert all(packet.pts == packet.dts for packet in between)
        second.pts = second.dts = None
        second.pts = second.dts = first.pts
    return packets


class Plain(NamedTuple):
    """A file or its content, and what PyAV makes of it from the first packet to the last."""

    source: str | bytes
    frames: torch.Tensor  # (N, H, W, 3)
    times: list  # seconds; None where the container has none


def decode_plainly(source, turn=np.asarray):
    """Every frame of a path or bytes, as stored or turned upright."""
    frames, times = [], []
    with av.open(io.BytesIO(source) if isinstance(source, bytes) else str(source)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        is_timed = container.format.name != "avi" and not int(container.format.flags) & 0x80
        for frame in container.decode(stream):
            array = np.ascontiguousarray(turn(frame.to_ndarray(format="rgb24")))
            frames.append(torch.from_numpy(array))
            has_time = is_timed and frame.pts is not None
            times.append(float(frame.pts * frame.time_base) if has_time else None)
    return Plain(source, torch.stack(frames) if frames else torch.empty(0), times)
