"""A subprocess that imports torch while this process reads and checks the files that it is needed for."""

import gc
import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from phalanx.compat import die_with_parent
from phalanx.deadline import POLL_INTERVAL_S, RESUME_AFTER_CHECKS, Deadline, find_stopped

ANSWER_TIMEOUT_S = 300.0
"""Seconds in which that process must have answered."""
SubprocessCall = Callable[[str, Any], Any]
"""`call("module:function", payload)`: what that function returns for `payload` in the subprocess, or None when it did
not return, for any reason; then call it in this process, where it raises. Works once; arguments and results are JSON
values."""


@contextmanager
def preload_torch() -> Iterator[SubprocessCall]:
    """Start to import torch in a subprocess: that takes two seconds of CPU time, on another core. The subprocess ends
    with the block. Enter it before numpy and torch are imported here, since a fork would lose their threads; where they
    are imported, there is little to gain, and nothing is called."""
    if not sys.modules.keys().isdisjoint({"numpy", "torch"}):
        yield lambda function, payload: None
        return
    (asked, ask), (answered, answer) = os.pipe(), os.pipe()
    parent = os.getpid()
    process = os.fork()
    if process == 0:
        try:
            die_with_parent(parent)
            os.close(ask)
            _serve(asked, answer)
        finally:
            os._exit(0)
    os.close(asked)
    os.close(answer)

    def call(function: str, payload: Any) -> Any:
        with suppress(BrokenPipeError), open(ask, "w", closefd=False) as pipe:  # it ended: there will be no answer
            pipe.write(json.dumps([function, payload]) + "\n")
        if not _wait_for_answer(answered, process):
            return None
        with open(answered, closefd=False) as pipe:
            found = pipe.read()
        return json.loads(found) if found else None

    try:
        yield call
    finally:
        os.close(ask)
        os.close(answered)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _wait_for_answer(pipe: int, process: int) -> bool:
    """Whether an answer, or its end, comes before that process has been stopped for a while, and before too long."""
    wait, looks = Deadline("torch to be imported", ANSWER_TIMEOUT_S), 0
    while not select.select([pipe], [], [], POLL_INTERVAL_S)[0]:
        looks = looks + 1 if find_stopped([process]) else 0
        if looks == RESUME_AFTER_CHECKS or wait.check_expired():
            return False
    return True


def _serve(asked: int, answer: int) -> None:
    gc.disable()  # nearly all that is made stays: looking for garbage in it is a third of what importing torch takes
    import torch  # noqa: F401 - what takes the time

    with open(asked) as pipe:
        function, payload = json.loads(pipe.readline())
    module, _, name = function.partition(":")
    found = json.dumps(getattr(importlib.import_module(module), name)(payload))
    with open(answer, "w") as pipe:
        pipe.write(found)
