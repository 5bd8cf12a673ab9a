"""A wait that is too long reports what is stuck: the stage, the item and the thread's stack."""

import asyncio
import logging
import re
import threading
import time

import pytest
from support.datasets import GatedData
from support.gates import in_thread, result_of, until
from support.loaders import PATIENCE_SECONDS, ThreadLoader as DataLoader
from torch.utils.data import IterableDataset

from spdl_torch import PipelineDataset
from spdl_torch.engine import channel
from spdl_torch.observe import flight_recorder
from spdl_torch.pipeline import PipelineBuilder


class GatedStream(GatedData, IterableDataset):
    """The same as an iterable."""

    def __iter__(self):
        return map(self.__getitem__, range(self.length))


@pytest.mark.parametrize(
    ("kind", "options", "item"),
    [
        (GatedData, {"on_error": "skip"}, "sample index 6"),
        (GatedData, {"batch_size": None}, "sample index 6"),
        (GatedStream, {}, "item 6 of the iterator of GatedStream"),
    ],
)
def test_timeout_names_the_stage_the_item_and_the_stack(kind, options, item):
    """torch's words come first; ours say whose fault it is."""
    dataset = kind(8, held=6)
    options = {"num_workers": 1, "prefetch_factor": 8, "batch_size": 4, **options}
    loader, began = DataLoader(dataset, timeout=0.1, **options), time.monotonic()
    text = message_of_timeout(loader, dataset)
    number = 6 if options["batch_size"] is None else 1
    assert text.startswith(f"DataLoader timed out after 0.1 seconds. Waiting for batch {number}.")
    assert f"stage 'fetch', {item}\n" in text
    (seconds,) = re.findall(rf"spdl-loader-0, batch {number} for (\d+\.\d) s: ", text)
    assert float(seconds) <= time.monotonic() - began + 0.05  # it is rounded
    assert "in __getitem__\n    assert self.gate.wait(" in text


def message_of_timeout(loader, data):
    batches = iter(loader)
    assert data.entered.wait(PATIENCE_SECONDS), "nobody is stuck"
    try:
        while True:
            next(batches)
    except RuntimeError as error:
        return str(error)
    finally:
        data.gate.set()


def open_when_logged(gate, caplog, message):
    try:
        until(lambda: message in caplog.text)
    finally:
        gate.set()


def pipeline_of(source, op):
    return PipelineBuilder().add_source(source).pipe(op, name="stuck").add_sink(1).build()


def test_long_wait_is_logged_without_a_timeout(caplog, monkeypatch):
    """The log says so, of a loader or of a pipeline, and what is awaited is handed out when it
    comes: nobody has to have thought of a timeout or of the flight recorder before."""
    monkeypatch.setattr(channel, "STALL_SECONDS", 0.05)
    data = GatedData(4, held=2)
    opened = in_thread(open_when_logged, data.gate, caplog, "Waiting for batch 2")
    assert [batch.item() for batch in DataLoader(data, num_workers=1)] == [0, 1, 2, 3]
    result_of(opened)
    lines = [line for line in caplog.messages if "the loop has waited" in line]
    assert "waited 0.05 s for a batch. Waiting for batch" in lines[0]
    assert any("Waiting for batch 2" in line and "sample index 2\n" in line for line in lines)

    data = GatedData(1)
    busy = "pipeline: the loop has waited 0.05 s for an item. Busy threads: spdl-stuck-0."
    opened = in_thread(open_when_logged, data.gate, caplog, busy)
    with (pipeline := pipeline_of([0], data.__getitem__)).auto_stop():
        assert list(pipeline) == [0]
    result_of(opened)


@pytest.mark.parametrize(
    ("where", "name"), [("source", "spdl-src"), ("op", "spdl-stuck-0"), ("async op", "spdl-loop")]
)
def test_timeout_of_a_pipeline_names_what_is_at_work(where, name):
    """The source, the op or the event loop; threads that wait for these are left out."""
    data = GatedData(1)

    async def wait_async(item):
        await asyncio.to_thread(data.__getitem__, item)  # the loop sleeps meanwhile

    op = {"source": str, "op": data.__getitem__, "async op": wait_async}[where]
    pipeline = pipeline_of(map(data.__getitem__, [0]) if where == "source" else [0], op)
    with pipeline.auto_stop():
        assert data.entered.wait(PATIENCE_SECONDS)
        with pytest.raises(TimeoutError, match=r"no item came within 0\.2 seconds") as caught:
            pipeline.get_item(timeout=0.2)
        data.gate.set()
    text = str(caught.value)
    assert f"Busy threads: {name}." in text
    assert ("Coroutines under way: stuck-0." in text) == (where == "async op")
    assert ("the event loop" if where == "async op" else "in __getitem__\n") in text


def test_flight_recorder_logs_the_stacks_of_a_stall(tmp_path, caplog):
    """The trace shows when it was, the log where. Its thread ends with the block."""
    caplog.set_level(logging.WARNING)
    dataset = GatedData(2, held=0)
    with flight_recorder(tmp_path, stall_seconds=0.1):
        opened = in_thread(open_when_logged, dataset.gate, caplog, "a loop waits for data")
        assert len(list(DataLoader(dataset, num_workers=1))) == 2
    assert not [each for each in threading.enumerate() if "flight-recorder" in each.name]
    result_of(opened)
    assert "Busy threads: spdl-loader-0.\nspdl-loader-0:\n" in caplog.text
    assert "self.gate.wait(PATIENCE_SECONDS)" in caplog.text


def test_timeout_names_collate_fn():
    """The other stage of a worker."""
    data = GatedData(4, held=0)
    loader = DataLoader(range(4), num_workers=1, timeout=0.1, collate_fn=lambda _: data[0])
    text = message_of_timeout(loader, data)
    assert "batch 0 for" in text
    assert "stage 'collate'\n" in text


def test_timeout_names_what_is_at_work_in_a_pipeline_inside():
    """The worker waits for the pipeline's threads."""
    data = GatedData(2, held=1)
    inner = PipelineDataset(PipelineBuilder().add_source([0, 1]).pipe(data.__getitem__).add_sink())
    loader = DataLoader(inner, num_workers=1, timeout=0.1, batch_size=None)
    assert "Busy threads: spdl-__getitem__-0." in message_of_timeout(loader, data)
