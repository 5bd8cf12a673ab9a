"""Samples to bytes and back: tensors and arrays as they lie in memory, the rest by pickle.

A tensor or array that is dense, which has neither gaps nor repeats in memory, keeps its strides. Of
any other one, such as ``x[::2]`` or an expanded tensor, the elements are kept in C order.
"""

from __future__ import annotations

import io
import pickle
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...objects.kinds import is_plain_tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_ALIGNED = 64


def sample_bytes(sample: Any) -> tuple[bytes, bool]:
    """Return a sample as bytes, and whether every tensor and array comes back with the strides that
    it has. Raises: what pickling the sample raises.

        number of parts | length of each | the pickle | the memory of each tensor and array

    Each part begins at a multiple of 64 bytes.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    pickler = _Pickler(stream, protocol=5, buffer_callback=buffers.append)
    pickler.dump(sample)
    contents: list[Any] = [stream.getvalue(), *(buffer.raw() for buffer in buffers)]
    parts = [struct.pack(f"<{len(contents) + 1}Q", len(contents), *map(len, contents))]
    offset = len(parts[0])
    for content in contents:
        gap = -offset % _ALIGNED
        parts += [bytes(gap), content]
        offset += gap + len(content)
    return b"".join(parts), pickler.is_as_given


def sample_from(content: bytearray) -> Any:
    """Return the sample; its tensors and arrays are views of ``content``, which is theirs alone."""
    view = memoryview(content)
    (count,) = struct.unpack_from("<Q", view)
    offset, parts = 8 * (count + 1), []
    for length in struct.unpack_from(f"<{count}Q", view, 8):
        offset += -offset % _ALIGNED
        parts.append(view[offset : offset + length])
        offset += length
    return pickle.loads(parts[0], buffers=parts[1:])


class _Pickler(pickle.Pickler):
    is_as_given = True
    """Whether everything so far was dense."""

    def reducer_override(self, value: Any) -> Any:
        """Reduce plain tensors and arrays to their memory, and everything else as pickle does."""
        if is_plain_tensor(value):
            if value.numel():
                return self._of_tensor(value)
            # torch's own pickles of empty tensors cannot be read for every dtype.
            return _empty_tensor, (value.dtype, tuple(value.shape), value.stride())
        if type(value) is np.ndarray and value.nbytes and not value.dtype.hasobject:
            return self._of_array(value)
        return NotImplemented

    def _of_tensor(self, tensor: Tensor) -> Any:
        # What is made like a dense one has its strides; what is made like another one is dense.
        like = tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")
        if like.stride() != tensor.stride():
            self.is_as_given = False
            tensor = tensor.contiguous()
        memory: Any = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
        content = pickle.PickleBuffer(memory)
        return _tensor_from, (content, tensor.dtype, tuple(tensor.shape), tensor.stride())

    def _of_array(self, array: NDArray[Any]) -> Any:
        if np.empty_like(array).strides != array.strides:
            self.is_as_given = False
            array = array.copy("C")
        # Its elements in the order of its memory, which is the order of falling strides.
        axes = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
        memory: Any = array.transpose(axes).reshape(-1).view(np.uint8)
        content = pickle.PickleBuffer(memory)
        # The class itself, so that other releases can read it.
        return np.ndarray, (array.shape, array.dtype, content, 0, array.strides)


def _tensor_from(
    content: Any, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Tensor:
    return torch.frombuffer(content, dtype=dtype).as_strided(shape, strides)


def _empty_tensor(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)
