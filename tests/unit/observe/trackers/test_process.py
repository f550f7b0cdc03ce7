"""What the process that feeds a tracker says when the tracker fails."""

import io
from pathlib import Path

import pytest

from fake_tracker import FakeHoldingTracker, FakeServer, GrowingRun
from phalanx.observe.trackers import feed
from phalanx.observe.trackers.feed import MAX_RETRY_INTERVAL_S, POLL_INTERVAL_S, FeedLoop


@pytest.fixture
def growing(tmp_path: Path) -> GrowingRun:
    return GrowingRun(tmp_path / "run")


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def messages() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def loop(growing: GrowingRun, server: FakeServer, messages: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> FeedLoop:
    monkeypatch.setattr(feed, "make_tracker", lambda name: FakeHoldingTracker(server))
    return FeedLoop(growing.run, "mlflow", messages)


def test_a_tracker_that_is_down_is_reported_once_and_retried_more_rarely_until_it_works(
    loop: FeedLoop, server: FakeServer, messages: io.StringIO
) -> None:
    server.is_down = True
    intervals = []
    for _ in range(8):
        assert not loop.send()
        intervals.append(loop.interval_s)
    assert intervals == sorted(intervals)
    assert intervals[-1] == MAX_RETRY_INTERVAL_S
    server.is_down = False
    assert loop.send()
    assert loop.interval_s == POLL_INTERVAL_S
    assert messages.getvalue().splitlines() == [
        "mlflow: cannot send, training continues without it: ConnectionError: connection refused",
        "mlflow: works again",
    ]


def test_what_is_missing_at_the_end_is_said_with_the_command_that_sends_it(
    loop: FeedLoop, server: FakeServer, growing: GrowingRun, messages: io.StringIO
) -> None:
    server.is_down = True
    assert not loop.finish()
    command = f"phalanx report --to mlflow {growing.run.path}"
    assert messages.getvalue().endswith(f"mlflow: is not complete; send the rest with: {command}\n")


def test_steps_that_are_held_at_the_end_are_counted(loop: FeedLoop, growing: GrowingRun, messages: io.StringIO) -> None:
    growing.start().train(1, 5).save(3).end(5, "interrupted")
    assert loop.finish()
    assert messages.getvalue() == (
        "mlflow: 2 steps after the last checkpoint held back: the run repeats them when it resumes\n"
    )
