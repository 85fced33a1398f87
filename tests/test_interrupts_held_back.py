"""An interrupt waits for the end of what is done as a whole, whichever thread takes it, and nothing else changes."""

from __future__ import annotations

import signal
from types import FrameType

import pytest
from interrupts import interruptible_thread

from hivenb._interrupts import interrupts_blocked


def test_one_that_another_thread_takes_waits_for_the_end_of_the_block() -> None:
    before, done = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with interrupts_blocked():
            interrupt()
            done.append("all of it")
        done.append("and more")

    with interruptible_thread() as interrupt, pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_several_in_blocks_within_blocks_are_dealt_with_once_at_the_outermost_end() -> None:
    seen = []

    def handler(number: int, frame: FrameType | None) -> None:
        assert frame is not None
        seen.append(signal.Signals(number).name)

    signal.signal(signal.SIGINT, handler)
    with interruptible_thread() as interrupt:
        with interrupts_blocked():
            interrupt()
            with interrupts_blocked():
                interrupt()
            interrupt()
            assert seen == []
        assert seen == ["SIGINT"]
        interrupt()
    assert seen == ["SIGINT"] * 2


def test_one_that_comes_with_an_error_does_not_hide_it() -> None:
    def fail() -> None:
        with interrupts_blocked():
            interrupt()
            raise ValueError("the error")

    with interruptible_thread() as interrupt, pytest.raises(KeyboardInterrupt) as raised:
        fail()
    assert repr(raised.value.__context__) == "ValueError('the error')"


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL, signal.default_int_handler])
def test_who_handles_interrupts_is_as_before(handler: signal.Handlers) -> None:
    signal.signal(signal.SIGINT, handler)
    with interrupts_blocked():
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert signal.getsignal(signal.SIGINT) is handler
    with interrupts_blocked():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "somebody has set it meanwhile"
