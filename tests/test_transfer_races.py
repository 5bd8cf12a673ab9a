"""Batches on a device that is as late as CUDA allows: right bytes, whatever the order. And each
line that sees to it is taken out once, which is then noticed.
"""

from __future__ import annotations

import ast
import gc
import inspect
import os
import pickle
import textwrap
import weakref

import pytest
import torch
from _lazy_device import LazyDevice, install

from spdl_torch.data.child_process import batch_packing as packing
from spdl_torch.data.child_process.batch_packing import pack, unpack
from spdl_torch.data.child_process.shared_memory import Mappings, SlabPool
from spdl_torch.data.workers.jobs import Loaded
from spdl_torch.io import Transfer
from spdl_torch.io._transfer import cuda, region, slabs, transfer

ORDERS = ("late", "model", *range(3))
LARGE = slabs.SMALL_BYTES


def expect(problems, found, value):
    """One that is read late has only bytes of ``value``; noted if not."""
    if found[0] != bytes([value]) * len(found[0]):
        problems.append(f"batch {value} is wrong")


def pinned(value):
    """A batch's part that torch, or a slab of a child, has in locked memory."""
    return cuda.CudaBackend(torch.device("cuda", 0)).pinned(LARGE).fill_(value)


def batch_of(value):
    """What is packed, large and small, and what is copied from where it is."""
    large = torch.full((LARGE,), value, dtype=torch.uint8)
    return [large, large[:9].clone(), pinned(value)]


def staged_ahead_and_read_late(device):
    """The loop launches kernels and lets go of each batch at once; the transfer goes, too."""
    readings, problems = [], []
    copies = Transfer("cuda", num_slabs=2)
    ahead = [copies.stage(batch_of(0))]
    for value in range(1, 14):
        ahead.append(copies.stage(batch_of(value)))
        batch = ahead.pop(0).receive()
        readings += [(device.read(tensor), value - 1) for tensor in batch]
        del batch
        device.step()
    if len(device.blocks) > 3 * (transfer.MOST_BEHIND + 4):
        problems.append(f"{len(device.blocks)} blocks of memory are in use")
    copies.stage(batch_of(99))  # nobody receives it
    del copies, ahead
    gc.collect()
    device.drain()
    for found, value in readings:
        expect(problems, found, value)
    return problems


def done_on_return(device):
    """``transfer_tensor`` is for every stream, which waits for nothing; and it lets go of it."""
    problems, readings = [], []
    for value in range(5):
        batch = transfer.transfer_tensor(batch_of(value), "cuda:0")
        for tensor in batch:
            expect(problems, [bytes(tensor.numpy())], value)
        readings += [(device.read(tensor), value) for tensor in batch]
        del batch, tensor
    device.drain()
    for found, value in readings:
        expect(problems, found, value)
    return problems


def written_by_a_child(device):
    """Batches lie in slabs that are written again as soon as the trainer lets go of them."""
    problems, readings = [], []
    pool, copies = SlabPool(), Transfer("cuda")
    mappings = Mappings(8, lock=copies.region)
    for value in range(14):
        tensor = torch.full((LARGE,), value, dtype=torch.uint8)
        packed = pack({"x": tensor, "array": tensor.numpy()} if value % 2 else {"x": tensor}, pool)
        message = packed.as_message()
        if message.ticket.is_new:
            mappings.open(message.ticket, os.dup(packed.lease.slab.descriptor))
        packed.lease.sent()
        message = pickle.loads(pickle.dumps(message, 5))
        batch = copies.stage(unpack(Loaded(value, message), mappings).batch).receive()
        readings.append((device.read(batch["x"]), value))
        if value % 2 and device.is_locked(batch["array"].ctypes.data):
            problems.append("the loop can begin copies of its own, for which nobody waits")
        del packed, batch
        device.step()
        for slab in mappings.freed().slabs:
            pool.give_back(slab)
    mappings.close()
    del copies, mappings
    gc.collect()
    device.drain()
    for found, value in readings:
        expect(problems, found, value)
    return problems


SCENARIOS = [staged_ahead_and_read_late, done_on_return, written_by_a_child]


def problems_of(scenario, order, monkeypatch):
    """What went wrong in one run."""
    with monkeypatch.context() as patched:
        install(device := LazyDevice(order), patched.setattr)
        found = scenario(device)
        transfer._shared.clear()
        gc.collect()
        if device.locked:
            found.append(f"{len(device.locked)} pieces of memory are still locked")
        return found + device.violations


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_batches_are_right_in_every_order(scenario, monkeypatch):
    """Of copies, kernels and memory that is used again."""
    for order in ("late", "model", *range(6)):
        assert problems_of(scenario, order, monkeypatch) == []


# -- each line that guards something, taken out --------------------------------------------------

GUARDS = {
    *("record_stream", "wait_event", "synchronize", "record", "wait", "busy_until", "hand_over"),
    *("_hand_over", "_await_the_model", "unlock_pages"),
}


def guarding_lines():
    """Every statement on the package's way to the device that calls one of them for its effect."""
    for module in (cuda, region, slabs, transfer):
        own = [each for each in vars(module).values() if is_of(module, each)]
        for owner in (module, *filter(inspect.isclass, own)):
            for name, function in vars(owner).items():
                function = getattr(function, "__func__", function)
                if inspect.isfunction(function) and is_of(module, function):
                    for line in lines_with_guards(function):
                        yield pytest.param(owner, name, line, id=f"{function.__qualname__}:{line}")


def is_of(module, value):
    """Whether it was written there."""
    made_up = inspect.isfunction(value) and value.__code__.co_filename != module.__file__
    return getattr(value, "__module__", None) == module.__name__ and not made_up


def lines_with_guards(function):
    """Numbers within the function."""
    statements = [node for node in ast.walk(tree_of(function)) if isinstance(node, ast.Expr)]
    return [statement.lineno for statement in statements if calls_a_guard(statement)]


def calls_a_guard(statement):
    """Somewhere in it."""
    called = (each.func for each in ast.walk(statement) if isinstance(each, ast.Call))
    return any(isinstance(each, ast.Attribute) and each.attr in GUARDS for each in called)


def tree_of(function):
    """Its source, alone."""
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


class Without(ast.NodeTransformer):
    """Takes a statement out."""

    def __init__(self, line):
        self.line = line

    def visit_Expr(self, node):
        return ast.Pass() if node.lineno == self.line else node


def without(function, line):
    """The function with that statement left out."""
    tree, found = ast.fix_missing_locations(Without(line).visit(tree_of(function))), {}
    exec(compile(tree, "<without>", "exec"), function.__globals__, found)
    return found[function.__name__]


@pytest.mark.parametrize(("owner", "name", "line"), list(guarding_lines()))
def test_line_is_missed_when_it_is_taken_out(owner, name, line, monkeypatch):
    """No wait, event or mark of the code is there for nothing, and none can be lost unnoticed."""
    original = vars(owner)[name]
    monkeypatch.setattr(owner, name, without(getattr(original, "__func__", original), line))
    for scenario in SCENARIOS:
        for order in ORDERS:
            if problems_of(scenario, order, monkeypatch):
                return
    pytest.fail("nothing went wrong without it")


class Forgetful(slabs.Slab):
    """Keeps nothing of what is copied from where it is."""

    def busy_until(self, event, sources):
        super().busy_until(event, ())


class UnlockedTooLate(region.Region):
    """As a finalizer of the mapping would: when that has gone."""

    def __init__(self, memory, locker=None):
        super().__init__(memory, locker)
        if self.is_locked:
            weakref.finalize(memory, self._locker.unlock_pages, self._address)

    def __del__(self):
        pass


@pytest.mark.parametrize(
    ("owner", "name", "worse"),
    [
        (slabs, "Slab", Forgetful),
        (cuda, "Region", UnlockedTooLate),
        (transfer, "Region", UnlockedTooLate),
        (packing, "is_moved_whole", lambda batch: True),
    ],
)
def test_something_is_wrong_when_it_is_done_worse(owner, name, worse, monkeypatch):
    """What is kept, in which order memory goes, what may stay a view."""
    monkeypatch.setattr(owner, name, worse)
    assert any(
        problems_of(scenario, order, monkeypatch) for scenario in SCENARIOS for order in ORDERS
    )
