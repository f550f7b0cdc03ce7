"""Folders and files that only this user may change: what lies there is believed, or even run."""

import grp
import os
import pwd
import stat
from collections.abc import Mapping
from pathlib import Path

from phalanx.errors import UsageError

SQLITE_STORAGE_CODES = frozenset({8, 10, 13})
"""SQLITE_READONLY, SQLITE_IOERR, SQLITE_FULL."""
PRIMARY_CODE_MASK = 0xFF
"""Extended result codes have more bits."""


def state_root(environment: Mapping[str, str] = os.environ) -> Path:
    """$PHALANX_STATE_DIR, else $XDG_STATE_HOME/phalanx, else ~/.local/state/phalanx: what must not be lost."""
    if given := environment.get("PHALANX_STATE_DIR"):
        return Path(given)
    if shared := environment.get("XDG_STATE_HOME"):
        return Path(shared) / "phalanx"
    return Path.home() / ".local" / "state" / "phalanx"


def make_state_dir(path: Path, mode: int = 0o777) -> None:
    """Make a directory below the state directory. UsageError, with the variable that names another, if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=mode)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be made: {error.strerror}; set PHALANX_STATE_DIR to a directory that can be written"
        ) from None


def is_storage_failure(error: BaseException) -> bool:
    """Whether an error of SQLite is of the storage (full, read-only, broken) and says nothing about the file."""
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(code, int) and code & PRIMARY_CODE_MASK in SQLITE_STORAGE_CODES


def check_owner(path: Path, what: str) -> None:
    """UsageError where something is at `path` that another user owns, or may write: `what` it is for Phalanx. root's
    own is as good as this user's."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UsageError(f"{path}: {what} cannot be inspected: {error.strerror}") from None
    if found.st_uid not in (os.getuid(), 0):
        raise UsageError(f"{path}: {what} belongs to another user ({_user_name(found.st_uid)}); name one of your own")
    if is_writable_by_others(found):
        raise UsageError(f"{path}: other users may write to {what}; `chmod go-w {path}`, or name another")


def is_writable_by_others(found: os.stat_result) -> bool:
    """Whether users other than its owner can write it. A group with only the owner in it does not count."""
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _is_private_group(found)


def _is_private_group(found: os.stat_result) -> bool:
    try:
        owner, group = pwd.getpwuid(found.st_uid), grp.getgrgid(found.st_gid)
    except KeyError:
        return False
    return owner.pw_gid == found.st_gid and group.gr_name == owner.pw_name and set(group.gr_mem) <= {owner.pw_name}


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
