"""The record of one rank's shard: it is written after the shard's file and makes it valid, on disk as in memory.

A record lists the contents and checksums of the file and the run's progress, and carries its own hash. The records of
all ranks are merged into the manifest of a checkpoint.
"""

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import xxhash
from pydantic import Field, StringConstraints, ValidationError, model_validator

from phalanx.train.checkpoint.format import (
    CorruptCheckpointError,
    RankManifest,
    rank_file_name,
)


class RankRecord(RankManifest):
    """What one rank wrote for the save of `step`.

    `token` distinguishes saves of one step: the attempt on disk, the epoch of the run's history in memory. `meta` is as
    in a checkpoint's manifest."""

    format: Literal[1] = 1
    step: Annotated[int, Field(ge=0)]
    token: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]+$", max_length=64)]
    rank: Annotated[int, Field(ge=0)]
    meta: dict[str, Any]

    @model_validator(mode="after")
    def _check_own_file(self) -> Self:
        if set(self.files) != {rank_file_name(self.rank)}:
            raise ValueError("it names other files than its rank's")
        return self

    @property
    def file_name(self) -> str:
        """Return the name of its one file."""
        (name,) = self.files
        return name


def encode_record(record: RankRecord) -> bytes:
    """Return the bytes of a record: its own hash, then the record as JSON."""
    text = json.dumps(record.model_dump(mode="json")).encode()
    return xxhash.xxh3_128_hexdigest(text).encode() + b"\n" + text


def decode_record(content: bytes, path: Path) -> RankRecord:
    """Parse a record that was read from `path`. Raises CorruptCheckpointError if it is damaged."""
    digest, _, text = content.partition(b"\n")
    if xxhash.xxh3_128_hexdigest(text).encode() != digest:
        raise CorruptCheckpointError(path, "damaged (its own checksum differs)")
    try:
        return RankRecord.model_validate_json(text)
    except ValidationError as error:
        raise CorruptCheckpointError(path, f"malformed record: {error.errors()[0]['msg']}") from None


def write_record(copy: Path, record: RankRecord) -> None:
    """Write a record atomically, after its file is complete."""
    path = (copy / record.file_name).with_suffix(".json")
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(encode_record(record))
    os.replace(temporary, path)
