"""The parts shared by the programs that train from a pipeline in a child process: options, ranks,
time."""

from __future__ import annotations

import argparse
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch
    from torch import nn


def argument_parser(
    description: str | None, *, epochs: int, batch_size: int, lr: float
) -> argparse.ArgumentParser:
    """Return a parser of the options that all of them have, with these defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="folder, see above; default: some is made up")
    add("--epochs", type=int, default=epochs, metavar="N")
    add("--batch-size", type=int, default=batch_size, metavar="N", help="of each rank")
    add("--lr", type=float, default=lr)
    add("--num-threads", type=int, default=4, metavar="N", help="of the pipeline")
    add("--device", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    add("--seed", type=int, default=0)
    add("--smoke", action="store_true", help="little data and a small model, for a few seconds")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, with the device as torch's object."""
    import torch  # after the parser's own errors and --help: it takes seconds

    options = parser.parse_args(argv)
    try:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        options.device = torch.device(options.device or default)
    except RuntimeError as error:
        parser.error(f"--device: {error}")
    return options


@dataclass(frozen=True, slots=True)
class Ranks:
    """The place of this process among those that train together."""

    rank: int = 0
    world_size: int = 1

    def say(self, text: str) -> None:
        """Print a line, once for all ranks."""
        if self.rank == 0:
            print(text, flush=True)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model with its gradients averaged over the ranks."""
        return model if self.world_size == 1 else nn_parallel(model)

    def sums(self, *values: float) -> list[float]:
        """Return each value added up over the ranks."""
        import torch
        import torch.distributed as dist

        total = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            device = "cuda" if dist.get_backend() == "nccl" else "cpu"
            total = total.to(device)
            dist.all_reduce(total)
        return total.tolist()


def nn_parallel(model: nn.Module) -> nn.Module:
    """Wrap the model; torch's wrapper is imported only where it is needed: that takes a second."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model)


@contextmanager
def ranks(device: torch.device) -> Iterator[Ranks]:
    """Join the process group, if torchrun started this process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks()
        return
    import torch
    import torch.distributed as dist

    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    yield Ranks(dist.get_rank(), dist.get_world_size())
    # Not after an error: other ranks may wait in a collective call that this one will not join.
    dist.destroy_process_group()


class Timed:
    """Iterates and measures the share of the time spent waiting for the next item."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items
        self.seconds = self.waited_seconds = 0.0

    def __iter__(self) -> Iterator[Any]:
        began = asked = time.perf_counter()
        for item in self._items:
            self.waited_seconds += time.perf_counter() - asked
            yield item
            asked = time.perf_counter()
        self.seconds = time.perf_counter() - began

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s, waited for data {self.waited_seconds / self.seconds:.0%}"
