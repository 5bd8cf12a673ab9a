"""JPEGs of every sampling and boxes of them; the libraries that decode them, and the ways in which
the batch kernel runs."""

import contextlib
import functools
import getpass
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import strategies as st

from spdl_torch.io._image import decode, extension, kernel, libjpeg_turbo
from support.pictures import encode, photograph

LIBRARY = libjpeg_turbo.find_library()
CODECS = ["torchvision", *(["libjpeg-turbo"] if LIBRARY else [])]
WAYS = ["TorchScript", "eager", *(["extension"] if shutil.which("c++") else [])]


@functools.cache
def compiled(way):
    """What calls the kernel's functions; None = Python itself. The extension is built once for all
    runs of these tests, in 10 seconds, if the package has none."""
    if way == "extension" and extension.load() is None:
        folder = Path(tempfile.gettempdir(), f"pytest-of-{getpass.getuser()}", "spdl_torch")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / extension.library_path().name
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(extension, "library_path", lambda: path)
            if not path.is_file():
                extension.build()
            extension.load.cache_clear()
            extension.load()
    ways = {"TorchScript": kernel._scripted, "extension": extension.load, "eager": lambda: None}
    return ways[way]()


@contextlib.contextmanager
def running(way):
    """The batch kernel runs in this way alone."""
    own = compiled(way)
    assert (own is None) == (way == "eager")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernel, "_compiled", lambda: own)
        yield


@contextlib.contextmanager
def having(decoders):
    """Only these libraries are there to decode JPEGs, beside Pillow."""
    for way in WAYS:  # once, with all that they need
        compiled(way)
    kernel.is_compiled()
    with pytest.MonkeyPatch.context() as patched:
        if "libjpeg-turbo" not in decoders:
            patched.setattr(libjpeg_turbo, "find_library", lambda: None)
        if "torchvision" not in decoders:
            patched.setattr(torch.ops, "image", SimpleNamespace())
            assert not kernel.has_codec()
        if "torchcodec" not in decoders:
            patched.setattr(decode, "torchcodec_jpeg", lambda: None)
        yield


def decoding_by(codec):
    """Only this library is there to decode JPEGs, beside Pillow; with libjpeg-turbo, torchvision is
    there too, unless it is alone."""
    return having({"libjpeg-turbo": ["libjpeg-turbo", "torchvision"]}.get(codec, codec))


def by(codec, function):
    """The function, called while only this library is there."""
    return decoding_by(codec)(function)


def jpeg(height, width, *, mode="RGB", **options):
    return encode(photograph(height, width, noise=40).convert(mode), "JPEG", **options)


def with_sampling(content, factors):
    """The same scan, said to hold components of other sampling factors: other pixels, no error."""
    changed = bytearray(content)
    place = changed.index(b"\xff\xc0") + 10
    for number, factor in enumerate(factors):
        changed[place + 3 * number + 1] = factor
    return bytes(changed)


def as_rgb(content):
    """The same samples, declared to be red, green and blue by an Adobe segment."""
    return content[:2] + b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00\x00" + content[2:]


KINDS = {
    "4:2:0": jpeg(150, 201, subsampling=2),
    "4:2:2": jpeg(131, 180, subsampling=1),
    "4:4:4": jpeg(127, 111, subsampling=0),
    "gray": jpeg(120, 190, mode="L"),
    "4:2:0 optimized, high quality": jpeg(150, 201, subsampling=2, optimize=True, quality=98),
    "4:2:0 with restarts": jpeg(150, 201, subsampling=2, restart_marker_blocks=5),
    "RGB": as_rgb(jpeg(127, 111, subsampling=0)),
}

OTHER_KINDS = {
    "4:4:0": with_sampling(jpeg(160, 160, subsampling=2), (0x12, 0x11, 0x11)),
    "4:1:1": with_sampling(jpeg(160, 160, subsampling=2), (0x41, 0x11, 0x11)),
    "progressive": jpeg(150, 201, progressive=True),
    "CMYK": jpeg(150, 201, mode="CMYK"),
    "bytes after the end": jpeg(150, 201) + b"\0\0",
}


@st.composite
def boxes(draw, height, width):
    box_height, box_width = draw(st.integers(1, height)), draw(st.integers(1, width))
    top, left = (
        draw(st.integers(0, height - box_height)),
        draw(st.integers(0, width - box_width)),
    )
    return top, left, box_height, box_width
