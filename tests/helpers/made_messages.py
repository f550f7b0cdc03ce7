"""Messages for tests: whole ones, of which a test names only what it is about; and frames with any content."""

import json
import struct
from pathlib import Path
from typing import Any

from phalanx.run.control_channel import AuthConnection
from phalanx.run.process_messages import Command, StartWorkers

COMMAND = Command(function="f", payload={})


def start_workers(function: str, payload: Any, logs: Path, world: int = 1, **fields: Any) -> StartWorkers:
    """What starts all workers of a world on one node."""
    values: dict[str, Any] = {"attempt": 0, "environment": {}, "local_world_size": world, **fields}
    command = Command(function=function, payload=payload)
    return StartWorkers(world_size=world, command=command, logs_dir=str(logs), **values)


def signed_frame(wire: AuthConnection, payload: Any, number: int = 0) -> bytes:
    """What this end would send as its frame of this number, if messages were any JSON."""
    content = json.dumps(payload).encode()
    return struct.pack("!I", len(content)) + wire._sign(wire._own_role, number, content) + content
