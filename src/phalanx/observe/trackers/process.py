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
from phalanx.observe.trackers.names import make_tracker, set_library_defaults
from phalanx.observe.trackers.refusals import describe_refusal, first_line
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
    """Sends what is new again and again, and reports what fails once until it works again. After a refusal it
    tries once more, at the end."""

    def __init__(self, run: Run, name: str, messages: TextIO):
        self._run, self._name, self._messages = run, name, messages
        self._feed = TrackerFeed(run, name, make_tracker(name))
        self._has_failed = False
        self.interval_s: float | None = POLL_INTERVAL_S
        """Seconds until the next try; None: at the end."""

    def send(self) -> bool:
        """Send what is new; return whether that worked."""
        try:
            self._feed.send_new()
        except Exception as error:  # noqa: BLE001 - libraries of trackers raise anything; training continues without it
            traceback.print_exc()
            refusal = describe_refusal(error)
            if refusal is not None and self.interval_s is not None:
                self._report(f"{refusal.removeprefix(f'{self._name}: ')}; training continues without it")
            elif not self._has_failed:
                self._report(f"cannot be reached, training continues without it: {first_line(error)}")
            self._has_failed, waited_s = True, self.interval_s or MAX_RETRY_INTERVAL_S
            self.interval_s = None if refusal is not None else min(2 * waited_s, MAX_RETRY_INTERVAL_S)
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
            self._report(f"was not closed properly: {first_line(error)}")
            is_sent = False
        if not is_sent:
            self._report(f"is not complete; send the rest with: {self.resend_command}")
        elif held := self._feed.rows.num_held:
            steps = format_plural(held, "step")
            self._report(f"{steps} after the last checkpoint held back: the run repeats them when it resumes")
        return is_sent

    @property
    def resend_command(self) -> str:
        """What completes the tracker later."""
        return f"phalanx report --to {self._name} {word_of(self._run.path)}"

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
