"""The durable destination of saves: a directory of checkpoints on disk.

Each rank writes its file and then its record to a temporary directory, fsynced; one rank commits (`commit.py`).
"""

import errno
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.formatting import format_bytes
from phalanx.train.checkpoint.commit import commit_checkpoint, make_temporary_path, sync_directory, write_synced
from phalanx.train.checkpoint.format import (
    CorruptCheckpointError,
    format_checkpoint_name,
    list_checkpoints,
    rank_file_name,
    read_manifest,
)
from phalanx.train.checkpoint.pinned_buffer import Bytes
from phalanx.train.checkpoint.rank_record import encode_record
from phalanx.train.checkpoint.shard_file import write_with_checksums
from phalanx.train.checkpoint.staging import ShardFileSpec


class DurableDirectory:
    """The destination of one rank's shards in a directory of checkpoints. `attempt`, the same on all ranks, separates
    our temporary files from those of an earlier process that is not dead yet."""

    def __init__(self, directory: Path, rank: int, world_size: int, attempt: int = 0):
        self.rank = rank
        self._directory, self._world_size, self._attempt = directory, world_size, attempt
        self._space_checked = False
        self._steps_to_clean: set[int] = set()  # steps with files that could not be removed yet

    def check_space(self, nbytes: int) -> None:
        """Check free disk space, once. Raises UsageError if the disk is too full."""
        if not self._space_checked:
            copies = 1 if list_checkpoints(self._directory) else 2
            check_free_space(self._directory, nbytes * self._world_size, copies)
            self._space_checked = True

    def shard_path(self, step: int) -> Path:
        return self._write_dir(step) / rank_file_name(self.rank)

    def write(
        self, step: int, image: Bytes, file_spec: ShardFileSpec, meta: dict[str, Any], cancelled: threading.Event
    ) -> None:
        """Write this rank's file, then its record, durably."""
        record_path = self._record_path(step, self.rank)
        record_path.parent.mkdir(parents=True, exist_ok=True)
        record_path.unlink(missing_ok=True)
        chunks = write_with_checksums(self.shard_path(step), image, cancelled)
        record = file_spec.make_record(chunks, step, str(self._attempt), self.rank, meta)
        write_synced(record_path, encode_record(record))
        sync_directory(record_path.parent)

    def commit(self, step: int, meta: dict[str, Any]) -> tuple[Path, int]:
        """Make a checkpoint of what all ranks wrote; return its path and bytes. Called on one rank. If storage fails or
        the shards of a lost rank are missing, what all ranks wrote is removed."""
        temporary, final = self._write_dir(step), self._directory / format_checkpoint_name(step)
        records = [self._record_path(step, rank) for rank in range(self._world_size)]
        try:
            if not _path_exists(temporary) and _has_meta(final, meta):  # the lost rank had already committed
                return final, sum(path.stat().st_size for path in final.iterdir())
            return final, commit_checkpoint(temporary, final, records, meta)
        except OSError:
            self._remove_all(step)
            raise

    def remove_own(self, step: int) -> None:
        """Remove this rank's files; the last rank removes the directory. If storage refuses, the removal is retried
        before the next save and at the end; then it is left to `clean_checkpoint_dir`."""
        record_path = self._record_path(step, self.rank)
        self._steps_to_clean.discard(step)
        try:
            record_path.unlink(missing_ok=True)
            self.shard_path(step).unlink(missing_ok=True)
            record_path.parent.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):  # removed already, or other ranks still have files
                self._steps_to_clean.add(step)

    def retry_cleanup(self) -> None:
        """Retry the removal of files that storage refused to remove."""
        for step in sorted(self._steps_to_clean):
            if self.rank == 0:
                self._remove_all(step)
            else:
                self.remove_own(step)

    def _write_dir(self, step: int) -> Path:
        """Return the directory that ranks write to."""
        return make_temporary_path(self._directory / format_checkpoint_name(step), str(self._attempt))

    def _record_path(self, step: int, rank: int) -> Path:
        return self._write_dir(step) / f"rank-{rank:05d}.json"

    def _remove_all(self, step: int) -> None:
        """Remove what all ranks wrote of an abandoned save, on the rank that commits; see `remove_own`."""
        self._steps_to_clean.discard(step)
        folder = self._write_dir(step)
        try:
            while _path_exists(folder):
                with suppress(FileNotFoundError):  # other ranks remove their files at the same time
                    shutil.rmtree(folder)
        except OSError:
            self._steps_to_clean.add(step)


def check_free_space(directory: Path, nbytes: int, copies: int) -> None:
    """Raise UsageError unless there is space for `copies` checkpoints in `directory`, which need not exist."""
    existing_parent = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing_parent).free
    if free < nbytes * copies:
        note = ", and each is written before the one before it is removed" if copies > 1 else ""
        raise UsageError(
            f"{directory}: no space: a checkpoint takes {format_bytes(nbytes)}{note}; {format_bytes(free)} are free, "
            f"so {format_bytes(nbytes * copies - free)} more are needed there"
        )


def _path_exists(path: Path) -> bool:
    """Return whether a path exists. Raises OSError if storage fails, for which `Path.exists` returns False."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def _has_meta(path: Path, meta: dict[str, Any]) -> bool:
    """Return whether `path` is a checkpoint with a valid manifest and this `meta`."""
    try:
        return read_manifest(path).meta == meta
    except CorruptCheckpointError:
        return False
