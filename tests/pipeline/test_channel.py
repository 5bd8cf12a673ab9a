"""The bounded queue: nothing lost, bounded, every wait ended by notification."""

import itertools
import signal
import sys
import threading
from contextlib import contextmanager

import pytest
from _at_call import AtCall
from _gates import PATIENCE_SECONDS, eager_switching, in_thread, result_of, until
from hypothesis import given, settings, strategies as st

from spdl_torch.engine import statistics as stats_module
from spdl_torch.engine.channel import Channel, ChannelClosed, EndOfChannel


def drain(channel, timeout=None):
    """Everything until the end."""
    items = []
    while True:
        try:
            items.append(channel.get(timeout or PATIENCE_SECONDS))
        except TimeoutError:
            assert timeout
        except EndOfChannel:
            return items


def puts_waiting(channel):
    return channel.counters().put_wait[1]


def gets_waiting(channel):
    return channel.counters().get_wait[1]


@settings(deadline=None, max_examples=60)
@given(
    capacity=st.integers(1, 9),
    producers=st.integers(1, 4),
    timeouts=st.lists(st.sampled_from([None, 1e-5]), min_size=1, max_size=4),
    in_order=st.booleans(),
    plan=st.lists(st.sampled_from(["item", "skip", "run0", "run1", "run3"]), max_size=60),
)
def test_channel_loses_nothing_with_many_threads(capacity, producers, timeouts, in_order, plan):
    """Every item once: to one who gets in the order of the numbers, or of each producer; nor does
    one who keeps timing out take an item or a wake-up with it."""
    channel, lock, waiting = Channel(capacity), threading.Lock(), [0]
    lengths = {"item": 1, "skip": 0, "run0": 0, "run1": 1, "run3": 3}
    numbers = iter(list(enumerate(plan)))

    def produce(who):
        while True:
            with lock:
                seq, what = next(numbers, (None, None))
            if seq is None:
                return
            for n in range(lengths[what]):
                if in_order:
                    channel.put_at(seq, (seq, n, who), last=what == "item")
                else:
                    channel.put((seq, n, who))
                waiting.append(len(channel))
            if in_order and what != "item":
                channel.skip(seq)

    with eager_switching():
        gets = [in_thread(drain, channel, timeout) for timeout in timeouts]
        for put in [in_thread(produce, who) for who in range(producers)]:
            result_of(put)
        channel.finish()
        got = [result_of(get) for get in gets]
    for items in got:
        assert not in_order or items == sorted(items)
        for who in range(producers):
            mine = [item for item in items if item[2] == who]
            assert mine == sorted(mine)
    expected = [(seq, n) for seq, what in enumerate(plan) for n in range(lengths[what])]
    assert sorted(item[:2] for items in got for item in items) == expected
    counters = channel.counters()
    assert counters.num_put == counters.num_got == len(expected)
    assert max(waiting) <= capacity


def test_occupancy_is_the_share_of_time_with_an_item(clock):
    """Empty for 30 of 100 ns: occupancy 0.7, over any number of laps."""
    channel = Channel(2)
    clock.advance(30)
    channel.put("a")
    clock.advance(50)
    first = channel.counters()
    channel.put("b")
    channel.get()
    clock.advance(20)
    channel.get()
    whole = channel.counters()
    assert stats_module.queue_stats(whole).occupancy_rate == pytest.approx(0.7)
    assert stats_module.queue_stats(whole.since(first)).occupancy_rate == pytest.approx(1.0)
    assert stats_module.queue_stats(first).occupancy_rate == pytest.approx(50 / 80)


@contextmanager
def nobody_in_between():
    """The other threads go on when the block is over."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(PATIENCE_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("is_shrunk", [False, True])
def test_put_that_is_woken_out_of_turn_passes_its_wake_up_on(clock, is_shrunk):
    """It has waited longer than the one whose turn it is, and nobody gets any more: as one of a run
    (``last=False``), or where a smaller burst has left it no room."""
    channel, number = Channel(2 if is_shrunk else 8), 0
    channel.allow_bursts(8)
    while len(channel) < 8:
        for _ in range(len(channel)):
            channel.get()
        while channel.has_room(number, True) or channel._may_burst():
            channel.put_at(number, 0)
            number += 1
    last, ahead = is_shrunk, 3 if is_shrunk else 1
    later = in_thread(lambda: channel.put_at(number + ahead, "later", last=last))
    until(lambda: puts_waiting(channel) == 1)
    turn = in_thread(lambda: channel.put_at(number, "turn", last=last))
    until(lambda: puts_waiting(channel) == 2)
    with nobody_in_between():
        for _ in range(8):
            channel.get()
        if is_shrunk:
            clock.advance(10**12)
            assert not channel._may_burst()
    try:
        result_of(turn)
        assert channel.get(PATIENCE_SECONDS) == "turn"
        for seq in range(number + is_shrunk, number + ahead):
            channel.skip(seq)
        result_of(later)
        assert channel.get(PATIENCE_SECONDS) == "later"
    finally:
        channel.close()


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals of threads")
@pytest.mark.parametrize("timeout", [None, 10 * PATIENCE_SECONDS])
def test_signal_on_another_thread_is_seen_by_a_get_on_the_main_thread(timeout):
    """Its handler runs there; nothing else would wake the thread."""
    channel = Channel(1)

    def raises(*_):
        raise RuntimeError("seen")

    def signals_itself():
        while not channel.counters().get_wait[1]:
            pass  # until somebody waits
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, raises)
    thread = threading.Thread(target=signals_itself)
    try:
        thread.start()
        with pytest.raises(RuntimeError, match="seen"):
            channel.get(timeout)
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


class Waiting:
    """Two threads that wait in ``work``, a get or a put of the channel."""

    def __init__(self, work, num_waiting):
        self._work = work
        self.threads = [threading.Thread(target=self._run) for _ in range(2)]
        for thread in self.threads:
            thread.start()
        until(lambda: num_waiting() == 2)

    def _run(self):
        try:
            self._work()
        except (ChannelClosed, EndOfChannel):
            pass

    def assert_end(self):
        for thread in self.threads:
            thread.join(PATIENCE_SECONDS)
        assert not any(thread.is_alive() for thread in self.threads), "it waits for ever"


def getters(channel):
    return Waiting(channel.get, lambda: gets_waiting(channel))


def putters(channel):
    return Waiting(lambda: channel.put(1), lambda: puts_waiting(channel))


def ordered_putters(channel):
    numbers = itertools.count(1)
    return Waiting(lambda: channel.put_at(next(numbers), 1), lambda: puts_waiting(channel))


def empty():
    return Channel(3)


def full():
    channel = Channel(1)
    channel.put(0)
    return channel


def full_in_order():
    channel = Channel(1)
    channel.put_at(0, 0)
    return channel


CASES = {
    "put, getters wait": (empty, getters, lambda channel: channel.put(7)),
    "put in order, getters wait": (empty, getters, lambda channel: channel.put_at(0, 7)),
    "finish, getters wait": (empty, getters, Channel.finish),
    "close, getters wait": (empty, getters, Channel.close),
    "get, putters wait": (full, putters, Channel.get),
    "get, ordered putters wait": (full_in_order, ordered_putters, Channel.get),
    "grow, putters wait": (full, putters, lambda channel: channel.grow(3)),
    "finish, putters wait": (full, putters, Channel.finish),
    "close, putters wait": (full, putters, Channel.close),
}


def cut_off(work, place):
    """Whether Ctrl-C came at that place of it."""
    try:
        with AtCall(place):
            work()
    except KeyboardInterrupt:
        return True
    return False


def is_settled(channel):
    """Whether there is nothing that a thread in the channel could do, or none is left in it."""
    if gets_waiting(channel):
        return not len(channel)
    return not puts_waiting(channel) or len(channel) >= channel.capacity


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_nobody_waits_for_what_ctrl_c_cut_off(case):
    """Wherever it comes: an item that came is taken, room is used, a channel's end is met."""
    make, wait, work = case
    for place in itertools.count(1):
        channel = make()
        waiting = wait(channel)
        came = cut_off(lambda: work(channel), place)  # noqa: B023 - called before the next one
        until(lambda: is_settled(channel))  # noqa: B023
        if not (channel.closed or channel._finished):  # an end that was cut off is one all the same
            channel.close()
        waiting.assert_end()
        if not came:
            break
    assert place > 5, "there are places where it comes"
