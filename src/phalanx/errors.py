"""Exit codes and the errors that carry them: one table for the command line, agents, engines and scripts.

An error that a user can cause is a `PhalanxError`: its text says what is wrong, where, and what would be right;
the command line prints it without a traceback and leaves with its code. Storage that fails is no bug either, and may be
back in a minute: `is_storage_error` knows its errors. Anything else is a bug in Phalanx.
"""

import errno
import os
from enum import IntEnum

DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What storage says that is full, or on which a file has reached the size that it may have."""
STORAGE_BROKEN_ERRNOS = frozenset(
    (errno.EIO, errno.EREMOTEIO, errno.ENXIO, errno.ENODEV, errno.EROFS, errno.ESTALE, errno.ENOTCONN, errno.ELOOP)
)
"""Errors of broken storage: devices; ESTALE: a server that lost the file, ENOTCONN: a file system without its process,
ELOOP: autofs that cannot mount."""

RETRYABLE_STORAGE_ERRNOS = STORAGE_BROKEN_ERRNOS - {errno.EROFS}
"""Errors of these that a restart of a command that has just begun may not meet again; a file system that is read-only
from the beginning is the wrong place."""


class ExitCode(IntEnum):
    """How a command ended. Engines and agents decide by these numbers whether to start it again."""

    DONE = 0
    USAGE = 64  # wrong usage of the command line
    DATA = 65  # bad data: a shard or checkpoint that is missing, torn or not what its manifest says
    UNFINISHED = 75  # saved and stopped before the end: start me again
    UNFIT_NODE = 77  # this node is unfit: start me elsewhere
    RECIPE = 78  # bad recipe, or a source that matches no file
    GAVE_UP = 93  # no progress in three attempts: do not restart


class PhalanxError(Exception):
    """An error that the user can fix. The message is one or two lines, complete without a traceback."""

    code = ExitCode.USAGE

    def __init__(self, text: str = "", code: ExitCode | None = None):
        super().__init__(text)
        if code is not None:
            self.code = code


class UsageError(PhalanxError):
    """The command line asks for something that does not exist or cannot be."""

    code = ExitCode.USAGE


class RecipeError(PhalanxError):
    """The recipe is wrong: file, line, key, what was expected."""

    code = ExitCode.RECIPE


class DataError(PhalanxError):
    """Stored bytes are not what their manifest says: names the file and, where there is one, the block."""

    code = ExitCode.DATA


class UnfitNodeError(PhalanxError):
    """This machine cannot train (out of memory, broken device, no usable network)."""

    code = ExitCode.UNFIT_NODE


class GaveUpError(PhalanxError):
    """Several attempts in a row made no progress."""

    code = ExitCode.GAVE_UP


def error_of_code(text: str, code: int) -> PhalanxError:
    """Return the error that another process ended with."""
    kinds: dict[int, type[PhalanxError]] = {
        each.code: each for each in (UsageError, RecipeError, DataError, UnfitNodeError, GaveUpError)
    }
    return kinds.get(code, PhalanxError)(text, ExitCode(code))


def is_storage_error(error: BaseException) -> bool:
    """Whether storage fails or is full: not the user's mistake, and it may pass."""
    return isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS | STORAGE_BROKEN_ERRNOS


def describe_os_error(error: OSError) -> str:
    """File and reason of an error of storage."""
    where = error.filename2 or error.filename  # of two, the second is the one that was asked for
    reason = error.strerror or str(error)
    return reason if where is None else f"{os.fsdecode(where)}: {reason}"


class SubprocessError(Exception):
    """A trial process failed for a reason that is not the user's; `traceback` is its traceback, if it had one.
    `killed`: by SIGKILL, which is what the kernel does to a process when memory runs out."""

    def __init__(self, text: str, traceback: str | None, killed: bool = False):
        super().__init__(text)
        self.traceback = traceback
        self.killed = killed

    @property
    def code(self) -> ExitCode:
        """What a command ends with of it: one that was killed may be started again."""
        return ExitCode.UNFINISHED if self.killed else ExitCode.GAVE_UP
