"""Append to an audit log: a line of JSON for each thing that was written, or refused, with time and user."""

import json
from collections.abc import Mapping
from pathlib import Path


def append_audit_line(path: Path, time_s: float, user: str, fields: Mapping[str, object]) -> None:
    """Append a line. The file only grows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({"time": time_s, "user": user, **fields}) + "\n")
