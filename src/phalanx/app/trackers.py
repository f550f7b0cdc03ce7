"""Send a run to experiment trackers: while it trains, by a process for each, or afterwards."""

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from phalanx.errors import DataError, PhalanxError, UsageError
from phalanx.observe.trackers.feed import INCOMPLETE_EXIT_CODE, TrackerFeed, lock_feed
from phalanx.observe.trackers.tracker import (
    TRACKER_NAMES,
    describe_error,
    describe_problem,
    make_tracker,
    set_library_defaults,
)
from phalanx.recipe.load import LoadedRecipe
from phalanx.recipe.validation_errors import suggest_nearest
from phalanx.run import Run
from phalanx.safe_files import open_for_append
from phalanx.std_streams import word_of

logger = logging.getLogger(__name__)

MAX_WAIT_AT_END_S = 30.0
"""Seconds that a command waits at its end for trackers that still send."""


def check_trackers(loaded: LoadedRecipe) -> None:
    """Raise UsageError when a tracker in the recipe lacks its package or its server's address."""
    for index, name in enumerate(loaded.recipe.trackers):
        if (problem := describe_problem(name)) is not None:
            raise UsageError(f"{loaded.location_of(f'trackers.{index}')}: {problem}")


@contextlib.contextmanager
def feed_trackers(run: Run, names: Sequence[str]) -> Iterator[None]:
    """Send a run to these trackers during the block. Nothing that fails here stops the block."""
    processes = [process for name in dict.fromkeys(names) if (process := start_tracker(run, name)) is not None]
    try:
        yield
    finally:
        for process in processes:
            process.request_end()
        deadline = time.monotonic() + MAX_WAIT_AT_END_S
        for process in processes:
            process.wait_until_ended(deadline)


class TrackerProcess:
    """The process that feeds one tracker. Its messages are logged as warnings, what its library prints is in
    RUN/logs/tracker-NAME.log."""

    def __init__(self, run: Run, name: str):
        self._run, self._name = run, name
        command = [sys.executable, "-P", "-m", "phalanx.observe.trackers.feed"]
        command += [str(run.path.absolute()), name, str(os.getpid())]
        with open(open_for_append(run.logs / f"tracker-{name}.log"), "ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C is for training, which then ends this
            )
        self._thread = threading.Thread(target=self._log_messages, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def request_end(self) -> None:
        """Have it send the rest and end."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def wait_until_ended(self, deadline: float) -> None:
        """Wait for its end, or kill it when the deadline (time.monotonic) has passed."""
        resend = f"send the rest with: phalanx report --to {self._name} {word_of(self._run.path)}"
        try:
            code = self._process.wait(max(0.1, deadline - time.monotonic()))
            if code not in (0, INCOMPLETE_EXIT_CODE):
                log = self._run.logs / f"tracker-{self._name}.log"
                logger.warning("%s: its process ended with %s, see %s; %s", self._name, code, log, resend)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            logger.warning("%s: not complete after %.0f s; %s", self._name, MAX_WAIT_AT_END_S, resend)
        self._thread.join()

    def _log_messages(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as messages:
            for line in messages:
                logger.warning("%s", line.rstrip("\n"))


def start_tracker(run: Run, name: str) -> TrackerProcess | None:
    """Start the process that feeds a tracker; None, with a warning, where it cannot be started."""
    try:
        return TrackerProcess(run, name)
    except (OSError, DataError) as error:
        logger.warning("%s: cannot be started, training continues without it: %s", name, error)
        return None


def send_run(run: Run, name: str) -> str:
    """Send what is in a run directory to a tracker. Return what was sent, for the user."""
    if name not in TRACKER_NAMES:
        known = ", ".join(TRACKER_NAMES)
        raise UsageError(f"--to {name}: expected one of {known}{suggest_nearest(name, TRACKER_NAMES)}")
    if (problem := describe_problem(name)) is not None:
        raise UsageError(f"--to {problem}")
    set_library_defaults()
    tracker = make_tracker(name)
    # what libraries print is not the answer of this command
    with lock_feed(run, name), contextlib.redirect_stdout(sys.stderr):
        feed = TrackerFeed(run, name, tracker)
        try:
            feed.send_new()
            feed.close()
        except PhalanxError:
            raise
        except Exception as error:  # noqa: BLE001 - libraries of trackers raise anything
            raise UsageError(f"{name}: cannot send: {describe_error(error)}") from None
    sent = f"{run.location} is in {name} up to step {feed.state.sent_step}: {tracker.describe_location()}"
    held = feed.rows.num_held
    return f"{sent}\n{held} steps after the last checkpoint are held back until the run resumes" if held else sent
