"""What the kernel does when a process ends or memory runs out: which processes end with it."""

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent is gone; now, if it is gone already (Linux; elsewhere it
    does nothing). `parent` is its number as it knew it before it forked: a child may ask too late."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if sys.platform == "linux" and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def become_subreaper() -> None:
    """Become the parent of descendants that lose their own parent, so that none can outlive this process (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def prefer_oom_kill() -> None:
    """Have the kernel, when memory runs out, kill this process before any other (Linux; elsewhere it does nothing)."""
    if sys.platform == "linux":
        Path("/proc/self/oom_score_adj").write_text("1000")
