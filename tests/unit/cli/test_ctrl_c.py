"""An interrupt that was raised where nobody can catch it arrives all the same."""

import signal
import sys
import time
from pathlib import Path

import pytest

from phalanx.cli.ctrl_c import import_torch, reraise_lost_interrupts


class Swallows:
    """What a finaliser raises is ignored, as it is in a callback from compiled code."""

    def __init__(self, error: type[BaseException] | None = None):
        self.error = error

    def __del__(self) -> None:
        if self.error is not None:
            raise self.error
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_that_was_ignored_comes_again() -> None:
    with reraise_lost_interrupts() as interrupted:
        Swallows()
        assert interrupted.was_lost
        with pytest.raises(KeyboardInterrupt):
            time.sleep(60)  # until it comes


def test_ignored_again_it_comes_a_third_time() -> None:
    with reraise_lost_interrupts():
        Swallows(KeyboardInterrupt)
        Swallows(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            time.sleep(60)


def test_an_interrupt_that_the_import_of_torch_catches_is_raised_when_it_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept BaseException:\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        import_torch()
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.delitem(sys.modules, "torch")


def test_other_errors_are_told_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: told.append(what.exc_type))
    with reraise_lost_interrupts() as interrupted:
        Swallows(ValueError)
    assert told == [ValueError]
    assert not interrupted.was_lost


def test_afterwards_all_is_as_before() -> None:
    hook, handler = sys.unraisablehook, signal.getsignal(signal.SIGALRM)
    with reraise_lost_interrupts():
        Swallows(KeyboardInterrupt)
    assert sys.unraisablehook is hook
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0
