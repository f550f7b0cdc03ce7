"""The thread that polls slow services."""

import threading

import pytest

from phalanx_fleet.telemetry import service_reading
from phalanx_fleet.telemetry.service_reading import PollingThread


def test_it_polls_until_it_is_stopped() -> None:
    has_polled_twice, times = threading.Event(), list[int]()

    def poll() -> None:
        times.append(1)
        if len(times) == 2:
            has_polled_twice.set()

    thread = PollingThread(poll, 0.001)
    assert has_polled_twice.wait(30)
    thread.stop()
    num_polls = len(times)
    assert not thread._thread.is_alive()
    assert len(times) == num_polls


def test_a_service_that_never_answers_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(service_reading, "STOP_TIMEOUT_S", 0.0)
    has_begun, answers = threading.Event(), threading.Event()

    def poll() -> None:
        has_begun.set()
        answers.wait(30)

    thread = PollingThread(poll, 0.001)
    assert has_begun.wait(30)
    thread.stop()
    assert "did not answer" in caplog.text
    answers.set()
    thread._thread.join(30)
    assert not thread._thread.is_alive()


def test_a_slow_call_is_followed_by_a_pause() -> None:
    """The clock says that each call takes four intervals."""
    now, waits = [0.0], list[float]()

    class RecordingEvent(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return len(waits) == 4

    def poll() -> None:
        now[0] += 40.0

    thread = PollingThread.__new__(PollingThread)
    thread._poll, thread._interval_s, thread._clock = poll, 10.0, lambda: now[0]
    thread._stop_requested = RecordingEvent()
    thread._run()
    assert waits == [10.0, 2.5, 2.5, 2.5]
