"""A process that writes pieces: `python -m phalanx.data.prepare_worker`. JSON lines in, JSON lines out.

The first line in is the job, each further one a piece. The output is `{"bytes", "count"}` for progress, `{"entry"}` for
a finished piece, and `{"error", "text"}` for an error that the user can fix. It is a separate program, not a fork: it
never imports torch or the main program of its parent, and it ends when its output is closed.
"""

import json
import sys
from dataclasses import asdict
from typing import Any

from phalanx.data.prepare_plan import PieceWriter, PrepareJob
from phalanx.data.sources import FilePart
from phalanx.errors import PhalanxError


def send_message(**message: Any) -> None:
    """One message to the process that started this one."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def run_worker() -> None:
    """Write pieces until there are no more."""
    try:
        writer = PieceWriter(PrepareJob(**json.loads(sys.stdin.readline())))
        for line in sys.stdin:
            number, parts = json.loads(line)
            piece = tuple(FilePart(**part) for part in parts)
            entry = writer.write_piece(number, piece, lambda size, count: send_message(bytes=size, count=count))
            send_message(entry=asdict(entry), lost=writer.replaced_bytes)
    except PhalanxError as error:
        send_message(error=type(error).__name__, text=str(error))
    except BrokenPipeError:
        # The parent is gone; what this process finished is on disk. Keep Python from flushing into the pipe.
        sys.stdout = None
    except OSError as error:  # a full disk, as a rule; source files that cannot be read are a PhalanxError
        send_message(error="UsageError", text=f"{error.filename or 'the dataset'}: cannot be written: {error.strerror}")


if __name__ == "__main__":
    run_worker()
