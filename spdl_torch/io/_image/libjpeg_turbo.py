"""libjpeg-turbo 3 by its TurboJPEG API: it decodes a region without the rest of the picture.

The library is one that is there anyway (conda's, the system's) or that of the package turbojpeg.
Whatever it complains about, even by a warning, is left to others.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

if TYPE_CHECKING:
    from torch import Tensor

    Box = tuple[int, int, int, int]

_DECOMPRESS = 1  # of enum TJINIT
_RGB = 0  # of enum TJPF
_SUBSAMPLING, _WIDTH, _HEIGHT = 4, 5, 6  # of enum TJPARAM, as these
_PROGRESSIVE, _ARITHMETIC, _LOSSLESS = 12, 14, 15

# Width in pixels of the blocks that are coded together, by TJSAMP: 4:4:4, 4:2:2, 4:2:0 and gray.
# A region begins at a multiple of it. Other samplings are left to others.
_BLOCK_WIDTH = {0: 8, 1: 16, 2: 16, 3: 8}

# The smooth upsampling of colours looks one sample, which is two pixels, beyond a pixel; that of a
# region does not look beyond the region.
_MARGIN = 2
# Regions of fewer columns could be upsampled in another way.
_LEAST_WIDTH = 16


class _Region(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("x", "y", "width", "height")]


class LibJpegTurbo:
    """The functions of one shared library.

    Raises: OSError: it cannot be loaded; AttributeError: it is older than version 3.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        # Only long calls release the GIL: a thread that has released it waits for its turn to get
        # it back, beside a busy trainer for milliseconds.
        short, long = ctypes.PyDLL(path), ctypes.CDLL(path)
        handle, data, size = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
        number = ctypes.c_int
        self._init = _declare(short.tj3Init, handle, number)
        self._destroy = _declare(short.tj3Destroy, None, handle)
        self._read_header = _declare(short.tj3DecompressHeader, number, handle, data, size)
        self._get = _declare(short.tj3Get, number, handle, number)
        self._set_region = _declare(short.tj3SetCroppingRegion, number, handle, _Region)
        self._decode = _declare(
            long.tj3Decompress8, number, handle, data, size, data, number, number
        )

    def decode_region(self, data: Tensor, size: tuple[int, int], box: Box) -> Tensor | None:
        """Decode the part of a picture in ``box``, without the GIL.

        Args:
            data: encoded bytes, uint8 of one dimension, CPU.
            size: the picture's height and width in pixels.
            box: top, left, height, width, within the picture.

        Returns: uint8 (3, height, width), a view, with the pixels of the whole picture. None: this
            library is not the one to decode it.
        """
        # A new decoder for each picture, 0.6 µs: a used one keeps the last picture's tables, with
        # which a picture that has none would be decoded, or the error that it met.
        handle = self._init(_DECOMPRESS)
        if not handle:
            return None
        try:
            data = data.contiguous()
            if data[-2:].tolist() != [0xFF, 0xD9]:  # cut short, or with bytes after its end
                return None
            address, num_bytes = data.data_ptr(), data.numel()
            if self._read_header(handle, address, num_bytes) != 0:
                return None
            if (self._get(handle, _HEIGHT), self._get(handle, _WIDTH)) != size:
                return None
            block = _BLOCK_WIDTH.get(self._get(handle, _SUBSAMPLING))
            unusual = (_PROGRESSIVE, _ARITHMETIC, _LOSSLESS)
            if block is None or any(self._get(handle, each) for each in unusual):
                return None
            top, left, height, width = _widened(size, box, block)
            if self._set_region(handle, _Region(left, top, width, height)) != 0:
                return None
            # numpy's, as torch's own would release the GIL.
            pixels = np.empty((height, width, 3), np.uint8)
            if self._decode(handle, address, num_bytes, pixels.ctypes.data, 3 * width, _RGB) != 0:
                return None
            y, x = box[0] - top, box[1] - left
            return torch.from_numpy(pixels[y : y + box[2], x : x + box[3]]).permute(2, 0, 1)
        finally:
            self._destroy(handle)


def _widened(size: tuple[int, int], box: Box, block: int) -> Box:
    """Return the region to decode, so that the box within it has the whole picture's pixels."""
    top, left = max(0, box[0] - _MARGIN), max(0, box[1] - _MARGIN)
    bottom = min(size[0], box[0] + box[2] + _MARGIN)
    right = min(size[1], box[1] + box[3] + _MARGIN)
    left = min(left, max(0, right - _LEAST_WIDTH)) // block * block
    right = min(size[1], max(right, left + _LEAST_WIDTH))
    return top, left, bottom - top, right - left


def _declare(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


@functools.lru_cache(maxsize=1)
def find_library() -> LibJpegTurbo | None:
    """Return the first library of version 3 that decodes as others do; None if there is none.

    Looked for once: in the environment (conda), where the system keeps its libraries, and in the
    wheel of turbojpeg. The first two are kept up to date by others. That package is not, since May
    2025, so no extra installs it: it decodes files of strangers.
    """
    for path in _candidates():
        try:
            library = LibJpegTurbo(path)
            if _agrees_with_pillow(library):
                return library
        except (OSError, AttributeError):  # not there, or too old, or a Pillow without JPEG
            continue
    return None


def _candidates() -> Iterator[str]:
    name, *folders = {
        "win32": ("turbojpeg.dll", Path(sys.prefix, "Library", "bin")),
        "darwin": ("libturbojpeg.dylib", Path(sys.prefix, "lib"), Path("/opt/homebrew/lib")),
    }.get(sys.platform, ("libturbojpeg.so.0", Path(sys.prefix, "lib")))
    yield from (str(Path(folder, name)) for folder in folders)
    yield str(name)
    # The shared library beside the package's module, which is not itself imported.
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files("turbojpeg") or ():
            if re.match(r"(libturbojpeg|turbojpeg-).*\.(so|dylib|dll)", file.name):
                yield str(file.locate())


def _agrees_with_pillow(library: LibJpegTurbo) -> bool:
    """Return whether a region of a small picture has Pillow's pixels, which are everybody's.

    A library may have been built differently; the check takes less than a millisecond.
    """
    picture = (np.arange(3 * 80 * 96) * 7 % 251).astype(np.uint8).reshape(80, 96, 3)
    Image.fromarray(picture).save(buffer := io.BytesIO(), "JPEG", quality=90)
    data = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    region = library.decode_region(data, (80, 96), (21, 35, 40, 44))
    if region is None:
        return False
    with Image.open(buffer) as whole:
        return np.array_equal(region.permute(1, 2, 0), np.asarray(whole)[21:61, 35:79])
