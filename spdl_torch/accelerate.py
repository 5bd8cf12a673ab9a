"""Hugging Face Accelerate: loaders prepared for it that keep loading on threads."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

try:
    from accelerate import data_loader as _accelerate
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "spdl_torch.accelerate needs Accelerate: pip install accelerate."
    ) from error

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from .data.dataloader import DataLoader
from .data.dataset import PipelineDataset
from .data.sharding import is_shared_out

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["prepare_data_loader"]


def prepare_data_loader(
    accelerator: Accelerator, loader: DataLoader[Any], *, device_placement: bool | None = None
) -> Any:
    """What ``accelerator.prepare(loader)`` returns, around our loader.

    ``prepare`` itself builds a plain DataLoader in place of ours, which starts worker processes and
    knows none of our options, and shares the samples of a DistributedSampler or a PipelineDataset
    out among the ranks a second time. This keeps the loader and shares out exactly once:

    - a loader with a DistributedSampler (ours or torch's) or a PipelineDataset stays as it is;
    - any other loader is shared out by Accelerate, by its own rules (``split_batches``,
      ``even_batches``, ``dispatch_batches``, ``use_seedable_sampler``).

    device_placement: let batches arrive on the accelerator's device; None = as of the accelerator.
        On CUDA the loader copies them ahead, on a stream of its own.
    Returns: Accelerate's own kind of loader, registered with the accelerator. What our DataLoader
        has more than torch's, ``report()`` for one, works on it. Of one that stays as it is,
        ``accelerator.gather_for_metrics`` returns padding too.
    Raises: TypeError: not our DataLoader, such as one that was prepared before.
    """
    if not issubclass(type(loader), DataLoader):  # prepared ones lie about their class
        raise TypeError(
            f"prepare_data_loader: loader must be a spdl_torch.DataLoader that was not prepared "
            f"yet, got {type(loader).__name__}. Accelerate prepares other loaders itself."
        )
    if device_placement is None:
        device_placement = accelerator.device_placement
    if is_shared_out(loader) or isinstance(loader.dataset, PipelineDataset):
        prepared: Any = _accelerate.prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=device_placement,
            dispatch_batches=False,
            non_blocking=accelerator.non_blocking,
        )
        # Its length is that of one rank, from which Accelerate would conclude what is padding.
        prepared._drop_last = True
    else:
        prepared = accelerator.prepare_data_loader(loader, device_placement=device_placement)
    device = loader.device
    if device is None and device_placement and accelerator.device.type == "cuda":
        device = accelerator.device
    prepared.base_dataloader = _rebuilt(loader, prepared.base_dataloader, device)
    if hasattr(prepared.base_dataloader, "state_dict"):
        prepared.dl_state_dict = prepared.base_dataloader.state_dict()
    prepared._is_accelerate_prepared = True  # `prepare` leaves it alone and registers it
    return accelerator.prepare_data_loader(prepared)


def _rebuilt(loader: DataLoader[Any], plain: Any, device: Any) -> DataLoader[Any]:
    """Our loader with what Accelerate chose for the plain one in its place."""
    known = inspect.signature(TorchDataLoader.__init__).parameters
    ours = inspect.signature(type(loader).__init__).parameters
    options = {name: getattr(loader, name) for name in ours if name not in known}
    how = set(known) - {"self", "dataset", "shuffle", *_CHOICE}
    options |= {name: getattr(plain, name) for name in how}
    options["device"] = device
    if isinstance(plain.dataset, IterableDataset):
        chosen = {"batch_size": plain.batch_size, "drop_last": plain.drop_last}
    elif plain.batch_sampler is not None:
        chosen = {"batch_sampler": plain.batch_sampler}
    else:
        chosen = {"batch_size": None, "sampler": plain.sampler}
    return type(loader)(plain.dataset, **chosen, **options)


_CHOICE = ("batch_size", "sampler", "batch_sampler", "drop_last")
"""Parameters that say which samples a batch has."""
