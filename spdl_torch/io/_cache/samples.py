"""Samples to bytes and back: tensors and arrays as they lie in memory, the rest by pickle."""

from __future__ import annotations

import io
import pickle
import struct
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

_LENGTH = struct.Struct("<Q")
_ALIGNED = 64


def sample_parts(sample: Any) -> list[Any]:
    """Return a sample as parts of bytes, which are views of its tensors and arrays.

    Raises: what pickling the sample raises.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(sample)
    views = [buffer.raw() for buffer in buffers]
    head = stream.getvalue()
    lengths = [len(head), *(len(view) for view in views)]
    parts: list[Any] = [b"".join(_LENGTH.pack(number) for number in (len(lengths), *lengths))]
    for content in (head, *views):
        parts += [_padding(sum(map(len, parts))), content]
    return parts


def sample_from(content: bytearray) -> Any:
    """Return the sample; its tensors and arrays are views of ``content``, which is theirs alone."""
    view = memoryview(content)
    (count,) = _LENGTH.unpack_from(view)
    lengths = [_LENGTH.unpack_from(view, 8 * (n + 1))[0] for n in range(count)]
    offset, parts = 8 * (count + 1), []
    for length in lengths:
        offset += len(_padding(offset))
        parts.append(view[offset : offset + length])
        offset += length
    return pickle.loads(parts[0], buffers=parts[1:])


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Reduce plain tensors to their memory, and everything else as pickle does."""
        if type(value) is not torch.Tensor or not _is_plain(value):
            return NotImplemented
        flat = _memory_of(value)
        if flat is None:
            value = value.contiguous()
            flat = value.flatten()
        memory: Any = flat.view(torch.uint8).numpy()
        content = pickle.PickleBuffer(memory)
        return _tensor_from, (content, value.dtype, tuple(value.shape), value.stride())


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.numel() > 0
        and not vars(tensor)
    )


def _memory_of(tensor: Tensor) -> Tensor | None:
    """Return a tensor's elements in the order of its memory; None = it has gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return None
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))


def _tensor_from(
    content: Any, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Tensor:
    return torch.frombuffer(content, dtype=dtype).as_strided(shape, strides)


def _padding(offset: int) -> bytes:
    return bytes(-offset % _ALIGNED)
