"""A program that feeds damaged files to the readers; what kills it is left in its folder.

The input is a function of the reader's name and a number, so a finding can be made again:
``python tests/helpers/_byte_fuzzer.py FOLDER --readers png --first 12 --count 1``. Before each
input is read it is written to ``FOLDER/input`` and named in ``FOLDER/name``; a crash or a hang,
which this process does not survive, leaves them there. Everything else is a line of JSON on stdout.
"""

import argparse
import bz2
import contextlib
import faulthandler
import gzip
import io
import json
import lzma
import os
import random
import resource
import struct
import traceback
import warnings
import zlib
from collections import Counter
from pathlib import Path
from time import monotonic
from unittest.mock import patch

HANG_SECONDS = 30
"""For one input: thousands of times what a whole one takes."""

MEBIBYTE = 1 << 20
ADDRESS_SPACE = 8 << 30  # beyond what the libraries map: an accident, not the machine, ends there
NUMBERS = (0, 1, 2, 3, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1)


def image_readers():
    from _pictures import KINDS

    from spdl_torch.io import decode_image, load_image_batch

    def read(content):
        assert decode_image(content).shape[0] == 3
        assert load_image_batch([content], width=20, height=10).shape == (1, 10, 20, 3)

    families: dict[str, list[bytes]] = {}
    for kind, content in KINDS.items():
        families.setdefault(kind.split()[0], []).append(content)
    for family, seeds in families.items():
        repair = repair_png if family == "png" else None
        yield family, read, seeds, repair


def video_readers():
    from _videos import KINDS, write_video

    from spdl_torch.io import demux_video, load_clip, load_video, uniform_frames

    small = "scale=32:32,format=rgb24"

    def read(content):
        demux_video(content)
        frames = load_video(content, filter_desc=small)
        assert frames.shape[1:] == (32, 32, 3)
        assert 1 <= len(frames) <= 1000
        clip = load_clip(content, uniform_frames(3), width=32, height=32)
        assert clip.frames.shape[1:] == (32, 32, 3)

    for kind in ("fragmented", "b-frames", "mpeg4 in avi", "vp9 in webm", "h264 in ts", "mjpeg"):
        yield f"video {kind}", read, [write_video(KINDS[kind], num_frames=10)], None


def array_readers():
    import numpy as np
    from _arrays import SEEDS, little_memory

    from spdl_torch.io import load_npy, load_npz
    from spdl_torch.io._array import npz

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
    from _tars import FORMATS, tar_of

    from spdl_torch.io import iter_tarfile

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


def mutate(seeds, rng, repair):
    """A seed after one to eight changes; half of them with their checksums made right again."""
    content = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        rng.choice(MUTATIONS)(content, rng, seeds)
    if repair is not None and rng.random() < 0.5:
        content = repair(content)
    return bytes(content)


def place_in(content, rng):
    """Anywhere, but rather near the ends, where the structure is."""
    size = max(len(content), 1)
    near = min(rng.randrange(200), size - 1)
    return rng.choice((rng.randrange(size), near, size - 1 - near))


def flip(content, rng, seeds):
    for _ in range(rng.choice((1, 1, 4, 30))):
        if content:
            content[place_in(content, rng)] ^= 1 << rng.randrange(8)


def overwrite(content, rng, seeds):
    place = place_in(content, rng)
    new = rng.choice((b"\0", b"\xff", b"\x7f", b"\x80", b"0", b"-", b"\n", b"", bytes(60)))
    content[place : place + max(1, len(new))] = new


def truncate(content, rng, seeds):
    del content[place_in(content, rng) :]


def insert(content, rng, seeds):
    place = place_in(content, rng)
    content[place:place] = rng.randbytes(rng.choice((1, 2, 4, 60)))


def repeat(content, rng, seeds):
    place, size = place_in(content, rng), rng.choice((1, 4, 60, 600))
    content[place:place] = content[place : place + size] * rng.choice((1, 1, 30))


def splice(content, rng, seeds):
    other = rng.choice(seeds)
    start = place_in(other, rng)
    place = place_in(content, rng)
    size = rng.choice((8, 60, 600, len(other)))
    content[place : place + size] = other[start : start + size]


def number_field(content, rng, seeds):
    """A length, a size or an offset becomes another one: at its ends, or a little off."""
    form = rng.choice(("<H", ">H", "<I", ">I", "<Q", ">Q"))
    size = struct.calcsize(form)
    place = place_in(content, rng)
    if place + size > len(content):
        return
    (value,) = struct.unpack_from(form, content, place)
    value = rng.choice((*NUMBERS, len(content), value + 1, value - 1, value * 2, -value))
    struct.pack_into(form, content, place, value % (1 << (8 * size)))


MUTATIONS = flip, overwrite, truncate, insert, repeat, splice, number_field, number_field


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


class Memory:
    """How much more than before one input made the process hold, at its worst."""

    def __init__(self):
        self._status = Path("/proc/self/status")
        self._reset = Path("/proc/self/clear_refs")

    def begin(self):
        self._reset.write_text("5")  # the peak is what there is now
        self._before = self._field("VmRSS")

    def grown(self):
        return self._field("VmHWM") - self._before

    def _field(self, name):
        for line in self._status.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) << 10
        raise AssertionError(f"Linux tells {name}")


class Fuzzer:
    """Runs inputs one after another; tells what came of them in the end."""

    def __init__(self, folder, readers):
        from spdl_torch.errors import DecodeError

        self.folder, self.readers, self.documented = folder, readers, DecodeError
        self.executions, self.accepted = Counter(), Counter()
        self.peak_bytes: dict[str, list] = {}
        self.memory = Memory()
        self.name_file = os.open(folder / "name", os.O_RDWR | os.O_CREAT)

    def run(self, name, number):
        read, seeds, repair = self.readers[name]
        content = mutate(seeds, random.Random(f"{name} {number}"), repair)
        (self.folder / "input").write_bytes(content)
        os.pwrite(self.name_file, f"{name} {number}".ljust(80, "\0").encode(), 0)
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        self.memory.begin()
        try:
            read(content)
            self.accepted[name] += 1
        except self.documented:
            pass
        except BaseException:
            self.report(name, number, traceback.format_exc())
        finally:
            faulthandler.cancel_dump_traceback_later()
        peak = self.memory.grown()
        if peak > self.peak_bytes.get(name, [0])[0]:
            self.peak_bytes[name] = [peak, number]
        self.executions[name] += 1

    def report(self, name, number, what):
        saved = self.folder / f"{name.replace(' ', '_')}-{number}"
        saved.write_bytes((self.folder / "input").read_bytes())
        print(json.dumps({"finding": [name, number, what, str(saved)]}), flush=True)

    def summary(self):
        return {name: vars(self)[name] for name in ("executions", "accepted", "peak_bytes")}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--readers", default="", help="names begin so; separated by commas")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100, help="of each reader")
    parser.add_argument("--seconds", type=float, default=0, help="instead of a count")
    options = parser.parse_args()
    faulthandler.enable()
    warnings.simplefilter("ignore")
    readers = {
        name: rest
        for name, rest in all_readers().items()
        if name.startswith(tuple(options.readers.split(",")))
    }
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ADDRESS_SPACE,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    fuzzer = Fuzzer(options.folder, readers)
    end = monotonic() + options.seconds
    number = options.first
    for read, seeds, _ in readers.values():
        for seed in seeds:
            read(seed)  # whole ones are read, and what is made once is made
    while monotonic() < end if options.seconds else number < options.first + options.count:
        for name in readers:
            fuzzer.run(name, number)
        number += 1
    print(json.dumps(fuzzer.summary()), flush=True)


if __name__ == "__main__":
    main()
