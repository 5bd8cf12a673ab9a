"""spdl_torch.spdl.io.utils: your own slices and curves in a trace; FFmpeg's settings."""

import gc
import os
import threading
from contextlib import suppress

import av
import pytest
from hypothesis import given, settings, strategies as st
from support.trace_check import check_trace, content_of
from support.videos import KINDS, write_video

from spdl_torch.errors import DecodeError
from spdl_torch.observe.trace.chrome_trace import Count, Program, Span, chrome_trace
from spdl_torch.pipeline import PipelineBuilder
from spdl_torch.spdl.io import load_video, utils


@pytest.fixture(scope="module", autouse=True)
def no_loaders_of_other_files():
    """A trace has the rows of every loader that lives; conftest keeps garbage of other files."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def events_of(path):
    return content_of(path)["traceEvents"]


def rows_of(events):
    """Names of the rows that a slice of each name is on, with the name of the process."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    found = {}
    for event in events:
        if event["ph"] == "X":
            place = processes[event["pid"]], names[event["pid"], event["tid"]]
            found.setdefault(event["name"], set()).add(place)
    return found


def run(op, items):
    """A pipeline of one stage, and what a loop does with its items."""
    pipeline = PipelineBuilder().add_source(range(items)).pipe(op, name="op").add_sink().build()
    with pipeline.auto_stop():
        for _ in pipeline:
            with utils.trace_event("in the loop"):
                gc.get_count()


def test_trace_event_is_on_a_row_of_its_thread(tmp_path):
    """Inside of an op, of a step, around everything, and on a thread that nobody knows, below the
    pipelines; the file may be open, and is closed."""

    def op(item):
        with utils.trace_event("outer"), utils.trace_event("inner"):
            return item

    def elsewhere():
        with utils.trace_event("elsewhere"):
            pass

    path = tmp_path / "trace.pftrace.0"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    with utils.tracing(descriptor, buffer_size=1024), utils.trace_event("everything"):
        run(op, 3)
        thread = threading.Thread(target=elsewhere, name="helper")
        thread.start()
        thread.join()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.close(descriptor)  # as SPDL's does
    check_trace(path)
    events = events_of(path)
    rows, (op,) = rows_of(events), {name for _, name in rows_of(events)["outer"]}
    assert op.startswith("spdl-op")
    for name, thread in (
        *(("outer", op), ("inner", op), ("in the loop", "MainThread")),
        *(("everything", "MainThread"), ("elsewhere", "helper")),
    ):
        assert rows[name] == {("Program · rank 0", thread)}
    assert rows["Training Step"] == {("Data pipeline · rank 0", "training")}
    assert sum(event["name"] == "outer" for event in events) == 3


def test_trace_without_a_pipeline_has_what_the_program_added_meanwhile(tmp_path):
    """Slices, also of a block that raised, and curves; none before, after and where it is off."""
    path = tmp_path / "run.json"
    with utils.tracing(tmp_path / "off.json", enable=False), utils.trace_event("off"):
        pass
    utils.trace_counter(1, 1)
    run = utils.tracing(path, process_name="my program")
    with utils.trace_event("began before"), run:
        with pytest.raises(KeyError, match="x"), utils.trace_event("fails"):
            raise KeyError("x")
        for value in (2.5, 3):
            utils.trace_counter(0, value)
    with utils.trace_event("after"):
        pass
    check_trace(path)
    assert [each.name for each in tmp_path.iterdir()] == ["run.json"]
    events = events_of(path)
    assert rows_of(events) == {"fails": {("my program · rank 0", "MainThread")}}
    curves = [(e["name"], e["args"]["value"]) for e in events if e["ph"] == "C"]
    assert curves == [("counter 0", 2.5), ("counter 0", 3)]


@st.composite
def programs(draw):
    """Spans of a few threads that lie anyhow, and values of a counter."""
    times = st.integers(0, 100).map(lambda ms: 10**9 + ms * 1_000_000)
    spans = []
    for number in range(draw(st.integers(1, 12))):
        start, end = sorted((draw(times), draw(times)))
        thread = draw(st.integers(0, 2))
        spans.append(Span(f"span {number}", f"thread {thread}", thread, start, end, 0))
    counts = [Count("counter 0", draw(times), v) for v in range(draw(st.integers(0, 3)))]
    return Program(None, tuple(spans), tuple(counts))


@settings(max_examples=60)
@given(program=programs(), most=st.integers(1, 20))
def test_any_spans_can_be_shown(program, most):
    """Each is there once, however they overlap; of too many, the latest."""
    summary = check_trace(chrome_trace((), program, rank=0))
    assert (summary.num_slices, summary.num_left_out) == (len(program.spans), 0)
    trace = chrome_trace((), program, rank=0, max_events=most)
    summary = check_trace(trace)
    kept = sum(event["ph"] in "XC" for event in trace["traceEvents"])
    assert kept <= most
    assert kept + summary.num_left_out == len(program)


def test_ffmpeg_prints_at_the_level_that_was_set(capfd):
    """On standard error, and nothing at first."""
    av.logging.set_level(None)  # PyAV's own default; torchvision 0.24 asks for errors
    video, said = bytearray(write_video(KINDS["b-frames"])), []
    middle = len(video) // 2
    video[middle : middle + 400] = bytes(400)
    for level in (None, 16, -8):
        if level is not None:
            utils.set_ffmpeg_log_level(level)
        assert utils.get_ffmpeg_log_level() == (-8 if level is None else level)
        with suppress(DecodeError):
            load_video(bytes(video))
        said.append(capfd.readouterr())
    at_first, errors, quiet = said
    assert [*at_first, *quiet, errors.out] == [""] * 5
    assert "h264" in errors.err


def test_build_options_are_reported():
    """As booleans and names, without a device."""
    assert utils.built_with_nvcodec() is False
    assert {utils.built_with_cuda(), utils.built_with_nvjpeg()} <= {True, False}
    filters, versions = utils.get_ffmpeg_filters(), utils.get_ffmpeg_versions()
    assert filters == sorted(filters)
    assert {"scale", "fps", "format"} <= set(filters)
    assert "libavcodec" in versions
    assert all(len(version) == 3 for version in versions.values())
    assert utils.trace_gc() is None
