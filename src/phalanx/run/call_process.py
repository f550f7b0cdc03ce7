"""A subprocess that answers calls of `module:function(payload)`, one after the other, over a packet socket.

It is a fresh Python, not a fork: it imports only what it calls, neither torch nor the main program of its parent. The
fork server (`jobs/agent/fork_server.py`) answers the same messages, each in a fork with torch imported.
"""

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import phalanx
from phalanx.errors import PhalanxError, SubprocessError, error_of_code
from phalanx.process_lifetime import die_with_parent
from phalanx.run.messages import Message, make_socket_pair, receive, send
from phalanx.run.process_messages import CallProgress, CallRaised, CallReply, CallReturned, ProcessReady, RunCall

KILL_TIMEOUT_S = 2.0
"""Seconds to wait for a killed process. One that waits for a disk may stay in the kernel for longer."""
MAX_ERROR_CHARS = 8000
"""Length limit of an error's text and of its traceback: both fit a packet."""
_caller_sockets: list[socket.socket] = []


class CallProcess:
    """The caller's side. The process dies with this one; until it is ready, calls wait in its socket. It has a session
    of its own: Ctrl-C reaches only this process, and `kill` all that it has started."""

    def __init__(self, *inherited_fds: int) -> None:
        self.socket, far = make_socket_pair()
        python_path = [str(Path(phalanx.__path__[0]).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        code = f"from {__name__} import answer_calls; answer_calls({far.fileno()}, {os.getpid()})"
        with far:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(far.fileno(), *inherited_fds),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(python_path)},
            )

    def send_call(self, function: str, payload: Any) -> None:
        """Ask for `module:function(payload)`. When the process is gone, `receive` says so."""
        with contextlib.suppress(BrokenPipeError):
            send(self.socket, RunCall(function=function, payload=payload, call_id=0))

    def receive(self, timeout_s: float | None = None) -> list[Message] | None:
        """Return what the process says next; None when it is gone. TimeoutError after `timeout_s` seconds."""
        self.socket.settimeout(timeout_s)
        return receive(self.socket)

    def kill(self) -> bool:
        """Kill the process and all of its session. Returns whether it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_TIMEOUT_S)
        return self.process.returncode is not None


def value_of(reply: CallReply) -> Any:
    """Return what a call returned. Raises the PhalanxError that it raised, or SubprocessError for another failure."""
    if isinstance(reply, CallReturned):
        return reply.value
    assert isinstance(reply, CallRaised)
    if reply.exit_code is not None:
        raise error_of_code(reply.message, reply.exit_code)
    raise SubprocessError(reply.message, reply.traceback, reply.was_killed)


def import_function(path: str) -> Callable[[Any], Any]:
    """Return the function that `module:name` names."""
    module, _, name = path.partition(":")
    function: Callable[[Any], Any] = getattr(importlib.import_module(module), name)
    return function


def answer_call(
    call: RunCall, translate: Callable[[Exception], PhalanxError | None] = lambda error: None
) -> CallReturned | CallRaised:
    """Call the function and return its result or exception as a message. `translate`: gives an unexpected exception
    that is not a bug its text and exit code."""
    known: PhalanxError | None = None
    trace = None
    try:
        return CallReturned(call_id=call.call_id, value=import_function(call.function)(call.payload))
    except PhalanxError as error:
        known = error
    except SystemExit as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"SystemExit: {error.code} ({frame.filename}:{frame.lineno}, in {frame.name}): the call left its process"
    except Exception as error:  # noqa: BLE001 - it crosses a process boundary and is raised again there
        known, trace = translate(error), traceback.format_exc()[-MAX_ERROR_CHARS:]
        text = f"{type(error).__name__}: {error}"
    code = None
    if known is not None:
        text, code = str(known), int(known.code)
    return CallRaised(call_id=call.call_id, message=text[:MAX_ERROR_CHARS], exit_code=code, traceback=trace)


def report_progress(num_bytes: int, count: int) -> None:
    """Tell the caller of the call that this process answers what it has done since it said so last."""
    send(_caller_sockets[-1], CallProgress(num_bytes=num_bytes, count=count))


def answer_calls(caller_fd: int, parent: int) -> None:
    """Answer calls until the caller is gone. Entry point of the process."""
    die_with_parent(parent)
    os.set_inheritable(caller_fd, False)  # what a call starts would keep it open
    os.dup2(2, 1)  # what libraries print is not part of the output of the caller's command
    sys.stdout = os.fdopen(
        1, "w", 1, errors="backslashreplace", closefd=False
    )  # lines are not lost when this process is killed
    with socket.socket(fileno=caller_fd) as caller:
        _caller_sockets.append(caller)
        send(caller, ProcessReady())
        while (calls := receive(caller)) is not None:
            for call in calls:
                assert isinstance(call, RunCall)
                send(caller, answer_call(call))
