"""Ctrl-C inside a channel's methods: whoever waits there goes on, or ends with the channel."""

import itertools
import threading

import pytest
from _at_call import AtCall
from _gates import PATIENCE_SECONDS, until
from test_channel import drain, gets_waiting, puts_waiting

from spdl_torch.engine.channel import Channel, ChannelClosed, EndOfChannel


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


def test_channel_goes_on_after_a_get_that_ctrl_c_cut_off():
    """Those that waited to put are not forgotten: all items come but the one that was cut off."""
    for place in itertools.count(1):
        channel = full()
        waiting = putters(channel)
        came = cut_off(channel.get, place)
        rest = [channel.get(PATIENCE_SECONDS) for _ in range(3 - channel.num_got)]
        assert rest in ([0, 1, 1], [1, 1])
        channel.finish()
        assert drain(channel) == []
        waiting.assert_end()
        if not came:
            break
    assert place > 5, "there are places where it comes"
