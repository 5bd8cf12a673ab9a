"""Trainers whose own Python and kernel launches are real: resnet18 and a small transformer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_CLASSES = 1000
VOCABULARY = 30_000
_WIDTH = 128


def make_trainer(model: str, device: str) -> Callable[[Any], None]:
    """Return a function that does one step (forward, backward, SGD) on a batch of the loader.

    model: ``resnet18`` and ``resnet50``, which trains in bfloat16, take uint8 pictures
        (N, 3, H, W), ``transformer`` token numbers (N, T).
    The batch may be on the host or on ``device``. A step returns when its kernels are launched.
    """
    return _transformer(device) if model == "transformer" else _resnet(model, device)


def _resnet(name: str, device: str) -> Callable[[Any], None]:
    import torch
    import torchvision

    model = getattr(torchvision.models, name)(num_classes=NUM_CLASSES).to(device).train()
    is_large = name == "resnet50"
    if is_large:
        model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(batch: Any) -> None:
        pictures = batch[0] if isinstance(batch, list | tuple) else batch
        # Loaders differ in the memory format of their batches, on which convolutions depend.
        pictures = pictures.to(device, non_blocking=True).contiguous().float().div_(255)
        labels = torch.zeros(len(pictures), dtype=torch.int64, device=device)
        with torch.autocast(device, torch.bfloat16, enabled=is_large):
            loss = torch.nn.functional.cross_entropy(model(pictures), labels)
        _finish(loss, optimizer)

    return step


def _transformer(device: str) -> Callable[[Any], None]:
    import torch

    embedding = torch.nn.Embedding(VOCABULARY, _WIDTH)
    layer = torch.nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, batch_first=True)
    # Nested tensors are for inference, not training, and the encoder warns about them.
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    head = torch.nn.Linear(_WIDTH, NUM_CLASSES)
    for part in (embedding, encoder, head):
        part.to(device).train()
    # Embeddings are left alone: their dense gradient would be most of a CPU's step.
    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.01)
    embedding.requires_grad_(False)

    def step(batch: Any) -> None:
        tokens = batch.to(device, non_blocking=True)
        labels = torch.zeros(len(tokens), dtype=torch.int64, device=device)
        logits = head(encoder(embedding(tokens)).mean(1))
        _finish(torch.nn.functional.cross_entropy(logits, labels), optimizer)

    return step


def _finish(loss: Any, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
