"""``decoder="torchcodec"``: the frames, times and errors of FFmpeg's decoders."""

import os
import pathlib
import re
import subprocess
import sys

import av
import pytest
import torch
from _lazy_device import LazyDevice, install, machine
from _videos import KINDS, write_video

from spdl_torch.errors import DecodeError, UnsupportedOptionError
from spdl_torch.io import (
    cpu_storage,
    cuda_config,
    decode_config,
    demux_config,
    load_clip,
    load_clip_batch,
    load_video,
    uniform_frames,
)
from spdl_torch.io._transfer import cuda
from spdl_torch.io._video import torchcodec_video
from spdl_torch.io._video.torchcodec_video import check_torchcodec, resized

VIDEO = write_video(KINDS["b-frames"])


# Two that torchcodec decodes as it should, and those that it would not.
SOME = ("b-frames", "variable rate", "mirrored", "mpeg4 in avi", "mpeg2 in ts", "raw h264")


def reason_against_torchcodec():
    """Why it cannot be used here; None = it can."""
    try:
        check_torchcodec(None)
    except ImportError as error:
        return str(error)
    return None


@pytest.fixture
def library():
    """torchcodec with FFmpeg, or a skipped test."""
    reason = reason_against_torchcodec()
    if reason is not None:
        pytest.skip(reason)


def test_all_of_this_with_the_libraries_of_pyav(tmp_path):
    """Where torchcodec finds no FFmpeg: PyAV's wheel has one, under names of its own, which can
    only be given to a process before it starts."""
    pytest.importorskip("torchcodec", reason="torchcodec is not installed")
    wheel = pathlib.Path(av.__file__).parents[1] / "av.libs"
    if reason_against_torchcodec() is None or not wheel.is_dir():
        pytest.skip("the other tests of this file run, or can not")
    for path in wheel.iterdir():
        found = re.fullmatch(r"(lib(?:av|sw)\w+)-\w+(\.so\.\d+)[.\d]*", path.name)
        if found is not None:
            (tmp_path / "".join(found.groups())).symlink_to(path)
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{tmp_path}:{wheel}"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", __file__]
    done = subprocess.run(
        [*command, "-k", "not pyav and not stack"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert "needs torchcodec" not in done.stdout


def decoded_by(decoder, video, moments, **options):
    """A clip, or the error in its place."""
    try:
        return load_clip(video, lambda info: moments, decoder=decoder, **options)
    except DecodeError as error:
        return str(error).split(":", 1)[1]


@pytest.mark.parametrize("kind", SOME)
def test_frames_and_times_are_those_of_ffmpeg(library, kind):
    """Also of containers that turn frames, or that torchcodec reads otherwise."""
    video = write_video(KINDS[kind])
    for moments in ([0.2, 0.9, 0.2, -3.0], [1.3]):
        mine = decoded_by("ffmpeg", video, moments)
        theirs = decoded_by("torchcodec", video, moments)
        assert torch.equal(theirs.timestamps, mine.timestamps)
        assert torch.equal(theirs.frames, mine.frames)
        sizes = {"width": 32, "height": 20, "resize": "antialias"}
        mine = decoded_by("ffmpeg", video, moments, **sizes).frames
        theirs = decoded_by("torchcodec", video, moments, **sizes).frames
        assert theirs.shape == mine.shape
        assert (theirs.int() - mine.int()).abs().max() <= 1


def test_it_is_torchcodec_that_decodes(library, monkeypatch):
    """A video that it takes; and FFmpeg decodes one that it does not."""
    took, decoded = [], torchcodec_video.decoded_frames
    spy = lambda *args: took.append(decoded(*args)) or took[-1]  # noqa: E731
    monkeypatch.setattr(torchcodec_video, "decoded_frames", spy)
    for kind in ("b-frames", "mirrored"):
        load_clip(write_video(KINDS[kind]), uniform_frames(2), decoder="torchcodec")
        load_video(write_video(KINDS[kind]), decoder="torchcodec")
    load_clip_batch([VIDEO, VIDEO], uniform_frames(2), decoder="torchcodec")
    assert [each is None for each in took] == [False, False, True, True, False, False]


@pytest.mark.parametrize("sizes", [{}, {"width": 32, "height": 20, "resize": "antialias"}])
def test_batch_is_that_of_its_clips(library, sizes):
    """Also where FFmpeg has decoded some of them; another shape is the same error."""
    videos = [write_video(KINDS[kind]) for kind in ("no b-frames", "mirrored", "variable rate")]
    options = {"decoder": "torchcodec", **sizes}
    clips = [load_clip(video, uniform_frames(3), **options) for video in videos]
    batch = load_clip_batch(videos, uniform_frames(3), **options)
    assert torch.equal(batch.frames, torch.stack([clip.frames for clip in clips]))
    assert torch.equal(batch.timestamps, torch.stack([clip.timestamps for clip in clips]))
    assert batch.frames.is_contiguous()
    with pytest.raises(DecodeError, match=r"shape \(3, 47, 61, 3\) does not go with .* of \(3, 48"):
        load_clip_batch(
            [VIDEO, write_video(KINDS["odd size"])], uniform_frames(3), decoder="torchcodec"
        )


@pytest.mark.parametrize("kind", SOME)
def test_videos_are_those_of_ffmpeg(library, kind):
    """Whole, and every frame of a window."""
    video = write_video(KINDS[kind])
    for window in (None, (0.3, 0.9)):
        expected = load_video(video, window)
        assert torch.equal(load_video(video, window, decoder="torchcodec"), expected)


def test_source_has_its_name_for_samplers_and_errors(library, tmp_path):
    """A file that is read before it is opened is not called ``<bytes>``."""
    (tmp_path / "a.mp4").write_bytes(VIDEO)
    names = []
    with (tmp_path / "a.mp4").open("rb") as file:
        load_clip(file, lambda info: names.append(info.source) or [0.0], decoder="torchcodec")
    (tmp_path / "bad.mp4").write_bytes(VIDEO[:2000])
    assert names == [str(tmp_path / "a.mp4")]
    with (
        (tmp_path / "bad.mp4").open("rb") as file,
        pytest.raises(DecodeError, match=r"/bad\.mp4: "),
    ):
        load_video(file, decoder="torchcodec")
    with pytest.raises(DecodeError, match=r"^mine: "):
        load_video(VIDEO[:2000], decoder="torchcodec", name="mine")


@pytest.mark.parametrize("video", [b"no video", VIDEO[:2000]])
def test_errors_are_those_of_ffmpeg(library, video):
    """Whatever torchcodec calls them."""
    assert isinstance(decoded_by("torchcodec", video, [0.0]), str)
    assert decoded_by("torchcodec", video, [0.0]) == decoded_by("ffmpeg", video, [0.0])


def test_missing_library_is_named(monkeypatch):
    """With what to install."""
    torchcodec_video.loaded_version.cache_clear()
    monkeypatch.setitem(sys.modules, "torchcodec", None)
    with pytest.raises(ImportError, match=r"needs torchcodec.*spdl_torch\[torchcodec\]"):
        load_clip(VIDEO, uniform_frames(1), decoder="torchcodec")


def test_what_it_does_not_do_is_refused():
    """Before anything is read."""
    options = {"decoder": "torchcodec"}
    with pytest.raises(UnsupportedOptionError, match="goes with resize='antialias', got 'swsc"):
        load_clip(VIDEO, uniform_frames(1), width=8, height=8, **options)
    with pytest.raises(UnsupportedOptionError, match="memory of its own"):
        load_clip(VIDEO, uniform_frames(1), storage=cpu_storage(9, pin_memory=False), **options)
    with pytest.raises(UnsupportedOptionError, match="device_config must be None or a CUDAConfig"):
        load_clip(VIDEO, uniform_frames(1), device_config="cuda")
    for load, *sampler in ((load_clip, uniform_frames(1)), (load_clip_batch, None), (load_video,)):
        with pytest.raises(ValueError, match="decoder must be 'ffmpeg' or 'torchcodec', got 'nvd"):
            load(VIDEO, *sampler, decoder="nvdec")
    with pytest.raises(UnsupportedOptionError, match=r"load_clip_batch: .* resize='antialias'"):
        load_clip_batch([VIDEO], uniform_frames(1), width=8, **options)
    storage = cpu_storage(9, pin_memory=False)
    with pytest.raises(UnsupportedOptionError, match=r"load_clip_batch: .* memory of its own"):
        load_clip_batch([VIDEO], uniform_frames(1), storage=storage, **options)


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ({"filter_desc": None}, "filter_desc, got None"),
        ({"filter_desc": "format=gray"}, "filter_desc, got 'format=gray'"),
        ({"decode_config": decode_config("h264")}, "decode_config, got DecodeConfig"),
        ({"demux_config": demux_config("mp4")}, "demux_config, got DemuxConfig"),
    ],
)
def test_what_is_for_ffmpeg_alone_is_refused(option, given):
    """By ``load_video``, before anything is read."""
    with pytest.raises(UnsupportedOptionError, match=f"load_video: .* goes without {given}"):
        load_video(VIDEO, decoder="torchcodec", **option)


def test_torchcodec_without_cuda_is_refused(library, monkeypatch):
    """By its version, or as it cannot make a decoder there that it can make on the CPU."""
    monkeypatch.setattr(cuda, "resolve", lambda device: device)
    options = {"decoder": "torchcodec", "device_config": cuda_config(0)}
    with monkeypatch.context() as patched:
        patched.setattr(torchcodec_video, "loaded_version", lambda: "0.17.0+cpu")
        with pytest.raises(RuntimeError, match=r"0.17.0.cpu. cannot decode on a GPU"):
            load_clip(VIDEO, uniform_frames(1), **options)
    with pytest.raises(RuntimeError, match="cannot decode on a GPU: it was built without CUDA"):
        torchcodec_video.decoder_of(VIDEO, torch.device("cuda", 0), 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_missing_device_is_named(library):
    """As everywhere."""
    for decoder in ("torchcodec", "ffmpeg"):
        options = {"decoder": decoder, "device_config": cuda_config(0)}
        with pytest.raises(RuntimeError, match="needs CUDA, and torch finds none"):
            load_clip(VIDEO, uniform_frames(1), **options)
        with pytest.raises(RuntimeError, match="needs CUDA, and torch finds none"):
            load_clip_batch([VIDEO], uniform_frames(1), **options)
        with pytest.raises(RuntimeError, match="needs CUDA, and torch finds none"):
            load_video(VIDEO, **options)


@pytest.mark.parametrize("size", [(20, 16), (100, 90)])
def test_resize_of_a_gpu_is_within_one_level_of_that_of_the_cpu(size):
    """It works with floats, where the CPU's works with bytes."""
    frames = torch.randint(0, 256, (3, 48, 64, 3), dtype=torch.uint8)
    floats = torch.nn.functional.interpolate(
        frames.permute(0, 3, 1, 2).float(), size[::-1], mode="bilinear", antialias=True
    )
    expected = floats.permute(0, 2, 3, 1).round()
    assert (resized(frames, size).float() - expected).abs().max() <= 1
    assert resized(frames, size).is_contiguous()


def test_clips_of_ffmpeg_go_to_the_device(monkeypatch):
    """One clip, and a batch."""
    install(LazyDevice(), monkeypatch.setattr)
    monkeypatch.setattr(cuda, "resolve", lambda device: torch.device("cuda", 0))
    sampler, config = uniform_frames(2), cuda_config(0)
    expected = load_clip(VIDEO, sampler).frames
    assert torch.equal(load_clip(VIDEO, sampler, device_config=config).frames, expected)
    batch = load_clip_batch([VIDEO, VIDEO], sampler, device_config=config)
    assert torch.equal(batch.frames, torch.stack([expected] * 2))
    assert batch.timestamps.shape == (2, 2)


def test_what_torchcodec_leaves_goes_to_the_device(library, monkeypatch):
    """Decoded by FFmpeg: one clip, a batch and a video."""
    install(LazyDevice(), monkeypatch.setattr)
    monkeypatch.setattr(cuda, "resolve", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(torchcodec_video, "loaded_version", lambda: "0.17.0+cu130")
    monkeypatch.setattr(torchcodec_video, "decoder_of", lambda *args: None)
    sampler, options = uniform_frames(2), {"decoder": "torchcodec", "device_config": cuda_config(0)}
    expected = load_clip(VIDEO, sampler).frames
    assert torch.equal(load_clip(VIDEO, sampler, **options).frames, expected)
    batch = load_clip_batch([VIDEO, VIDEO], sampler, **options)
    assert torch.equal(batch.frames, torch.stack([expected] * 2))
    assert torch.equal(load_video(VIDEO, **options), load_video(VIDEO))
    assert machine().num_copied == 4


def test_batch_of_clips_is_the_stack_of_each():
    """With torch.stack as the oracle; the first clip's shape is that of all."""
    videos = [VIDEO, write_video(KINDS["no b-frames"])]
    clips = [load_clip(each, uniform_frames(3), width=40) for each in videos]
    batch = load_clip_batch(videos, uniform_frames(3), width=40)
    assert torch.equal(batch.frames, torch.stack([clip.frames for clip in clips]))
    assert torch.equal(batch.timestamps, torch.stack([clip.timestamps for clip in clips]))
    other = write_video(KINDS["odd size"])
    with pytest.raises(DecodeError, match=r"shape \(3, 47, 61, 3\) does not go with .* of \(3, 48"):
        load_clip_batch([VIDEO, other], uniform_frames(3))
    with pytest.raises(ValueError, match="at least one video, got none"):
        load_clip_batch([], uniform_frames(3))


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["b-frames", "hevc", "mirrored", "vp9 in webm"])
def test_gpu_decodes_the_same_frames(library, kind):
    """Within a few levels: its conversion of colours is another one. Times are equal."""
    video, moments = write_video(KINDS[kind]), [0.2, 0.9, 0.2]
    config = cuda_config(torch.cuda.current_device())
    for size in ({}, {"width": 32, "height": 20, "resize": "antialias"}):
        mine = load_clip(video, lambda info: moments, **size)
        theirs = load_clip(
            video, lambda info: moments, decoder="torchcodec", device_config=config, **size
        )
        assert theirs.frames.device.type == "cuda"
        assert torch.equal(theirs.timestamps, mine.timestamps)
        assert (theirs.frames.cpu().float() - mine.frames.float()).abs().mean() <= 4
        batch = load_clip_batch(
            [video] * 2, lambda info: moments, decoder="torchcodec", device_config=config, **size
        )
        assert torch.equal(batch.frames, torch.stack([theirs.frames] * 2))
    whole = load_video(video, decoder="torchcodec", device_config=config)
    assert (whole.cpu().float() - load_video(video).float()).abs().mean() <= 4
