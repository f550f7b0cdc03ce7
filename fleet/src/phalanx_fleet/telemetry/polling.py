"""Call a function once, or again and again, in a thread of its own."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
"""Seconds to wait for a call that has begun: a service may never answer."""


ValueT = TypeVar("ValueT")


def start_call(function: Callable[[], ValueT], name: str) -> "Future[ValueT]":
    """Call a function in a thread that ends with the process. `result` of the future raises what it raised."""
    future: Future[ValueT] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class PollingThread:
    """Calls `poll` each `interval_s` seconds until `stop`. A call that takes longer delays the next one; a quarter of
    the interval is always left between two."""

    def __init__(self, poll: Callable[[], None], interval_s: float, clock: Callable[[], float] = time.monotonic):
        self._poll, self._interval_s, self._clock = poll, interval_s, clock
        self._stop_requested = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry-poll", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop calling. A call that does not return in time is left behind."""
        self._stop_requested.set()
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.info("telemetry: a service did not answer for %g s", STOP_TIMEOUT_S)

    def _run(self) -> None:
        due = self._clock() + self._interval_s
        while not self._stop_requested.wait(max(self._interval_s / 4, due - self._clock())):
            due = self._clock() + self._interval_s
            try:
                self._poll()
            except Exception:  # the next call comes nevertheless: what polls must not end silently
                logger.exception("telemetry: a poll has failed")
