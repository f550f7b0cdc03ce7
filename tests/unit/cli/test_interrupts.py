"""An interrupt that was raised where nobody can catch it arrives all the same."""

import signal
import sys
import time

import pytest

from phalanx.cli.interrupts import insistent


class Swallows:
    """What a finaliser raises is ignored, as it is in a callback from compiled code."""

    def __init__(self, error: type[BaseException] | None = None):
        self.error = error

    def __del__(self) -> None:
        if self.error is not None:
            raise self.error
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_that_was_ignored_comes_again() -> None:
    with insistent() as interrupted:
        Swallows()
        assert interrupted.lost
        with pytest.raises(KeyboardInterrupt):
            time.sleep(60)  # until it comes


def test_ignored_again_it_comes_a_third_time() -> None:
    with insistent():
        Swallows(KeyboardInterrupt)
        Swallows(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            time.sleep(60)


def test_other_errors_are_told_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: told.append(what.exc_type))
    with insistent() as interrupted:
        Swallows(ValueError)
    assert told == [ValueError]
    assert not interrupted.lost


def test_afterwards_all_is_as_before() -> None:
    hook, handler = sys.unraisablehook, signal.getsignal(signal.SIGALRM)
    with insistent():
        Swallows(KeyboardInterrupt)
    assert sys.unraisablehook is hook
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0
