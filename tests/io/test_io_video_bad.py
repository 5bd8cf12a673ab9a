"""Bad videos: a DecodeError that names the file, or the right frames."""

import io

import pytest
import torch
from _videos import KINDS, decode_plainly, write_video
from PIL import Image
from test_io_audio import KINDS as SOUNDS, write as write_sound

from spdl_torch.errors import DecodeError
from spdl_torch.io import demux_video, load_clip, load_video, uniform_frames

EXAMPLE = write_video(KINDS["fragmented"])


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "Invalid data"),
        (b"no video at all" * 100, "Invalid data"),
        (EXAMPLE[:300], "bad.mp4: "),
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
            load_video(File(EXAMPLE))


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
    with pytest.raises(
        DecodeError, match=rf"^<bytes>: no frame in \[{moment:g}, ".replace("+", ".")
    ):
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
