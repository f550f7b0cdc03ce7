"""Ending all that lives below a process, in a process of its own."""

import subprocess
import sys

PROGRAM = """
import os, signal, subprocess, sys, time
import psutil
from phalanx.process_lifetime import become_subreaper
from phalanx.jobs.signal_queue import kill_descendants

become_subreaper()
read, write = os.pipe()
if os.fork() == 0:
    # One that is gone a moment after it was seen: each forks the next, and ends. It ends by itself after 20 s.
    until = time.monotonic() + 20
    while time.monotonic() < until:
        time.sleep(0.02)
        if os.fork():
            os._exit(0)
        os.write(write, b"x")
    os._exit(0)
stopped = subprocess.Popen(["sleep", "60"], start_new_session=True)
stopped.send_signal(signal.SIGSTOP)
os.read(read, 1)
begun = time.monotonic()
print(kill_descendants(), psutil.Process().children(), time.monotonic() - begun < 15)
"""


def test_nothing_is_left_of_processes_that_fork_while_they_are_ended() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=50)
    assert (done.stdout, done.stderr) == ("[] [] True\n", "")


STUBBORN = """
import subprocess
from unittest.mock import patch
import psutil
from phalanx.jobs.signal_queue import kill_descendants

with subprocess.Popen(["sleep", "60"]) as process, patch.object(psutil.Process, "kill"):
    print(kill_descendants(0.1) == [process.pid])
    process.kill()
"""


def test_what_the_kernel_keeps_is_not_waited_for_without_end() -> None:
    done = subprocess.run([sys.executable, "-c", STUBBORN], capture_output=True, text=True, timeout=50)
    assert (done.stdout, done.stderr) == ("True\n", "")
