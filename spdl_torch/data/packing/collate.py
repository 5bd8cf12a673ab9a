"""Make one batch from the samples of a group: documents end to end, or padded to one shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

from ...handlers import unless_of_handler

if TYPE_CHECKING:
    from torch import Tensor

    from .rule import Piece


class Document(NamedTuple):
    """A sample of a pack, or a piece of one."""

    content: Any
    piece: Piece

    @property
    def name(self) -> str:
        """The sample's name, for errors."""
        return f"sample {self.piece.sample}"


class PackCollate:
    """Puts documents end to end into one row.

    With ``pad``, the row has ``budget`` tokens and ``document_ids``; without, it has the tokens of
    its documents, and ``cu_seqlens`` and ``max_seqlen``.
    """

    def __init__(self, budget: int, pad: float | Mapping[str, float] | None) -> None:
        self._budget = budget
        self._pad = pad

    def __call__(self, documents: Sequence[Document]) -> dict[str, Any]:
        """Return the row. Raises: TypeError, ValueError: a sample does not fit the plan."""
        fields = [_fields_of(document) for document in documents]
        names = fields[0].keys()
        for document, own in zip(documents, fields, strict=True):
            if own.keys() != names:
                raise ValueError(
                    f"pack: every sample of a pack must have the same fields, but "
                    f"{document.name} has {sorted(own)} and {documents[0].name} {sorted(names)}."
                )
        row: dict[str, Any] = {name: torch.cat([own[name] for own in fields]) for name in names}
        sizes = [document.piece.size for document in documents]
        row["position_ids"] = torch.cat([torch.arange(size) for size in sizes])
        if self._pad is None:
            ends = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            return {**row, "cu_seqlens": ends, "max_seqlen": max(sizes)}
        numbers = torch.arange(len(sizes), dtype=torch.int32)
        row["document_ids"] = numbers.repeat_interleave(torch.tensor(sizes))
        values = {**dict.fromkeys(names, self._pad), "position_ids": 0, "document_ids": len(sizes)}
        if isinstance(self._pad, Mapping):
            values.update((name, self._pad.get(name, 0)) for name in names)
        return {name: self._filled(tokens, values[name]) for name, tokens in row.items()}

    def _filled(self, tokens: Tensor, value: Any) -> Tensor:
        filled = tokens.new_full((self._budget, *tokens.shape[1:]), value)
        filled[: len(tokens)] = tokens
        return filled


def pad_collate(samples: Sequence[Any]) -> Any:
    """Return the batch of ``default_collate``, with tensors of different shapes padded with zeros
    at the end of each dimension to the largest: (T,) tensors to (N, longest T), images (C, H, W) to
    (N, C, largest H, largest W).

    Raises: ValueError: samples of different structure, or tensors of different dimensions.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        if any(sample.keys() != first.keys() for sample in samples):
            raise ValueError("pad_collate: every sample must have the same fields.")
        return {name: pad_collate([sample[name] for sample in samples]) for name in first}
    if isinstance(first, list | tuple):
        if any(len(sample) != len(first) for sample in samples):
            raise ValueError("pad_collate: every sample must have the same number of parts.")
        parts = [pad_collate(part) for part in zip(*samples, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if isinstance(first, torch.Tensor | np.ndarray):
        return _padded([torch.as_tensor(sample) for sample in samples])
    return default_collate(list(samples))


def _padded(tensors: list[Tensor]) -> Tensor:
    shapes = [tensor.shape for tensor in tensors]
    if len({len(shape) for shape in shapes}) > 1:
        raise ValueError(
            "pad_collate: tensors must have the same number of dimensions, got shapes "
            f"{', '.join(str(tuple(shape)) for shape in shapes[:8])}."
        )
    largest = [max(lengths) for lengths in zip(*shapes, strict=True)]
    batch = tensors[0].new_zeros((len(tensors), *largest))
    for place, tensor in enumerate(tensors):
        batch[place][tuple(map(slice, tensor.shape))] = tensor
    return batch


def _fields_of(document: Document) -> dict[str, Tensor]:
    """Return the tensors of a document, cut to its piece."""
    content, (_, size, start, has_more) = document
    end = start + size
    given = content if isinstance(content, Mapping) else {"input_ids": content}
    tensors = {}
    for name, value in given.items():
        try:
            tokens = torch.as_tensor(value)
        except unless_of_handler(TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"pack: {document.name} must be a sequence of tokens or a dict of them, but "
                f"{name!r} is a {type(value).__name__}. Pass collate_fn for other samples."
            ) from error
        length = len(tokens) if tokens.dim() else 0
        if length < end or (length > end and not has_more):
            raise ValueError(
                f"pack: size_of says that {document.name} has {end} tokens, but its {name!r} has "
                f"{length}. Both must come from the same data and the same tokenizer."
            )
        tensors[name] = tokens[start:end]
    return tensors
