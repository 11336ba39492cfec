"""Ctrl-C waits where it is held, is never lost, and waits only once."""

from __future__ import annotations

import signal
import threading

import pytest

from paclm.engine.interrupts import HeldInterrupt


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_the_first_ctrl_c_waits_until_it_is_released() -> None:
    with HeldInterrupt() as interrupt:
        interrupt.release()  # nothing came yet
        press_ctrl_c()
        assert interrupt.came
        with pytest.raises(KeyboardInterrupt):
            interrupt.release()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_that_nobody_released_is_raised_at_the_end() -> None:
    with pytest.raises(KeyboardInterrupt), HeldInterrupt():
        press_ctrl_c()


def test_the_second_ctrl_c_does_not_wait() -> None:
    with HeldInterrupt() as interrupt:
        press_ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()
        interrupt.came = False


def test_another_error_is_not_hidden_by_a_ctrl_c_that_came_before_it() -> None:
    def fail() -> None:
        with HeldInterrupt():
            press_ctrl_c()
            raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        fail()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_program_with_a_handler_of_its_own_keeps_it() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        with HeldInterrupt() as interrupt:
            press_ctrl_c()
        assert (heard, interrupt.came) == ([signal.SIGINT], False)
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_nothing_is_held() -> None:
    done: list[bool] = []

    def work() -> None:
        with HeldInterrupt() as interrupt:
            done.append(interrupt.came)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [False]
