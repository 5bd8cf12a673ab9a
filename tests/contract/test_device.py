"""``device=`` of the loader, on a device that is not a GPU: order, errors, ends, statistics."""

import gc
import threading
import traceback
import weakref
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from support.datasets import BulkData, GatedData, Made, MapData, StreamData
from support.gates import Boom, is_gone, spdl_threads, until
from support.lazy_device import (
    PATIENCE_SECONDS,
    LazyBackend,
    LazyDevice,
    install,
    machine,
    put_to_rest,
    take_until_far_behind,
)
from support.loaders import ThreadLoader as DataLoader, assert_threads_end, epoch_of, loader_threads
from support.seats import FORKED, NONE, THREADS, in_seats
from torch.utils._python_dispatch import TorchDispatchMode

from spdl_torch import PipelineDataset, PipelineFailure, UnsupportedOptionError
from spdl_torch.io._transfer import cuda, transfer
from spdl_torch.pipeline import PipelineBuilder

workers = pytest.mark.parametrize("num_workers", [0, 2])


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_epoch_equals_the_one_without_a_device(backends, data):
    """Same batches, same order, same errors at the same places, for every kind of dataset; handed
    over on the trainer's thread, where the current stream is the model's. Out of order they are the
    same batches, and without statistics, too; and the same samples are left out."""
    dataset_class = data.draw(st.sampled_from([MapData, BulkData, StreamData]))
    bad = dict.fromkeys(data.draw(st.sets(st.integers(0, 12), max_size=2)), ValueError)
    dataset = dataset_class(data.draw(st.integers(0, 13)), bad)
    options = {
        "batch_size": data.draw(st.sampled_from([None, 1, 4])),
        "num_workers": data.draw(st.integers(0, 3)),
    }
    if options["num_workers"]:
        options["prefetch_factor"] = data.draw(st.integers(1, 3))
    if data.draw(st.booleans()):
        options |= {"on_error": "skip", "error_budget": 99}
    expected, backends[:] = epoch_of(without := DataLoader(dataset, **options)), []
    in_order, stats = data.draw(st.booleans()), data.draw(st.booleans())
    options |= {"in_order": in_order} if options["num_workers"] else {}
    loader = DataLoader(dataset, device="cuda:1", stats=stats, **options)
    got = epoch_of(loader)
    order = (lambda events: events) if in_order else (lambda events: sorted(events, key=repr))
    assert order(got) == order(expected)
    assert sorted(map(str, loader.skipped)) == sorted(map(str, without.skipped))
    (backend,) = backends
    assert backend.place == torch.device("cuda", 1)
    assert {thread for thread, _ in backend.handed_over} <= {threading.current_thread()}


class Operations(TorchDispatchMode):
    """torch's, on this thread."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", [None, "cuda"])
@in_seats(NONE, THREADS, FORKED)
def test_thread_that_trains_makes_no_tensor_and_waits_for_no_device(
    backends, monkeypatch, seat, device
):
    """Nor does it call torch at all for a batch, or take memory on the device, but for the
    hand-over; without workers it does all of it. Without a device, it unpacks the batches of
    processes itself."""
    makers, empty = set(), LazyDevice.empty

    def noting(machine, num_bytes):
        makers.add(threading.current_thread().name)
        return empty(machine, num_bytes)

    monkeypatch.setattr(LazyDevice, "empty", noting)
    batches = iter(seat.loader(MapData(40), 2, device=device))
    with Operations() as operations:
        for _ in range(20):
            next(batches)
    is_idle = seat is THREADS or (seat is FORKED and device is not None)
    assert (operations.seen == []) is is_idle
    if device is not None:
        owner = {"spdl-transfer" if is_idle else threading.current_thread().name}
        assert makers == owner
        assert machine().waiters == owner


def test_batches_on_the_device_are_few_when_the_trainer_is_slow(backends):
    """Two are ahead of the trainer, whatever prefetch_factor allows in host memory."""
    loader = DataLoader(range(40), num_workers=2, prefetch_factor=8, device="cuda")
    batches = iter(loader)
    (backend,) = backends
    next(batches)
    device = backend.machine
    until(lambda: device.num_given == 3)
    until(lambda: loader.snapshot().stages[0].tasks.num_tasks >= 16)
    assert device.num_given == 3
    next(batches)
    until(lambda: device.num_given == 4)


@workers
def test_error_of_the_transfer_reaches_the_loop_as_itself(backends, monkeypatch, num_workers):
    """With a note on where it happened; the loop can go on after it, with those that were not
    staged before there was memory again."""
    loader = DataLoader(range(4), num_workers=num_workers, device="cuda")
    monkeypatch.setattr(LazyBackend, "out_of_memory", True)
    batches = iter(loader)
    with pytest.raises(torch.OutOfMemoryError, match="is full") as raised:
        next(batches)
    where = " (spdl-transfer)" if num_workers else ""
    assert raised.value.__notes__ == [f"in the transfer to cpu{where}, batch 0"]
    monkeypatch.setattr(LazyBackend, "out_of_memory", False)
    came = epoch_of(batches)
    assert len(came) == 3
    rest = [each for each in came if each is not torch.OutOfMemoryError]
    assert rest == epoch_of(DataLoader(range(4)))[4 - len(rest) :]


@pytest.fixture
def stuck(monkeypatch):
    """A device whose model has hours to go: its kernels never end, in a test's time."""
    install(device := LazyDevice("late"), monkeypatch.setattr)
    yield device
    put_to_rest()


def loader_to_the_device():
    return DataLoader(range(100), num_workers=2, device="cuda")


def pipeline_to_the_device():
    return dataset_to("cuda", num_items=100)


@pytest.mark.parametrize("load", [loader_to_the_device, pipeline_to_the_device])
def test_threads_end_when_the_model_is_far_behind(stuck, load):
    """The owner's, too: nobody waits for hours of the model's work in order to break off."""
    batches = iter(load())
    take_until_far_behind(batches, stuck)
    threads = spdl_threads()
    del batches
    assert_threads_end(threads)
    assert stuck.is_model_stuck


def test_wait_for_the_model_is_no_time_of_the_transfer(stuck, monkeypatch):
    """Otherwise a report would blame the transfer for a model that is busy."""
    wait, callers = transfer.wait_while, []

    def noting(*args):
        callers.append([frame.name for frame in traceback.extract_stack()])
        return wait(*args)

    monkeypatch.setattr(transfer, "wait_while", noting)
    take_until_far_behind(iter(loader_to_the_device()), stuck)
    (names,) = callers
    assert "when_due" in names
    assert "timed" not in names


@workers
def test_snapshot_has_the_transfer_as_a_stage(backends, num_workers):
    """Third, one thread, a task for each batch; the queue is the one that the trainer takes
    from."""
    loader = DataLoader(MapData(12), batch_size=4, num_workers=num_workers, device="cuda")
    for _ in range(2):
        assert len(list(loader)) == 3
        fetch, collate, transfer = loader.snapshot().stages
        assert [fetch.name, collate.name, transfer.name] == ["fetch", "collate", "transfer"]
        assert (transfer.concurrency, transfer.tasks.num_tasks) == (1, 3)
        assert transfer.tasks.num_failures == 0
        assert 0 <= transfer.busy_ratio <= 1
        assert not num_workers or transfer.queue.num_items == 3


@pytest.mark.parametrize("device", [None, "cuda"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_was_delivered_is_not_kept(backends, num_workers, device):
    """A batch that the loop dropped is gone: device memory is scarce. An error refers to the loop's
    frames; an owner that kept it would keep the iterator."""
    data = GatedData(4, held=2 if num_workers else None)

    def sample(index):
        if index == 0:
            raise Boom(index)
        return data[index]

    batches = iter(DataLoader(Made(sample, 4), num_workers=num_workers, device=device))
    with pytest.raises(Boom, match="0") as raised:
        next(batches)
    batch = next(batches)
    assert batch.item() == 1
    gone = [weakref.ref(each) for each in (raised.value, batch, batch.untyped_storage())]
    assert not num_workers or data.entered.wait(PATIENCE_SECONDS)
    del raised, batch
    gc.collect()
    assert all(map(is_gone, gone))
    data.gate.set()
    assert [batch.item() for batch in batches] == [2, 3]


@pytest.mark.parametrize(
    ("device", "why", "instead"),
    [
        ("mps", "MPS has a single stream", r"Leave .* batch\.to\('mps'\)"),
        ("xpu:1", "tested for CUDA alone", r"pin_memory=True .*\('xpu:1', non_blocking=True\)"),
        ("meta", "CUDA's streams and events", r"Leave .* batch\.to\('meta'\)"),
    ],
)
def test_device_is_refused_when_it_is_no_cuda_device(device, why, instead):
    """At construction; the message says why, and what to do."""
    for kind, make in (("DataLoader", partial(DataLoader, [1])), ("PipelineDataset", dataset_to)):
        message = rf"{kind}: device must be .* got '{device}': .*{why}.*{instead}"
        with pytest.raises(UnsupportedOptionError, match=message):
            make(device=device)


@pytest.mark.parametrize(("device", "num_workers"), [("cuda", 2), (torch.device("cuda", 1), 0)])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_asked_for_at_iter(device, num_workers):
    """A loader may be built before the device is chosen, and where there is none; the error
    comes with the first epoch and leaves no thread."""
    loader = DataLoader([1], num_workers=num_workers, device=device)
    assert loader.device == device
    with pytest.raises(RuntimeError, match="needs CUDA, and torch finds none here"):
        iter(loader)
    assert loader_threads() == []


@workers
def test_device_is_the_current_one_when_it_has_no_index(backends, monkeypatch, num_workers):
    """That of the thread that calls iter(), at that time: Lightning and torchrun set it late."""
    loader = DataLoader(range(2), num_workers=num_workers, device="cuda")
    asked = []

    def resolve(device):
        asked.append((device.index, threading.current_thread()))
        return torch.device("cuda", 2)

    monkeypatch.setattr(cuda, "resolve", resolve)
    list(loader)
    here = threading.current_thread()
    assert asked == [(None, here), (2, here)]  # from then on it has its number
    assert backends[0].place == torch.device("cuda", 2)


def dataset_to(device, op=torch.tensor, num_items=9, **options):
    """Numbers, as tensors."""
    builder = PipelineBuilder().add_source(range(num_items)).pipe(op, output_order="input")
    return PipelineDataset(builder.add_sink(), device=device, **options)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1", 1, torch.device("cuda", 0)])
def test_pipeline_dataset_hands_items_over(backends, device):
    """In order and whole, on every pass; the stage is there to be seen, where one is needed."""
    dataset = dataset_to(device)
    for _ in range(2):
        assert [item.item() for item in dataset] == list(range(9))
    assert len(dataset) == 9
    stages = ["tensor"] if device == "cpu" else ["tensor", "transfer"]
    assert [stage.name for stage in dataset.snapshot().stages] == stages
    assert_threads_end()


def test_pipeline_dataset_fails_when_the_device_is_full(backends, monkeypatch):
    """Not one item is dropped for that."""
    monkeypatch.setattr(LazyBackend, "out_of_memory", True)
    with pytest.raises(PipelineFailure, match="transfer") as caught:
        list(dataset_to("cuda"))
    assert isinstance(caught.value.exceptions[0], torch.OutOfMemoryError)
