"""Damaged files: a result or a DecodeError, in bounded memory; no crash, no hang, nothing else.

The readers run in a process of their own, so that a library that dies is noticed. Each input is a
function of its reader's name and a number. While one is read it is in FOLDER/input, named in
FOLDER/name, among pytest's temporary files: a crash or a hang, which the process does not survive,
leaves it there, and finding-N is what else was found.
"""

import bz2
import contextlib
import faulthandler
import gzip
import io
import lzma
import random
import resource
import struct
import traceback
import warnings
import zlib
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from time import monotonic
from unittest.mock import patch

import numpy as np
import pytest
from support.arrays import SEEDS, little_memory
from support.pictures import KINDS as PICTURES
from support.tars import FORMATS, tar_of
from support.videos import KINDS as VIDEOS, write_video

from spdl_torch.errors import DecodeError
from spdl_torch.io import (
    decode_image,
    demux_video,
    iter_tarfile,
    load_clip,
    load_image_batch,
    load_npy,
    load_npz,
    load_video,
    uniform_frames,
)
from spdl_torch.io._array import npz

HANG_SECONDS = 30
"""For one input: thousands of times what a whole one takes."""

MEBIBYTE = 1 << 20
MOST_BYTES = 4000 * MEBIBYTE
"""For one small input. Pillow's limit lets a GIF of 357 megapixels pass, of which there are 11
bytes a pixel at once; our own readers take no more than there is to read."""
ADDRESS_SPACE = 8 << 30  # beyond what the libraries map: an accident, not the machine, ends there
NUMBERS = (0, 1, 2, 3, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1)


def image_readers():
    def read(content):
        assert decode_image(content).shape[0] == 3
        assert load_image_batch([content], width=20, height=10).shape == (1, 10, 20, 3)

    families: dict[str, list[bytes]] = {}
    for kind, content in PICTURES.items():
        families.setdefault(kind.split()[0], []).append(content)
    for family, seeds in families.items():
        repair = repair_png if family == "png" else None
        yield family, read, seeds, repair


def video_readers():
    small = "scale=32:32,format=rgb24"

    def read(content):
        demux_video(content)
        frames = load_video(content, filter_desc=small)
        assert frames.shape[1:] == (32, 32, 3)
        assert 1 <= len(frames) <= 1000
        clip = load_clip(content, uniform_frames(3), width=32, height=32)
        assert clip.frames.shape[1:] == (32, 32, 3)

    for kind in ("fragmented", "b-frames", "mpeg4 in avi", "vp9 in webm", "h264 in ts", "mjpeg"):
        yield f"video {kind}", read, [write_video(VIDEOS[kind], num_frames=10)], None


def array_readers():
    def read(content):
        """Either with either way to inflate; never an array that numpy denies."""
        is_single = content.startswith(b"\x93")
        for deflate in {npz.deflate, None}:
            with patch.object(npz, "deflate", deflate), little_memory():
                found = load_npy(content) if is_single else dict(load_npz(content, verify=True))
            if not is_single:
                dict(load_npz(content))
        with contextlib.suppress(NotImplementedError):  # a version of zip that numpy wants newer
            expected = np.load(io.BytesIO(content), allow_pickle=False)
            pairs = [(found, expected)]
            if not is_single:
                assert found.keys() == dict(expected).keys()
                pairs = [(found[name], array) for name, array in expected.items()]
            for array, numpys in pairs:
                assert (array.dtype, array.shape) == (numpys.dtype, numpys.shape)
                assert array.tobytes() == numpys.tobytes()

    yield "npy", read, [seed for seed in SEEDS if seed.startswith(b"\x93")], None
    yield "npz", read, [seed for seed in SEEDS if seed.startswith(b"PK")], None


def tar_readers():
    files = [
        ("a/1.jpg", bytes(range(200)) * 4),
        ("a/1.cls", b"7"),
        ("d" * 90 + "/" + "n" * 60, b""),
        ("l", "2"),
    ]
    plain = [tar_of(files, kind) for kind in FORMATS]

    def read(content):
        assert sum(1 for _ in iter_tarfile(content, max_member_bytes=MEBIBYTE)) < 1000

    yield "tar", read, plain, repair_tar
    packed = [pack(seed) for pack in (gzip.compress, bz2.compress, lzma.compress) for seed in plain]
    yield "tar packed", read, packed, None


def all_readers():
    """Name: (function, seeds, what makes checksums right again or None)."""
    sources = image_readers, video_readers, array_readers, tar_readers
    return {name: rest for source in sources for name, *rest in source()}


def place_in(content, rng):
    """Anywhere, but rather near the ends, where the structure is."""
    size = max(len(content), 1)
    near = min(rng.randrange(200), size - 1)
    return rng.choice((rng.randrange(size), near, size - 1 - near))


def mutate(seeds, rng, repair):
    """A seed after one to eight changes; half of them with their checksums made right again."""
    content = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        change, place = rng.choice(("flip", "paste", "cut", "number")), place_in(content, rng)
        if change == "flip":
            for _ in range(rng.choice((1, 1, 4, 30)) if content else 0):
                content[place_in(content, rng)] ^= 1 << rng.randrange(8)
        elif change == "paste":  # a part of a seed, perhaps repeated, or others, in or over it
            size, other = rng.choice((1, 2, 4, 8, 60, 600)), rng.choice(seeds)
            start = place_in(other, rng)
            others = rng.randbytes(size), rng.choice(b"\0\xff\x7f0-\n").to_bytes() * size
            part = other[start : start + size] * rng.choice((1, 1, 30))
            new = rng.choice((part, part, *others))
            content[place : place + rng.choice((0, len(new)))] = new
        elif change == "cut":
            del content[place:]
        else:  # a length, a size or an offset becomes another one: at its ends, or a little off
            form = rng.choice(("<H", ">H", "<I", ">I", "<Q", ">Q"))
            if place + struct.calcsize(form) <= len(content):
                (value,) = struct.unpack_from(form, content, place)
                near = value + 1, value - 1, value * 2, -value
                value = rng.choice((*NUMBERS, len(content), *near))
                struct.pack_into(form, content, place, value % (1 << 8 * struct.calcsize(form)))
    return bytes(repair(content) if repair is not None and rng.random() < 0.5 else content)


def repair_png(content):
    """With right checksums damage reaches what is behind them."""
    place = 8
    while place + 12 <= len(content):
        (size,) = struct.unpack_from(">I", content, place)
        end = place + 8 + size
        if end + 4 > len(content):
            break
        struct.pack_into(">I", content, end, zlib.crc32(content[place + 4 : end]))
        place = end + 4
    return content


def repair_tar(content):
    for place in range(0, len(content) - 511, 512):
        block = content[place : place + 512]
        if block[257:262] == b"ustar":
            total = sum(block) - sum(block[148:156]) + 8 * 32
            content[place + 148 : place + 156] = b"%06o\0 " % total
    return content


def memory(field):
    """What this process holds now (VmRSS), or held at its worst since it was last asked (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(field)]
    return int(line.split()[1]) << 10


def problem_of(read, content):
    """What is wrong with how an input is read, if anything, and whether it was accepted."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before, accepted = memory("VmRSS"), False
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    try:
        read(content)
        accepted = True
    except DecodeError:
        pass
    except BaseException:
        return traceback.format_exc(), accepted
    finally:
        faulthandler.cancel_dump_traceback_later()
    peak = memory("VmHWM") - before
    return f"took {peak} bytes" * (peak > MOST_BYTES), accepted


def fuzz(folder, first, count, seconds):
    """Read COUNT inputs of each reader from FIRST on, or as many as come in SECONDS: what is wrong,
    how many were read, and how many of these were accepted."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    readers, findings = all_readers(), []
    executions, accepted = Counter(), Counter()
    for read, seeds, _ in readers.values():
        for seed in seeds:
            read(seed)  # whole ones are read, and what is made once is made
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ADDRESS_SPACE,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    end, number = monotonic() + seconds, first
    while monotonic() < end if seconds else number < first + count:
        for name, (read, seeds, repair) in readers.items():
            content = mutate(seeds, random.Random(f"{name} {number}"), repair)
            (folder / "input").write_bytes(content)
            (folder / "name").write_text(f"{name} {number}")
            problem, was_accepted = problem_of(read, content)
            executions[name] += 1
            accepted[name] += was_accepted
            if problem:
                findings.append(f"{name} {number}: {problem}")
                (folder / f"finding-{len(findings)}").write_bytes(content)
        number += 1
    return findings, executions, accepted


def run(folder, first, count, seconds=0.0):
    """How many inputs of each reader were read, and how many were accepted; nothing is wrong."""
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("forkserver")) as pool:
            found = pool.submit(fuzz, folder, first, count, seconds).result()
    except BrokenProcessPool:
        pytest.fail(f"died of {(folder / 'name').read_text()}, saved as {folder}/input")
    findings, executions, accepted = found
    assert not findings, "\n\n".join([f"saved in {folder}:", *findings])
    return executions, accepted


def test_damaged_files_are_read_or_refused(tmp_path):
    """The short form: the same inputs in every run; some of them are accepted, most are not."""
    executions, accepted = run(tmp_path, 0, 25)
    assert len(executions) >= 16
    assert set(executions.values()) == {25}
    assert 60 < sum(accepted.values()) < 13 * len(executions), accepted


@pytest.mark.long
def test_damaged_files_are_read_or_refused_for_long(tmp_path, long_seconds):
    """Other inputs in every run."""
    print(run(tmp_path, random.SystemRandom().randrange(10**12), 0, long_seconds))
