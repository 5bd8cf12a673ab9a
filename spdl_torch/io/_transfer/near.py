"""Threads and pinned memory near a GPU, on a machine with several sockets.

A GPU is attached to one of them, to its *node*. What it reads from the memory of another one takes
the link between sockets, which everybody shares. Memory is on the node of the core that first
writes to it. So pinned memory is first written to by a core near the GPU, and the threads that fill
it run there.

As many threads do so as the node has room for. The others are not bound: to wait for a core near
the GPU would take longer than the way to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...engine.threads.shared_state import SharedCounter
from ...machine.limits import Limits, allowed_cores
from ...machine.numa import bind, may_bind, node_of, nodes

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_LEFT_TO_OTHERS = 8
"""Of the cores of a node, one in so many is left to the thread that trains and to the system."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Near:
    """The cores near a device, where this process may run there and elsewhere."""

    device: str
    node: int
    """The device's node."""
    num_nodes: int
    """The nodes of the machine."""
    cores: frozenset[int]
    num_ranks: int = 1
    """The ranks of this machine whose devices are at that node, this one included."""

    @property
    def room(self) -> int:
        """The number of threads of this process, besides the transfer's, that have a core there."""
        share = len(self.cores) // self.num_ranks
        return share - share // _LEFT_TO_OTHERS

    def settle(self, number: int) -> None:
        """Bind the calling thread, and those that it starts, if there is room for so many before
        it.
        """
        if number < self.room:
            bind(self.cores)

    def settle_each(self) -> Callable[[], None]:
        """Return a function that settles each thread which calls it. One, the transfer's, comes on
        top of the others, as in a loader.
        """
        numbers = SharedCounter(-1)
        return lambda: self.settle(next(numbers))

    def remark(self, num_threads: int = 0, crew: str = "workers") -> str:
        """Return the remark for a report on so many of those that load."""
        near = min(num_threads, self.room)
        threads = f" and {near} of {num_threads} {crew} are" if num_threads else " is"
        place = f"node {self.node} of the machine's {self.num_nodes}, cores: {len(self.cores)}"
        return f"transfer: pinned memory{threads} near {self.device}: {place}."


def near_to(
    device: torch.device, pci_address: Callable[[int], str], num_devices: Callable[[], int]
) -> Near | None:
    """Return the cores near a device; None = there is nothing to choose: the machine has one node,
    it does not say which is the device's, this process may run on that alone, or not at all, or the
    system binds no threads.
    """
    found, allowed = nodes(), allowed_cores()
    if len(found) < 2:
        return None
    node = node_of(pci_address(device.index))
    if node is None or node not in found:
        return None
    cores = found[node] & allowed
    if not cores or cores == allowed or not may_bind():
        return None
    ranks = Limits.of_this_machine().local_world_size
    # Rank by rank, as launchers number them. Where each rank sees its own device alone, all may be
    # at this node.
    if ranks <= num_devices():
        ranks = sum(node == node_of(pci_address(index)) for index in range(ranks))
    return Near(
        device=str(device),
        node=node,
        num_nodes=len(found),
        cores=cores,
        num_ranks=max(1, ranks),
    )
