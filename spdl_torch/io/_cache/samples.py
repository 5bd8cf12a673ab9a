"""Samples to bytes and back: tensors and arrays by their memory, in C order, the rest by pickle."""

from __future__ import annotations

import io
import pickle
import struct
from typing import TYPE_CHECKING, Any

import torch

from ...objects.members import is_plain_tensor

if TYPE_CHECKING:
    from torch import Tensor

_ALIGNED = 64


def sample_bytes(sample: Any) -> bytes:
    """Return a sample as bytes. Raises: what pickling the sample raises.

        number of parts | length of each | the pickle | the memory of each tensor and array

    Each part begins at a multiple of 64 bytes.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(sample)
    contents: list[Any] = [stream.getvalue(), *(buffer.raw() for buffer in buffers)]
    parts = [struct.pack(f"<{len(contents) + 1}Q", len(contents), *map(len, contents))]
    offset = len(parts[0])
    for content in contents:
        gap = -offset % _ALIGNED
        parts += [bytes(gap), content]
        offset += gap + len(content)
    return b"".join(parts)


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
    def reducer_override(self, value: Any) -> Any:
        """Reduce plain tensors to their memory, and everything else as pickle does."""
        if not is_plain_tensor(value):
            return NotImplemented
        memory: Any = value.contiguous().view(-1).view(torch.uint8).numpy()
        return _tensor_from, (pickle.PickleBuffer(memory), value.dtype, tuple(value.shape))


def _tensor_from(content: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not len(content):  # torch.frombuffer refuses it
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(content, dtype=dtype).view(shape)
