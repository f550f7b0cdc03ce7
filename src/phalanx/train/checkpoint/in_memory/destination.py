"""The in-memory destination of saves: a node's folder, and with `send_to_replica` also that of another node."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.train.checkpoint.format import rank_file_name
from phalanx.train.checkpoint.in_memory.format import format_copy_name
from phalanx.train.checkpoint.pinned_buffer import Bytes
from phalanx.train.checkpoint.rank_record import RankRecord, write_record
from phalanx.train.checkpoint.shard_file import write_with_checksums
from phalanx.train.checkpoint.staging import ShardFileSpec

SendToReplica = Callable[[RankRecord, Bytes, threading.Event], None]
"""Sends a shard to the node that keeps its replica. Raises OSError on failure, and once the event is set."""


class NodeFolder:
    """The destination of one rank's shards in its node's folder.

    `epoch_token` names the epoch in the run's history. `before_write` is called in the background before anything is
    written. The workers of a node check free space together, before the first copy."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        epoch_token: str,
        before_write: Callable[[int], None],
        send_to_replica: SendToReplica | None = None,
    ):
        self.rank, self.epoch_token = rank, epoch_token
        self._folder, self._before_write, self._send_to_replica = folder, before_write, send_to_replica
        self.cpu_s = 0.0
        """Core seconds that the background work took for the last shard."""

    def check_space(self, nbytes: int) -> None:
        pass

    def shard_path(self, step: int) -> Path:
        return self._folder / format_copy_name(step, self.epoch_token) / rank_file_name(self.rank)

    def write(
        self, step: int, image: Bytes, file_spec: ShardFileSpec, meta: dict[str, Any], cancelled: threading.Event
    ) -> None:
        """Write the shard's file, then its record; then replicate both."""
        self._before_write(step)
        path = self.shard_path(step)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        chunks = write_with_checksums(path, image, cancelled)
        record = file_spec.make_record(chunks, step, self.epoch_token, self.rank, meta)
        write_record(path.parent, record)
        if self._send_to_replica is not None:
            self._send_to_replica(record, image, cancelled)
        self.cpu_s = time.thread_time()  # each save runs in a new thread

    def commit(self, step: int, meta: dict[str, Any]) -> tuple[Path, int]:
        """Return the copy's folder and the bytes of this rank's shard: a copy exists when all ranks have written."""
        path = self.shard_path(step)
        return path.parent, path.stat().st_size

    def remove_own(self, step: int) -> None:
        """Remove this rank's shard; the last rank of the node removes the copy's folder. What storage refuses to remove
        goes with the next copy, or with the node's folder."""
        path = self.shard_path(step)
        with suppress(OSError):
            path.with_suffix(".json").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            path.parent.rmdir()

    def retry_cleanup(self) -> None:
        pass
