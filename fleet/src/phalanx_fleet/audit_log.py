"""The audit logs of power control and cooling: a line of JSON for each order, with time and user."""

import getpass
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_audit(path: Path, entries: Sequence[Mapping[str, object]], user: str | None = None) -> None:
    """Append entries; each with user and time."""
    if not entries:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        for entry in entries:
            file.write(json.dumps({"time": time.time(), "user": user or getpass.getuser(), **entry}) + "\n")


def find_audit_problem(path: Path, entries: Sequence[Mapping[str, object]]) -> str:
    """Append entries; return why they cannot be written, or nothing. For what must not end by a full disk: a guard that
    ends gives up its load targets, or leaves a rack without flow."""
    try:
        write_audit(path, entries)
    except OSError as error:
        return f"the audit log {path} cannot be written: {error.strerror}"
    return ""


def find_actor() -> str:
    """Return the name of the user of this process."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        return f"user {os.getuid()}"
