"""Reads the offline files of W&B, RUN/wandb/offline-run-*/run-ID.wandb: which steps they have.

They are logs of LevelDB's format, which W&B's library does not read for others: after 7 bytes blocks of 32 KiB, in them
parts (CRC-32, length, type) of records, each a protobuf of W&B.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

_HEADER_BYTES = 7
_BLOCK_BYTES = 32768
_PART_HEADER = struct.Struct("<IHB")
_FULL_PART, _FIRST_PART, _LAST_PART = 1, 2, 4


def find_offline_files(run_path: Path, run_id: str) -> list[Path]:
    """The offline files of a run, oldest first; no links, as the run may come from another person."""
    found = run_path.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb")
    return sorted(path for path in found if not path.is_symlink() and not path.parent.is_symlink())


def find_newest_step(paths: Sequence[Path]) -> int:
    """The highest step in offline files; -1 for none."""
    return max((int(row["_step"]) for path in paths for row in read_history_rows(path)), default=-1)


def read_history_rows(path: Path) -> Iterator[dict[str, float]]:
    """Rows of metrics of an offline file, in order, up to the first that is not whole."""
    from wandb.proto.wandb_internal_pb2 import Record

    for content in _read_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            yield {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}


def _read_records(content: bytes) -> Iterator[bytes]:
    position, record = _HEADER_BYTES, b""
    while position + _PART_HEADER.size <= len(content):
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < _PART_HEADER.size:
            position += left  # padding
            continue
        _, length, kind = _PART_HEADER.unpack_from(content, position)
        position += _PART_HEADER.size
        part = content[position : position + length]
        if len(part) < length or not kind:
            return
        position += length
        record = part if kind in (_FULL_PART, _FIRST_PART) else record + part
        if kind in (_FULL_PART, _LAST_PART):
            yield record
