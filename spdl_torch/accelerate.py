"""Hugging Face Accelerate: ``prepare`` keeps our loaders."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

try:
    import accelerate as _accelerate
    from accelerate import data_loader as _data_loader
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "spdl_torch.accelerate needs Accelerate: pip install accelerate (the extra accelerate)."
    ) from error

from torch.utils.data import DataLoader as TorchDataLoader, IterableDataset

from .loader.dataloader import DataLoader
from .loader.loader_state import choosing_as
from .loader.sampling.sampler_chain import divides_itself, is_shared_out

__all__ = ["Accelerator", "loader_like", "prepare_data_loader"]


class Accelerator(_accelerate.Accelerator):  # type: ignore[misc]  # it ships no types
    """``accelerate.Accelerator`` whose ``prepare`` keeps our loaders.

    Our loaders are prepared by :func:`prepare_data_loader`; models, optimizers and other loaders
    by Accelerate itself.
    """

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Prepare one loader; ``prepare`` calls this for each loader that it is given."""
        # A prepared loader claims the class of the loader inside it, so isinstance would not do.
        if not issubclass(type(data_loader), DataLoader):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        return prepare_data_loader(
            self,
            data_loader,
            device_placement=device_placement,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
        )


def prepare_data_loader(
    accelerator: _accelerate.Accelerator,
    loader: DataLoader[Any],
    *,
    device_placement: bool | None = None,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
) -> Any:
    """Return what ``accelerator.prepare(loader)`` returns, around our loader.

    Accelerate's own ``prepare`` builds a plain DataLoader in place of ours, which starts worker
    processes and knows none of our options, and it shards the samples of a DistributedSampler or a
    PipelineDataset among the ranks a second time. This function keeps the loader and shards once:

    - a loader with a DistributedSampler (ours or torch's) or a PipelineDataset stays as it is;
    - any other loader is sharded by Accelerate, by its own rules (``split_batches``,
      ``even_batches``, ``dispatch_batches``, ``use_seedable_sampler``).

    Args:
        accelerator: ``accelerate.Accelerator`` or our :class:`Accelerator`.
        device_placement: let batches arrive on the accelerator's device; None = the accelerator's
            own setting. On CUDA the loader copies them ahead, on a stream of its own.
        slice_fn_for_dispatch: as in ``accelerator.prepare_data_loader``.

    Returns: Accelerate's own kind of loader, registered with the accelerator. What our DataLoader
        adds to torch's, such as ``report()``, works on it. For a loader that stays as it is,
        ``accelerator.gather_for_metrics`` returns padding too.
    Raises: TypeError: not our DataLoader, such as one that was prepared before.
    """
    if not issubclass(type(loader), DataLoader):
        raise TypeError(
            f"prepare_data_loader: loader must be a spdl_torch.DataLoader that was not prepared "
            f"yet, got {type(loader).__name__}. Accelerate prepares other loaders itself."
        )
    if device_placement is None:
        device_placement = accelerator.device_placement
    # Our Accelerator's own method would call this function again.
    is_ours = isinstance(accelerator, Accelerator)
    own: Any = super(Accelerator, accelerator) if is_ours else accelerator
    prepare = own.prepare_data_loader
    if is_shared_out(loader) or divides_itself(loader.dataset):
        prepared: Any = _data_loader.prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=device_placement,
            dispatch_batches=False,
            non_blocking=accelerator.non_blocking,
        )
        # Its length is that of one rank, from which Accelerate would infer what is padding.
        prepared._drop_last = True
    else:
        prepared = prepare(loader, device_placement, slice_fn_for_dispatch)
    device = loader.device
    if device is None and device_placement and accelerator.device.type == "cuda":
        device = accelerator.device
    prepared.base_dataloader = choosing_as(loader, prepared.base_dataloader, device)
    if hasattr(prepared.base_dataloader, "state_dict"):
        prepared.dl_state_dict = prepared.base_dataloader.state_dict()
    prepared._is_accelerate_prepared = True  # `prepare` leaves it alone and registers it
    return prepare(prepared)


def loader_like(
    plain: TorchDataLoader[Any], kind: type[DataLoader[Any]], options: Mapping[str, Any]
) -> DataLoader[Any]:
    """Return our loader with the arguments of a plain one, and further options."""
    known = inspect.signature(TorchDataLoader.__init__).parameters
    how = set(known) - {"self", "dataset", "shuffle", *_CHOICE}
    if isinstance(plain.dataset, IterableDataset):
        chosen: dict[str, Any] = {"batch_size": plain.batch_size, "drop_last": plain.drop_last}
    elif plain.batch_sampler is not None:
        chosen = {"batch_sampler": plain.batch_sampler}
    else:
        chosen = {"batch_size": None, "sampler": plain.sampler}
    how_options = {name: getattr(plain, name) for name in how}
    return kind(plain.dataset, **{**how_options, **chosen, **options})


_CHOICE = ("batch_size", "sampler", "batch_sampler", "drop_last")
"""Parameters that decide which samples a batch has."""
