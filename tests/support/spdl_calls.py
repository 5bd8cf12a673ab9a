"""Calls of ``spdl.io``, to be made of SPDL and of ours.

``python -m support.spdl_calls FOLDER OUT.npz`` makes them of SPDL: in a process of its own, as its
FFmpeg is to be that of PyAV.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).resolve().parents[1]
SONAMES = ("avutil", "avcodec", "avformat", "avfilter", "avdevice", "swscale", "swresample")


def _frames(io, path, **options):
    packets = io.demux_video(path)
    return io.decode_packets(packets, filter_desc=io.get_filter_desc(packets, **options))


def _seen(io, path):
    """What packets and frames say of themselves."""
    packets = io.demux_video(path, timestamp=("1/10", 0.9))
    facts = [packets.width, packets.height, *packets.frame_rate, *packets.codec.time_base]
    facts += [*packets.timestamp, *packets.get_timestamps()]
    frames = io.decode_packets(packets)
    facts += [len(frames), frames.num_frames, frames.width, frames.height]
    facts += [*frames.time_base, *frames.get_timestamps(), *frames.get_pts()]
    return np.array([*facts, frames[2].pts, frames[-1].pts], np.float64)


VIDEO = {
    "plain": lambda io, p: io.load_video(p),
    "steps": lambda io, p: io.convert_frames(io.decode_packets(io.demux_video(p))),
    "scale": lambda io, p: io.convert_frames(_frames(io, p, scale_width=32, scale_height=40)),
    "fps": lambda io, p: io.convert_frames(_frames(io, p, filter_desc="fps=7/1")),
    "own format": lambda io, p: io.convert_frames(_frames(io, p, pix_fmt=None)),
    "gray": lambda io, p: io.convert_frames(_frames(io, p, pix_fmt="gray")),
    "bytes": lambda io, p: io.load_video(Path(p).read_bytes(), name="a video"),
    "window": lambda io, p: io.load_video(p, (0.2, 0.7)),
    "three": lambda io, p: io.convert_frames(
        io.decode_packets(io.demux_video(p), io.get_video_filter_desc(), None, num_frames=3)
    ),
    "sampled": lambda io, p: io.convert_frames(
        io.sample_decode_video(io.demux_video(p), [0, 7, 8, 21], decode_config=io.decode_config())
    ),
    "configured": lambda io, p: io.load_video(
        p, decode_config=io.decode_config(decoder_options={"threads": "2"})
    ),
    "one": lambda io, p: io.convert_frames(io.decode_packets(io.demux_video(p))[4]),
    "two videos": lambda io, p: io.convert_frames([_frames(io, p), _frames(io, p)]),
    "stored": lambda io, p: io.convert_frames(_frames(io, p), io.cpu_storage(4_000_000, False)),
    "facts": _seen,
}

LARGE_BYTES = 200_000
OF_LARGE = ("plain", "scale", "fps", "window", "sampled", "facts")

STRETCH = "scale=w=40:h=24,format=pix_fmts=rgb24"


def _stretched(io, p):
    return io.decode_packets(io.demux_image(p), filter_desc=STRETCH)


IMAGE = {
    "scaled": lambda io, p: io.load_image(
        p, filter_desc=io.get_video_filter_desc(scale_width=64, scale_height=48)
    ),
    "gray": lambda io, p: io.load_image(p, filter_desc="format=pix_fmts=gray"),
    "configured": lambda io, p: io.load_image(p, decode_config=io.decode_config(), name="an image"),
    "steps": lambda io, p: io.convert_frames(io.decode_packets(io.demux_image(p))),
    "bytes": lambda io, p: io.convert_frames(
        io.decode_packets(io.demux_image(Path(p).read_bytes()), filter_desc=STRETCH)
    ),
    "batch": lambda io, p: io.convert_frames([_stretched(io, p), _stretched(io, p)]),
    "stored": lambda io, p: io.convert_frames(
        [_stretched(io, p)], io.cpu_storage(10_000, pin_memory=False)
    ),
}


def results(io, folder):
    """What every call gives for every file of a folder, as arrays by name: figures as they are, of
    pixels the shape and a checksum.
    """
    found = {}
    for path in sorted(Path(folder).iterdir()):
        calls = IMAGE if path.suffix in (".jpg", ".png") else VIDEO
        if path.stat().st_size > LARGE_BYTES and calls is VIDEO:
            calls = {name: VIDEO[name] for name in OF_LARGE}
        for name, call in calls.items():
            array = io.to_numpy(call(io, str(path)))
            if array.dtype == np.uint8:
                checksum = hashlib.sha256(np.ascontiguousarray(array)).digest()
                array = np.array([*array.shape, *checksum])
            found[f"{path.name}: {name}"] = array
    return found


def results_of_spdl(folder, out):
    """The same of SPDL. Skips where SPDL finds no FFmpeg."""
    import av

    links = Path(out).parent / "ffmpeg"
    links.mkdir()
    bundled = Path(av.__file__).parent.parent / "av.libs"
    for name in SONAMES:  # under the names that SPDL looks for
        major = av.library_versions[f"lib{name}"][0]
        for library in bundled.glob(f"lib{name}-*"):
            (links / f"lib{name}.so.{major}").symlink_to(library)
    paths = os.pathsep.join([str(links), str(bundled)])
    done = subprocess.run(
        [sys.executable, "-m", "support.spdl_calls", str(folder), str(out)],
        cwd=TESTS,
        env={**os.environ, "LD_LIBRARY_PATH": paths},
        capture_output=True,
        text=True,
        timeout=50,
    )
    if "Failed to import libspdl." in done.stderr:
        pytest.skip(f"SPDL finds no FFmpeg: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    with np.load(out) as arrays:
        return {name: arrays[name] for name in arrays.files}


if __name__ == "__main__":
    import spdl.io

    np.savez(sys.argv[2], **results(spdl.io, sys.argv[1]))
