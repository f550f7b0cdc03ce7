"""The load targets that a source has sent, in a file: a guard that restarts holds them."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from phalanx.errors import DataError, UsageError
from phalanx.fleet.power.load_targets import LoadTarget
from phalanx.run.directory import write_atomic
from phalanx.run.fields import read_as
from phalanx.safe_files import read_json


def read_target_record(path: Path) -> list[LoadTarget]:
    """Return the targets of a file; none where there is none yet. Raises UsageError for a damaged one: what was asked
    for would be lost silently."""
    try:
        return [read_as(LoadTarget, each) for each in read_json(path)["targets"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, DataError) as error:
        raise UsageError(
            f"{path}: the load targets that were received cannot be read ({error}). Ask their sender for the newest "
            "ones, and move the file away"
        ) from None


def write_target_record(path: Path, targets: Sequence[LoadTarget]) -> None:
    """Replace the targets of a file. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps({"targets": [asdict(each) for each in targets]}))
