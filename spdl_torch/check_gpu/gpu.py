"""The questions that the checks ask of a device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch

from ..io._transfer import runtime
from ..scopes import scope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

StreamKind = Literal["default", "side", "external"]
STREAMS: tuple[StreamKind, ...] = get_args(StreamKind)

_LATE_CYCLES = 4_000_000  # some 2 ms


class Gpu(Protocol):
    """A device whose kernels can be delayed."""

    launches: bool
    """Whether it runs kernels; without, the checks that need some are skipped."""

    def make_late(self) -> None:
        """Delay everything queued on the current stream from now on by a few milliseconds."""
        ...

    def total(self, tensor: Tensor) -> Any:
        """Launch a kernel on the current stream that adds up a tensor, and return at once."""
        ...

    def values(self, totals: Sequence[Any]) -> list[float]:
        """Wait for all that was launched; return what the kernels found."""
        ...

    def move(self, tensor: Tensor) -> Tensor:
        """Start copying a tensor to the device, as a training loop does, and return at once."""
        ...

    def index_of(self, tensor: Tensor) -> int | None:
        """Return the number of the device that has the tensor; None = the host."""
        ...

    def on_stream(self, kind: StreamKind) -> AbstractContextManager[None]:
        """Train on another stream: one of torch's, or one that torch did not make."""
        ...


class CudaGpu:
    """The current CUDA device."""

    launches = True

    def __init__(self) -> None:
        self._foreign: torch.cuda.Stream | None = None  # one is enough: it is never destroyed

    def make_late(self) -> None:
        torch.cuda._sleep(_LATE_CYCLES)  # type: ignore[no-untyped-call]  # untyped in torch

    def total(self, tensor: Tensor) -> Any:
        return tensor.sum(dtype=torch.float64)

    def values(self, totals: Sequence[Any]) -> list[float]:
        torch.cuda.synchronize()
        return [float(total) for total in totals]

    def move(self, tensor: Tensor) -> Tensor:
        return tensor.to("cuda", non_blocking=True)

    def index_of(self, tensor: Tensor) -> int | None:
        return tensor.device.index

    @scope
    def on_stream(self, kind: StreamKind) -> Iterator[None]:
        streams: dict[StreamKind, Callable[[], AbstractContextManager[Any]]] = {
            "default": nullcontext,
            "side": lambda: torch.cuda.stream(torch.cuda.Stream()),  # type: ignore[no-untyped-call]  # untyped in torch
            "external": lambda: torch.cuda.stream(self._foreign_stream()),
        }
        with streams[kind]():
            yield

    def _foreign_stream(self) -> torch.cuda.Stream:
        """Return a stream that torch knows by its handle alone."""
        if self._foreign is None:
            handle = runtime.new_stream()
            if handle is None:  # CUDA's runtime makes none for us: pass off one of torch's as such
                handle = torch.cuda.Stream().cuda_stream  # type: ignore[no-untyped-call]  # untyped in torch
            self._foreign = torch.cuda.ExternalStream(handle)  # type: ignore[no-untyped-call]  # untyped in torch
        return self._foreign


@scope
def unguarded() -> Iterator[None]:
    """Disable the call that shows the allocator who uses a batch's memory: for the self-test of a
    race check, which then has to find wrong batches.
    """
    own = vars(torch.Tensor).get("record_stream")
    torch.Tensor.record_stream = _record_nothing  # type: ignore[method-assign, assignment]  # the guard, taken out
    try:
        yield
    finally:
        if own is None:
            del torch.Tensor.record_stream
        else:
            torch.Tensor.record_stream = own  # type: ignore[method-assign]  # put back


def _record_nothing(tensor: Tensor, stream: Any) -> None:
    """Record nothing."""
