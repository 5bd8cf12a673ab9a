"""The device of a loader's batches: whether there is one, and how many batches wait for it."""

from __future__ import annotations

import torch

from ...errors import UnsupportedOptionError

AHEAD = 1
"""The number of staged batches that wait for the trainer, besides the one that the thread holds:
enough to copy one while the trainer works on another. More would only hold device memory."""


def check_device(
    device: torch.device | str | int | None, where: str = "DataLoader"
) -> torch.device | None:
    """Return the CUDA device, or None for host memory. Does not touch CUDA: the loader may be built
    before the process that uses it is forked, or before its device is chosen.

    Raises: UnsupportedOptionError: neither CUDA nor the CPU.
    """
    if device is None:
        return None
    try:
        target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UnsupportedOptionError(
            f'{where}: device must be None, the CPU or a CUDA device ("cuda", "cuda:1", a number, '
            f"a torch.device), got {device!r}."
        ) from error
    if target.type not in ("cpu", "cuda"):
        from ...io._transfer.cuda import refusal  # brings the CUDA runtime's calls

        raise UnsupportedOptionError(
            f"{where}: device must be None, the CPU or a CUDA device, got {str(target)!r}: "
            f"{refusal(target)}"
        )
    return target if target.type == "cuda" else None


def most_pieces(max_outstanding: int) -> int:
    """Return how many batches may lie in pinned memory, besides the transfer's own two slabs: with
    those, three more than can be outstanding. Two may be under way to the device, one is spare.
    """
    return max_outstanding + 1


def most_regions(max_outstanding: int, num_processes: int) -> int:
    """Return the same for batches in the shared memory of processes: each has one more, which is
    free already, but the process has not yet read so.
    """
    return most_pieces(max_outstanding) + num_processes
