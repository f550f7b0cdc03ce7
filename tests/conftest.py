"""Fixtures that several test folders share. Nothing here starts a process unless a test asks for it."""

import signal
from collections.abc import Iterator

import pytest

from lab import Lab

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # As a shell's `&` leaves it. Programs that tests start would inherit it, and Ctrl-C could not be tested.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One process with torch loaded, in which all runs of the session are trained."""
    with Lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab
