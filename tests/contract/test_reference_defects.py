"""Known defects of comparable systems, none of which is to appear here.

Each test shows, from end to end, that figures are right or data is whole where another loader,
statistics writer or profiler was found to get it wrong. Details have their own tests elsewhere.
"""

import hashlib
import threading
import time

import pytest
from _gates import PATIENCE_SECONDS, BlockedSource, in_thread, until

from spdl_torch.observe import SQLiteStatsWriter, query_queue_stats, recorders
from spdl_torch.pipeline import PipelineBuilder, PipelineStopped


def test_queue_is_empty_in_the_file_when_nothing_came(tmp_path):
    """Intervals in which the source was silent and the consumer waited: nothing was there (0 %),
    and the wait is in them though it goes on.
    """
    path = tmp_path / "stats.db"
    source = BlockedSource()
    builder = PipelineBuilder().add_source(source).pipe(str, name="decode").add_sink()

    def starved(name):
        """Intervals of a queue that the waiting fills, but for the instant between two clocks."""
        rows = query_queue_stats(path, name)
        assert [row["num_items"] for row in rows] == [0] * len(rows)
        assert [row["occupancy_rate"] for row in rows] == [0.0] * len(rows)
        return [row for row in rows if row["get_wait_time"] > 0.9 * row["elapsed"]]

    with SQLiteStatsWriter(path, flush_interval=0.01) as writer:
        pipeline = builder.build(**recorders(writer.log, interval=0.01))
        get = in_thread(pipeline.get_item)
        until(lambda: all(len(starved(name)) >= 3 for name in ("src", "decode", "sink")))
        pipeline.stop()
        source.released.set()
    assert isinstance(get.exception(PATIENCE_SECONDS), PipelineStopped)


def test_task_time_is_the_ops_own_when_threads_are_few():
    """Eight calls want to run and two may: the time of a task is at least what the op itself saw,
    and two threads cannot have worked for longer than twice the time that passed.
    """
    data, lock, spans = bytes(2**20), threading.Lock(), []

    def op(number):
        begun = time.perf_counter()
        hashlib.sha256(data).digest()  # without the GIL
        span = time.perf_counter() - begun
        with lock:
            spans.append(span)
        return number

    builder = PipelineBuilder().add_source(range(60)).pipe(op, concurrency=8).add_sink()
    begun = time.perf_counter()
    with builder.build(num_threads=2).auto_stop() as pipeline:
        assert len(list(pipeline)) == 60
        passed = time.perf_counter() - begun
        (stage,) = pipeline.snapshot().stages
    assert sum(spans) <= stage.tasks.busy_time <= 2 * passed
    assert stage.tasks.ave_time == pytest.approx(stage.tasks.busy_time / 60)
