"""Signal handlers that wait for the end of a block: each runs once, afterwards, whoever forks."""

import os
import signal

import pytest
from _forks import found_in_fork

from spdl_torch.loader.backends.processes.signals import handlers_deferred

pytestmark = pytest.mark.skipif(os.name != "posix", reason="POSIX signals")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture
def heard():
    """The signals that the program's handlers heard."""
    heard = []
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: heard.append(number))
    yield heard
    for number, handler in before.items():
        signal.signal(number, handler)


def handlers():
    return [signal.getsignal(number) for number in signal.valid_signals()]


def test_handlers_run_after_the_block(heard):
    """Each once, however often its signal came, and after the outer one of two blocks; they are in
    their places again, and later blocks defer as the first one did."""
    before = handlers()
    for _ in range(2):
        with handlers_deferred():
            with handlers_deferred():
                for number in (*SIGNALS, *SIGNALS):
                    os.kill(os.getpid(), number)
            assert heard == []
        assert sorted(heard) == sorted(SIGNALS)
        assert handlers() == before
        heard.clear()


@pytest.mark.parametrize("error", [None, ZeroDivisionError()])
def test_ctrl_c_is_raised_after_the_block(error):
    """By Python's own handler, and what the block was to do is done."""
    before, done = handlers(), []

    def interrupted():
        with handlers_deferred():
            signal.raise_signal(signal.SIGINT)
            done.append(True)
            if error is not None:
                raise error

    with pytest.raises(KeyboardInterrupt, match=r"^$") as info:
        interrupted()
    assert info.value.__context__ is error
    assert done == [True]
    assert handlers() == before


def test_handler_that_raises_while_they_are_put_back_loses_none(heard, monkeypatch):
    """Those that are not in their places yet are called all the same."""
    put_back = signal.signal

    def interrupted(number, handler):
        if number == SIGNALS[-1] and not isinstance(handler, type(signal.getsignal(number))):
            raise KeyboardInterrupt("while putting back")
        return put_back(number, handler)

    with pytest.raises(KeyboardInterrupt, match="while putting back"), handlers_deferred():
        monkeypatch.setattr(signal, "signal", interrupted)
    monkeypatch.undo()
    for number in SIGNALS:
        os.kill(os.getpid(), number)
    assert heard == list(SIGNALS)


def test_process_that_is_forked_in_the_block_has_the_handlers(heard):
    """At once, and the parent has them afterwards."""
    before = handlers()

    def child():
        is_same = handlers() == before
        os.kill(os.getpid(), signal.SIGUSR1)
        return is_same, list(map(int, heard))

    with handlers_deferred():
        assert found_in_fork(child) == (True, [signal.SIGUSR1])
    assert handlers() == before
