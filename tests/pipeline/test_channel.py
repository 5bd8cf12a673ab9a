"""The bounded queue: nothing lost, bounded, every wait ended by notification."""

import itertools
import signal
import threading
from contextlib import suppress

import pytest
from hypothesis import given, settings, strategies as st
from support.at_call import AtCall, TooLate
from support.gates import PATIENCE_SECONDS, in_thread, result_of, switching, until

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


def num_waiting(channel):
    """In a get, and in a put."""
    counters = channel.counters()
    return counters.get_wait[1], counters.put_wait[1]


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

    with switching():
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
    """Empty for 30 of 100 ns: 70 ns are the time with one, over any number of laps."""
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
    for counters, empty, elapsed in (
        (first, 30, 80),
        (whole, 30, 100),
        (whole.since(first), 0, 20),
    ):
        assert (counters.empty_ns, counters.elapsed_ns) == (empty, elapsed)


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
    until(lambda: num_waiting(channel) == (0, 1))
    turn = in_thread(lambda: channel.put_at(number, "turn", last=last))
    until(lambda: num_waiting(channel) == (0, 2))
    with switching(PATIENCE_SECONDS):  # the others go on when the block is over
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
@pytest.mark.usefixtures("_too_late")
@pytest.mark.parametrize("timeout", [None, 10 * PATIENCE_SECONDS])
def test_signal_on_another_thread_is_seen_by_a_get_on_the_main_thread(timeout):
    """Its handler runs there; nothing else would wake the thread."""
    channel = Channel(1)

    def signals_itself():
        while not channel.counters().get_wait[1]:
            pass  # until somebody waits
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    signalled = in_thread(signals_itself)
    with pytest.raises(TooLate):
        channel.get(timeout)
    result_of(signalled)


def get(channel, number):
    """Wait for an item."""
    channel.get()


@pytest.mark.parametrize(
    ("wait", "work"),
    [
        (get, lambda channel: channel.put(7)),
        (get, lambda channel: channel.put_at(0, 7)),
        *((wait, work) for wait in (get, Channel.put) for work in (Channel.finish, Channel.close)),
        *((Channel.put, Channel.get), (lambda channel, n: channel.put_at(n, n), Channel.get)),
        (Channel.put, lambda channel: channel.grow(3)),
    ],
)
def test_close_ends_waits_for_what_ctrl_c_cut_off(wait, work):
    """Wherever it comes, in ``close()`` too: of two threads that wait for an item, or for room."""
    for place in itertools.count(1):
        channel, came = Channel(1), True
        if wait is not get:
            wait(channel, 0)
        waiting = [in_thread(wait, channel, number) for number in (1, 2)]
        until(lambda: sum(num_waiting(channel)) == 2)  # noqa: B023 - called before the next one
        with suppress(KeyboardInterrupt), AtCall(place):
            work(channel)
            came = False
        channel.close()
        ends = {type(each.exception(PATIENCE_SECONDS)) for each in waiting}
        assert ends <= {type(None), ChannelClosed, EndOfChannel}
        if not came:
            break
    assert place > 5, "there are places where it comes"
