"""States, stop, leaks, interrupts, exit, fork and garbage collection."""

import decimal
import gc
import itertools
import signal
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
import torch
from support import warm
from support.at_call import AtCall, TooLate
from support.gates import (
    PATIENCE_SECONDS,
    BlockedSource,
    CountingSource,
    Each,
    GatedOp,
    asame,
    aspread,
    in_thread,
    is_gone,
    join_spdl_threads,
    no_leak,
    pipeline_of,
    result_of,
    same,
    spdl_threads,
    spread,
    until,
)
from support.inside import lock_of, run_of

from spdl_torch.pipeline import PipelineBuilder, PipelineFailure, PipelineStopped, StatsQueue


def state_of(pipeline):
    return repr(pipeline).split("[")[1].split("]")[0]


def test_threads_begin_with_the_settings_of_the_one_that_starts_them():
    """Decimals, numpy's errors and the grad mode; what a thread then changes is its own."""

    def op(item):
        found = decimal.getcontext().prec, np.geterr()["over"], torch.is_grad_enabled()
        decimal.getcontext().prec = 41
        return found

    with decimal.localcontext() as context, np.errstate(over="raise"), torch.no_grad():
        context.prec = 40
        found = set(pipeline_of(range(2), op, concurrency=2))
        assert found <= {(prec, "raise", False) for prec in (40, 41)}
        assert context.prec == 40


def test_states_are_shown_from_new_to_closed():
    """repr shows the state and every stage; a run goes new, running, draining, closed. Asking for
    an item starts it, and nothing before; a timeout takes none."""
    source, op = BlockedSource(1), GatedOp()
    p = pipeline_of(source, op, concurrency=2, name="gated", sink=5)
    assert repr(p).splitlines() == [
        "Pipeline [new]",
        "  src(BlockedSource)",
        "  gated(concurrency=2, op=GatedOp)",
        "  sink(buffer_size=5)",
    ]
    items = p.get_iterator(timeout=0.001)
    assert (state_of(p), spdl_threads()) == ("new", [])
    for ask in (lambda: p.get_item(timeout=0.001), lambda: next(items), lambda: next(items)):
        with pytest.raises(TimeoutError, match=r"no item came within 0\.001 seconds"):
            ask()
    assert state_of(p) == "running"
    source.released.set()
    until(lambda: state_of(p) == "draining")
    op.open()
    assert list(p) == [1]
    assert next(items, None) is None
    assert state_of(p) == "closed"
    assert spdl_threads() == []


def test_stop_waits_for_a_running_op_and_not_for_the_consumer():
    """stop(timeout) gives up waiting for the op, says for whom, and can be repeated; who waits for
    an item is told at once."""
    op = GatedOp()
    p = pipeline_of(range(9), op, name="slow")
    get = in_thread(p.get_item)
    op.wait_started(1)
    until(lambda: run_of(p).outlet.counters().get_wait[1] == 1)
    with pytest.raises(TimeoutError, match=r"still running after 0.01 seconds: .*spdl-slow-0"):
        p.stop(timeout=0.01)
    with pytest.raises(PipelineStopped, match="the pipeline was stopped"):
        result_of(get)
    assert state_of(p) == "stopping"
    op.open()
    p.stop()
    assert state_of(p) == "closed"
    assert op.finished == [0]


def test_pipeline_runs_once_and_its_end_stays():
    """A second start or pass is refused, as an empty one would hide a bug; who asks for an item is
    told the end every time, also after stop()."""
    p = pipeline_of(range(3), same)
    assert p.get_item() == 0
    with pytest.raises(PipelineStopped, match=r"the pipeline is .*; it runs once"):
        p.start()
    assert list(p) == [1, 2]
    with pytest.raises(PipelineStopped, match=r"closed and runs only once. Build another"):
        iter(p)
    with pytest.raises(PipelineStopped, match="it runs once"):
        p.start()
    for _ in range(2):
        with pytest.raises(EOFError, match="delivered every item"):
            p.get_item()
        assert run_of(p).recorder.consumer.waiting_since_ns is None
        p.stop()


def test_an_iterator_tells_its_failure_once():
    """Then it has ended, so that a loop that logs errors ends, too."""
    p = pipeline_of(range(4), lambda item: 1 // item, max_failures=0)
    items = iter(p)
    with pytest.raises(PipelineFailure, match=r"1 of [1-4] tasks failed"):
        list(items)
    assert list(items) == []
    p.stop()


@pytest.mark.parametrize("closed", ["src", "same"])
def test_stop_is_no_end_of_the_data(closed):
    """For a thread that waits for an item, however long the stop takes after it has closed one
    queue, and the threads that wait there have left. It does not wait for the user's next(): the
    source's thread ends when that call returns."""
    main = threading.current_thread()

    class Queue(StatsQueue):
        def close(self):
            super().close()
            if threading.current_thread() is main and self.info.stage_name == closed:
                get.exception(PATIENCE_SECONDS)

    source = BlockedSource()
    p = pipeline_of(source, same, build={"queue_class": Queue})
    get = in_thread(p.get_item)
    until(lambda: run_of(p).outlet.counters().get_wait[1])
    assert source.blocked.wait(PATIENCE_SECONDS)
    p.stop()
    assert isinstance(get.exception(PATIENCE_SECONDS), PipelineStopped)
    assert state_of(p) == "closed"
    assert [thread.name for thread in spdl_threads()] == ["spdl-src"]
    source.released.set()
    join_spdl_threads()


def test_stop_by_an_op_does_not_wait_for_itself():
    """Ops may stop their own pipeline, several at once; the consumer sees it stopped."""
    both = threading.Barrier(2)

    def op(item):
        both.wait(PATIENCE_SECONDS)
        p.stop()

    p = pipeline_of(range(10), op, concurrency=2)
    with pytest.raises(PipelineStopped, match="was stopped"):
        p.get_item()
    p.stop()
    assert state_of(p) == "closed"
    assert spdl_threads() == []


def test_dropped_iterator_ends_the_run():
    """The iterator alone keeps the pipeline running, and no longer than it lives."""
    with no_leak():
        items = iter(pipeline_of(CountingSource(), same))
        assert [next(items), next(items)] == [0, 1]
        gc.collect()
        assert next(items) == 2
        del items
        join_spdl_threads()


@pytest.mark.parametrize("end", ["never started", "at its end", "stopped"])
def test_op_that_refers_to_its_pipeline_does_not_keep_it(end):
    """A method of the object that holds the pipeline is an ordinary op."""

    class Trainer:
        def __init__(self):
            self.pipeline = pipeline_of(range(3), self.op)

        def op(self, item):
            return item

    trainer = Trainer()
    if end == "at its end":
        assert list(trainer.pipeline) == [0, 1, 2]
    elif end == "stopped":
        with trainer.pipeline.auto_stop():
            assert trainer.pipeline.get_item() == 0
    gone = weakref.ref(trainer.pipeline)
    del trainer
    join_spdl_threads()
    gc.collect()
    assert gone() is None


def noted(references):
    """A new item, of which there is a weak reference in the list."""
    thing = set()
    references.append(weakref.ref(thing))
    return thing


async def things(source):
    for thing in source:
        yield thing
        del thing


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("op", [None, same, asame, spread, aspread, 1, Each, "executor"])
def test_item_is_freed_while_the_threads_wait_for_the_next_one(op, is_async):
    """No thread of the run keeps an item that the consumer has let go."""
    references, source = [], BlockedSource()
    source.items = (noted(references) for _ in range(1))
    builder = PipelineBuilder().add_source(things(source) if is_async else source)
    with ThreadPoolExecutor(1) as pool:
        if op == "executor":
            builder.pipe(spread, executor=pool)
        elif op in (1, Each):
            builder.aggregate(1 if op == 1 else Each())
        elif op is not None:
            builder.pipe(op)
        with builder.add_sink().build().auto_stop() as p:
            p.get_item(timeout=PATIENCE_SECONDS)
            assert source.blocked.wait(PATIENCE_SECONDS)
            until(lambda: is_gone(references[0]))
            source.released.set()


@pytest.mark.parametrize("is_async", [False, True])
def test_outputs_of_a_generator_are_freed_one_by_one(is_async):
    """Those that were taken are gone while it makes the next one, or while that waits for room."""
    references, go_on = [], threading.Event()

    def several(item):
        for number in range(9):
            if number == 1:
                assert go_on.wait(PATIENCE_SECONDS)
            yield noted(references)

    async def aseveral(item):
        for thing in several(item):
            yield thing
            del thing

    op = aseveral if is_async else several
    with pipeline_of([0], op, sink=1, buffer_size=1).auto_stop() as p:
        p.get_item(timeout=PATIENCE_SECONDS)
        try:
            until(lambda: is_gone(references[0]))
        finally:
            go_on.set()
        p.get_item(timeout=PATIENCE_SECONDS)
        until(lambda: run_of(p).outlet.counters().put_wait[1] == 1)
        until(lambda: is_gone(references[1]))


def test_last_reference_dropped_inside_an_op_of_its_own():
    """A pipeline may be finalized on one of its own worker threads."""
    dropped = threading.Event()
    holder = []

    def op(item):
        if item == 5:
            holder.clear()
            dropped.set()
        return item

    with no_leak():
        holder.append(pipeline_of(CountingSource(), op, concurrency=2, sink=10))
        holder[0].start()
        assert dropped.wait(PATIENCE_SECONDS)
        join_spdl_threads()


@pytest.mark.parametrize(
    "part",
    [
        *(lambda run: run, lambda run: run.task_limit, lambda run: run.queues[0]),
        *(lambda run: run.queues[1], lambda run: run.outlet),
    ],
)
def test_finalizer_on_a_thread_that_holds_a_lock_of_the_engine(part):
    """request_stop(), which a finalizer calls, is safe under any lock its thread may hold."""
    p = pipeline_of(CountingSource(), same, concurrency=4, build={"num_threads": 2})
    p.get_item()

    def finalize():
        with lock_of(part(run_of(p))):
            run_of(p).request_stop()

    result_of(in_thread(finalize))
    p.stop()
    assert spdl_threads() == []


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)
@pytest.mark.usefixtures("_too_late")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("op", [same, asame])
def test_pipeline_whose_start_a_signal_cut_off_can_be_stopped(op, number):
    """Wherever it came: what its handler raises, an Exception as well as Ctrl-C, is no failure of
    the pipeline, and no thread is left."""
    for place in itertools.count(1, 1 if number == signal.SIGINT else 3):
        pipeline, came = pipeline_of(range(5), op), True
        with suppress(KeyboardInterrupt, TooLate), AtCall(place, number) as at_call:
            pipeline.start()
            came = False
        assert pipeline.failure is None, at_call.where
        pipeline.stop(PATIENCE_SECONDS)
        if not came:
            assert at_call.where is None, f"lost at {at_call.where}"
            break
    assert place > 20, "there are places where it comes"
    join_spdl_threads()


CHILD = """
import os, sys, threading
from spdl_torch.pipeline import PipelineBuilder, PipelineStopped
from spdl_torch.engine import threads as thread_group
assert thread_group._EXIT_JOIN_SECONDS == 5.0
thread_group._EXIT_JOIN_SECONDS = {grace}  # a blocked op is left after so long
started = threading.Event()
def endless():
    n = 0
    while True:
        yield n
        n += 1
def blocked(item):
    started.set()
    threading.Event().wait()
def same(item):
    return item
async def asame(item):
    return item
async def ablocked(item):
    import asyncio
    started.set()
    await asyncio.get_running_loop().create_future()
def blocked_source():
    yield 0
    blocked(0)
def pipeline(op, source=None, **options):
    builder = PipelineBuilder().add_source(source or endless()).pipe(op, concurrency=2)
    return builder.pipe(same).add_sink().build(**options)
"""


@pytest.mark.parametrize(
    "body",
    {
        "blocked op": "p = pipeline(blocked); p.start(); started.wait()",
        "blocked source, stopped": (
            "p = pipeline(same, blocked_source()); p.get_item(); started.wait(); p.stop()"
        ),
        "blocked coroutine": "p = pipeline(ablocked); p.start(); started.wait()",
        "in the middle, async": "it = iter(pipeline(asame)); next(it); next(it)",
        "consumer in a daemon thread": (
            "def consume():\n    try: list(p)\n    except PipelineStopped: pass\n"
            "p = pipeline(blocked)\n"
            "threading.Thread(target=consume, daemon=True).start(); started.wait()"
        ),
        "sys.exit in the loop": "for n in pipeline(same):\n    if n == 5: sys.exit(0)",
    }.items(),
    ids=lambda pair: pair[0],
)
def test_interpreter_exits_whatever_the_pipeline_does(body):
    """Exit code 0, nothing on stderr, no hang."""
    program = CHILD.format(grace=0.2) + body[1] + "\nprint('end of main')\n"
    done = warm.run(["-c", program], timeout=PATIENCE_SECONDS, ends_whole=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ("" if "in the loop" in body[0] else "end of main\n")


@pytest.mark.parametrize(
    "body",
    {
        "waiting": "p = pipeline(ablocked)\nprint('ready', flush=True)\nfor _ in p: pass",
        "busy, auto_stop": (
            "with pipeline(same).auto_stop() as p:\n"
            "    for n in p:\n        if n == 9: print('ready', flush=True)"
        ),
        "blocked op": "p = pipeline(blocked)\nprint('ready', flush=True)\nfor _ in p: pass",
    }.items(),
    ids=lambda pair: pair[0],
)
def test_ctrl_c_ends_the_process(body):
    """SIGINT while the loop runs or waits: KeyboardInterrupt reaches the user, nothing hangs."""
    child = warm.start(["-c", CHILD.format(grace=0.2) + body[1]], ends_whole=True)
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=PATIENCE_SECONDS)
    assert child.returncode == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert err.count("Traceback") == 1


def test_fork_in_the_middle_of_a_run():
    """The child has none of the threads, nor what was recorded of them: its get says so, it can
    build a pipeline of its own, and it exits at once; with the whole package imported."""
    body = """
import warnings
warnings.simplefilter("ignore")  # 3.12+ warns about fork in a threaded process
p = pipeline(same)
first = p.get_item()
pid = os.fork()
if pid == 0:
    try:
        p.get_item()
    except PipelineStopped as error:
        print("child:", error)
    p.stop()
    repr(p)
    del p
    from spdl_torch.engine.recorder import live_recorders
    assert live_recorders() == []
    print(sorted(pipeline(same, range(5))))
    sys.exit(7)
print("exit", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print([p.get_item() - first for _ in range(2)])
p.stop()
"""
    program = ["-c", CHILD.format(grace=5.0) + body]
    done = warm.run(program, timeout=PATIENCE_SECONDS, ends_whole=True)
    assert (done.returncode, done.stderr) == (0, "")
    first, *lines = done.stdout.splitlines()
    assert first.startswith("child: this process is a fork")
    assert lines == ["[0, 1, 2, 3, 4]", "exit 7", "[1, 2]"]
