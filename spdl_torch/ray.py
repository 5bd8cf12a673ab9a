"""Ray Train: ``prepare_data_loader`` keeps our loaders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .loader.loader_state import choosing_as

if TYPE_CHECKING:
    from .loader.dataloader import DataLoader

__all__ = ["prepare_data_loader"]


def prepare_data_loader(loader: DataLoader[Any], *, move_to_device: bool = True) -> Any:
    """Return our loader with this worker's share of the samples, on this worker's GPU.

    Ray's own function builds torch's DataLoader in place of ours. This one takes from it what it
    chose: a loader without a DistributedSampler gets one, and the others keep their samples. With
    several workers call ``loader.sampler.set_epoch(epoch)`` before each epoch, as with Ray's own.

    move_to_device: let batches arrive on the worker's GPU, where it has one and the loader has no
        ``device``.
    """
    from ray.train.torch import get_device, prepare_data_loader as prepare

    plain = prepare(loader, move_to_device=False)
    device = loader.device
    if device is None and move_to_device and (own := get_device()).type == "cuda":
        device = own
    return choosing_as(loader, plain, device)
