"""Sound: every sample that a decode of the whole file by PyAV gives, in windows too."""

import io
import random
import wave
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from spdl_torch.errors import DecodeError
from spdl_torch.io import load_audio

KINDS = {
    "wav": ("wav", "pcm_s16le", "s16", "stereo"),
    "flac": ("flac", "flac", "s16", "stereo"),
    "mp3": ("mp3", "libmp3lame", "fltp", "stereo"),
    "aac in mp4": ("mp4", "aac", "fltp", "mono"),
    "opus in webm": ("webm", "libopus", "flt", "stereo"),
    "opus in ogg": ("ogg", "libopus", "flt", "stereo"),
    "ac3 in ts": ("mpegts", "ac3", "fltp", "5.1"),
    "pcm in mov": ("mov", "pcm_f32le", "flt", "mono"),
}
RATE = 48_000


def write(container, codec, sample_format, layout, num_samples=24_000):
    """Half a second of a rising tone, another one in each channel."""
    number = av.AudioLayout(layout).nb_channels
    time = np.arange(num_samples) / RATE
    tones = [0.4 * np.sin(2 * np.pi * (300 + 200 * k + 800 * time) * time) for k in range(number)]
    frame = av.AudioFrame.from_ndarray(np.float32(tones), format="fltp", layout=layout)
    frame.sample_rate, frame.time_base, frame.pts = RATE, Fraction(1, RATE), 0
    with av.open(file := io.BytesIO(), "w", container) as out:
        stream = out.add_stream(codec, rate=RATE, layout=layout, format=sample_format)
        out.mux([packet for part in [frame, None] for packet in stream.encode(part)])
    return file.getvalue()


def decoded(content):
    """All samples, and the time of the first."""
    with av.open(io.BytesIO(content)) as container:
        frames = list(container.decode(audio=0))
    resampler = av.AudioResampler(format="fltp")
    parts = [out.to_ndarray() for frame in [*frames, None] for out in resampler.resample(frame)]
    begin = float(frames[0].pts * frames[0].time_base)
    return torch.from_numpy(np.concatenate(parts, axis=1)), begin


@pytest.fixture(scope="module", params=KINDS)
def sound(request):
    """The file, its samples, and the time of the first."""
    content = write(*KINDS[request.param])
    return content, *decoded(content)


def test_sound_equals_a_decode_of_all(sound, tmp_path):
    """Every sample, to the bit; in a window, those of start <= time < end. A path is opened by its
    content, under any name."""
    content, samples, begin = sound
    whole = load_audio(content)
    assert (whole.dtype, whole.device.type) == (torch.float32, "cpu")
    assert whole.is_contiguous()
    assert torch.equal(whole, samples)
    (path := tmp_path / "some.bin").write_bytes(content)
    assert torch.equal(load_audio(path), samples)

    @settings(max_examples=8)
    @given(st.integers(0, samples.shape[1] - 1), st.integers(1, 9000))
    def window(first, number):
        ends = (begin + first / RATE, begin + (first + number) / RATE)
        assert torch.equal(load_audio(content, ends), samples[:, first : first + number])

    window()


def test_other_rates_and_channels_are_those_of_the_whole(sound):
    """A window has the samples that the whole has at that rate."""
    content, samples, begin = sound
    whole = load_audio(content, sample_rate=16_000, num_channels=1)
    assert whole.shape[0] == 1
    assert abs(whole.shape[1] - samples.shape[1] / 3) <= 16
    part = load_audio(content, (begin + 0.1, begin + 0.3), 16_000, 1)
    assert torch.equal(part, whole[:, 1600:4800])


def test_errors_name_the_file(tmp_path):
    """And say whose fault it is."""
    content = write(*KINDS["wav"])
    for source, options, error, match in (
        (content, {"timestamp": (7, 8)}, DecodeError, r"<bytes>: no sound in \[7, 8\) s"),
        (b"no sound at all", {}, DecodeError, "<bytes>: "),
        (tmp_path / "missing.wav", {}, FileNotFoundError, "missing"),
        (content, {"sample_rate": 0}, ValueError, "sample_rate must be >= 1 or None, got 0"),
        (content, {"sample_rate": 16e3}, TypeError, r"must be an int or None, got 16000\.0"),
        (content, {"num_channels": 9}, ValueError, "num_channels must be 1 to 8"),
        (content, {"timestamp": (2, 1)}, ValueError, "start < end"),
    ):
        with pytest.raises(error, match=match):
            load_audio(source, **options)


def test_channels_that_cannot_be_mixed_are_an_error():
    """FFmpeg has rules for the layouts that have a name."""
    with wave.open(file := io.BytesIO(), "wb") as out:
        out.setparams((9, 2, 8000, 0, "NONE", ""))
        out.writeframes(bytes(99 * 9 * 2))
    with pytest.raises(DecodeError, match=r"^<bytes>: "):
        load_audio(file.getvalue(), num_channels=2)


def test_random_bytes_after_a_transport_stream_do_no_harm():
    """At some of them FFmpeg asks to read again, and has the last packets then."""
    content = write("mpegts", "aac", "fltp", "stereo")
    samples, _ = decoded(content)
    for seed in range(12):
        assert torch.equal(load_audio(content + random.Random(seed).randbytes(500)), samples)
