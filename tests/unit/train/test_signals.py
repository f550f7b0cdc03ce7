"""The wish to stop: signals set it, nothing stops by itself."""

import signal
from collections.abc import Iterator

import pytest

from phalanx.train.train_context import StopRequest

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@pytest.fixture
def request_to_stop() -> Iterator[StopRequest]:
    """A request that is installed for one test."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    request = StopRequest()
    request.install_handlers()
    yield request
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_sets_it_and_interrupts_nothing(request_to_stop: StopRequest, number: signal.Signals) -> None:
    signal.raise_signal(number)
    assert request_to_stop.requested


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_was_held_back_counts_once_it_is_installed(
    request_to_stop: StopRequest, number: signal.Signals
) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    signal.raise_signal(number)
    assert not request_to_stop.requested
    request_to_stop.install_handlers()
    assert request_to_stop.requested
