"""What the kernel does when a process ends or memory runs out: which processes end with it."""

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent is gone; now, if it is gone already.
    `parent` is its number as it knew it before it forked: a child may ask too late."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def become_subreaper() -> None:
    """Become the parent of descendants that lose their own parent, so that none can outlive this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def prefer_oom_kill() -> None:
    """Have the kernel, when memory runs out, kill this process before any other."""
    Path("/proc/self/oom_score_adj").write_text("1000")
