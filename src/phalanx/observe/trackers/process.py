"""The process that feeds one tracker while a run trains: `python -m phalanx.observe.trackers.process RUN NAME PARENT`.

It ends when standard input is closed, after what is left was sent. Each line that it writes to standard output is a
message for the user; everything that the tracker's library prints goes to standard error.
"""

import os
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import TextIO

from phalanx.formatting import format_plural
from phalanx.observe.trackers.feed import TrackerFeed, lock_feed
from phalanx.observe.trackers.libraries import make_tracker
from phalanx.observe.trackers.tracker import describe_error, set_library_defaults
from phalanx.process_lifetime import die_with_parent, prefer_oom_kill
from phalanx.run import Run
from phalanx.std_streams import word_of

POLL_INTERVAL_S = 1.0
MAX_RETRY_INTERVAL_S = 60.0
LOCK_TIMEOUT_S = 30.0
"""Seconds that the process of an agent that was killed may take to end."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
INCOMPLETE_EXIT_CODE = 3
"""Exit code of a process that could not send everything and has said why. Python's own for an exception is 1."""


class FeedLoop:
    """Sends what is new again and again, and reports what fails once until it works again."""

    def __init__(self, run: Run, name: str, messages: TextIO):
        self._run, self._name, self._messages = run, name, messages
        self._feed = TrackerFeed(run, name, make_tracker(name))
        self._has_failed = False
        self.interval_s = POLL_INTERVAL_S
        """Seconds until the next try."""

    def send(self) -> bool:
        """Send what is new; return whether that worked."""
        try:
            self._feed.send_new()
        except Exception as error:  # noqa: BLE001 - libraries of trackers raise anything; training continues without it
            traceback.print_exc()
            if not self._has_failed:
                self._report(f"cannot send, training continues without it: {describe_error(error)}")
            self._has_failed, self.interval_s = True, min(2 * self.interval_s, MAX_RETRY_INTERVAL_S)
            return False
        if self._has_failed:
            self._report("works again")
        self._has_failed, self.interval_s = False, POLL_INTERVAL_S
        return True

    def finish(self) -> bool:
        """Send the rest and close; report what is not sent."""
        is_sent = self.send()
        try:
            self._feed.close()
        except Exception as error:  # noqa: BLE001 - as above
            traceback.print_exc()
            self._report(f"was not closed properly: {describe_error(error)}")
            is_sent = False
        if not is_sent:
            resend = f"phalanx report --to {self._name} {word_of(self._run.path)}"
            self._report(f"is not complete; send the rest with: {resend}")
        elif held := self._feed.rows.num_held:
            steps = format_plural(held, "step")
            self._report(f"{steps} after the last checkpoint held back: the run repeats them when it resumes")
        return is_sent

    def _report(self, text: str) -> None:
        print(f"{self._name}: {text}", file=self._messages, flush=True)


def main(run_path: str, name: str, parent: int) -> int:
    """Feed a tracker until standard input is closed."""
    die_with_parent(parent)
    for number in STOP_SIGNALS:  # a scheduler sends them to all processes of a job; the agent says when this one ends
        signal.signal(number, signal.SIG_IGN)
    prefer_oom_kill()
    os.nice(19)
    set_library_defaults()
    messages = open(os.dup(1), "w")  # noqa: SIM115 - lives as long as the process
    os.dup2(2, 1)
    run = Run(Path(run_path))
    with lock_feed(run, name, LOCK_TIMEOUT_S):
        loop = FeedLoop(run, name, messages)
        while not select.select([sys.stdin], [], [], loop.interval_s)[0]:
            loop.send()
        return 0 if loop.finish() else INCOMPLETE_EXIT_CODE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
