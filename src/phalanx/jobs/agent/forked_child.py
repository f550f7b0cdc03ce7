"""What a child that the fork server has just forked does: set up itself, run, and exit with a status that says why."""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

from phalanx.errors import is_storage_error
from phalanx.process_lifetime import die_with_parent
from phalanx.recipe.snapshot_paths import resolve_code_dir
from phalanx.run.call_process import import_function
from phalanx.std_streams import SafeStream

LOST_PEER_STATUS = 76
"""Exit status of a worker that ended only because it lost a peer. It may be reaped before that peer, since a dying
process closes its sockets first."""
STORAGE_FAILED_STATUS = 74
"""Exit status of a worker that ended because storage failed: a file of the run, its data or its code could not be read
or written. EX_IOERR of sysexits.h."""
GPU_FAILED_STATUS = 71
"""Exit status of a worker after a GPU failure. EX_OSERR of sysexits.h."""


def call_and_exit(path: str, payload: Any) -> None:
    """Import and call in the child, and exit with the returned code. The parent does not import what workers need."""
    code = import_function(path)(payload)
    raise SystemExit(0 if code is None else int(code))


def find_user_code_dir(arguments: Any) -> Path | None:
    """Return the directory of the user's code for a worker with these arguments."""
    given = arguments if isinstance(arguments, Mapping) else {}
    if "script" in given:
        return Path(given["script"]).parent
    return resolve_code_dir(Path(given["folder"])) if "folder" in given else None


def run_child(
    parent: int,
    body: Callable[[], None],
    environment: dict[str, str],
    log: Path | None,
    report: Callable[[BaseException], None],
) -> NoReturn:
    """In a fresh child: clean signal state, own log, run, leave without the parent's exit handlers."""
    code = 1
    sys.stdout, sys.stderr = (cast(TextIO, SafeStream(stream)) for stream in (sys.stdout, sys.stderr))
    try:
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.update(environment)
        if log is not None:
            _redirect_output(log)
        body()
        code = 0
    except SystemExit as leave:
        if isinstance(leave.code, str):
            print(leave.code, file=sys.stderr)
        code = 0 if leave.code is None else leave.code if isinstance(leave.code, int) else 1
    except BaseException as error:  # noqa: BLE001 - the last frame of a process: report and leave
        code = _exit_status(error)
        traceback.print_exc()
        with contextlib.suppress(OSError):  # the agent is gone
            report(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect_output(log: Path) -> None:
    """Redirect the output of this process to a file. It is lost, without an exception, if that cannot be written."""
    try:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        fd = os.open(os.devnull, os.O_WRONLY)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _exit_status(error: BaseException) -> int:
    """Return the exit status of a worker for the exception that ends it."""
    from phalanx.train.distributed.failures import is_gpu_failure, is_peer_failure

    if is_gpu_failure(error):  # NCCL reports it like a lost peer
        return GPU_FAILED_STATUS
    return LOST_PEER_STATUS if is_peer_failure(error) else STORAGE_FAILED_STATUS if is_storage_error(error) else 1
