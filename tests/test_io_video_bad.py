"""Bad videos: a DecodeError that names the file, or the right frames."""

import io

import av
import numpy as np
import pytest
import torch
from _videos import KINDS, decode_plainly, write_video

from spdl_torch.errors import DecodeError
from spdl_torch.io import demux_video, load_clip, load_video, uniform_frames

EXAMPLE = write_video(KINDS["fragmented"])


def audio_only():
    """A file with sound and no picture."""
    file = io.BytesIO()
    with av.open(file, "w", "mp4") as container:
        stream = container.add_stream("aac", rate=44100, layout="mono")
        for number in range(10):
            silence = np.zeros((1, 1024), np.float32)
            frame = av.AudioFrame.from_ndarray(silence, format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 44100, number * 1024
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "Invalid data"),
        (b"no video at all" * 100, "Invalid data"),
        (EXAMPLE[:300], "bad.mp4: "),
        (audio_only(), "no video stream in it, only: audio"),
        (b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:9/x.ts\n#EXT-X-ENDLIST\n", "bad.mp4: "),
        (b"ffconcat version 1.0\nfile /etc/hostname\n", "bad.mp4: "),
    ],
    ids=["empty", "text", "truncated", "audio", "playlist", "concat"],
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

    class File:
        def read(self, size):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        load_video(File())


def test_a_window_after_the_end_raises_decode_error():
    """And says where it was looked for."""
    with pytest.raises(DecodeError, match=r"<bytes>: no frame in \[100, 101\) s"):
        load_video(EXAMPLE, (100, 101))


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
