"""Run Slurm's programs, and put what they complain about in one line."""

import logging
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

RunProgram = Callable[[Sequence[str]], tuple[int, str, str]]
"""Runs a program; its exit code (127: there is none), what it printed, and its errors."""

COMMAND_TIMEOUT_S = 600.0
"""Time limit of one of Slurm's programs, which retry for a while to reach a controller."""


def run_program(argv: Sequence[str]) -> tuple[int, str, str]:
    """Run a program on this machine."""
    begun = time.perf_counter()
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=COMMAND_TIMEOUT_S
        )
    except FileNotFoundError:
        return 127, "", f"{argv[0]}: not found"
    except subprocess.TimeoutExpired:
        return 1, "", f"{argv[0]} did not answer within {COMMAND_TIMEOUT_S:.0f} s"
    logger.debug("%s: exit code %d in %.2f s", shlex.join(argv), done.returncode, time.perf_counter() - begun)
    return done.returncode, done.stdout, done.stderr


def clean_error(err: str) -> str:
    """Slurm's words, in one line, without what it puts before them."""
    if "Could not establish a configuration source" in err:
        return (
            "Slurm's programs find no slurm.conf on this machine; submit from a login node of the cluster, or set "
            "SLURM_CONF to the path of the cluster's slurm.conf"
        )
    lines = [re.sub(r"^(\w+: )?(error: )?", "", line).strip() for line in err.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line)) or "it failed without a word"
