"""The destination of the saves of a run that is kept at a URL: its store, rank by rank, without a shared disk."""

import logging
import threading
from typing import Any, NamedTuple

import xxhash

from phalanx.storage.errors import NotFound
from phalanx.storage.stored_checkpoints import BLOCKS_NAME
from phalanx.storage.url import StoreUrl
from phalanx.train.checkpoint.checkpoint_store import CheckpointStore, KnownBlocks, find_best_step
from phalanx.train.checkpoint.format import (
    CHUNK_BYTES,
    MANIFEST_NAME,
    CorruptCheckpointError,
    encode_manifest,
    merge_rank_manifests,
    rank_file_name,
)
from phalanx.train.checkpoint.pinned_buffer import Bytes
from phalanx.train.checkpoint.staging import ShardFileSpec

logger = logging.getLogger(__name__)


class _KeptCheckpoint(NamedTuple):
    best_loss: float | None
    blocks: frozenset[str]


class StoreRetention:
    """Removes old checkpoints of a store, on the worker that commits: all but the `keep` newest (None: all stay) and
    the best, which is the first with the lowest validation loss. Then the blocks that no other checkpoint has."""

    def __init__(self, checkpoints: CheckpointStore, keep: int | None):
        self._checkpoints, self._keep = checkpoints, keep
        self._whole: dict[int, _KeptCheckpoint | None] = {}
        self.must_sweep = True
        """Whether a save was cut, so that there may be blocks of no checkpoint."""

    def apply(self, committed: int) -> None:
        """Remove what is not kept, after the commit of a step and before the next save. A store that fails is logged;
        the next call tries again."""
        if self._keep is None:
            return
        try:
            self._remove_old(committed, self._keep)
        except OSError as error:
            self.must_sweep = True
            logger.warning("an old checkpoint could not be removed: %s", error)

    def _remove_old(self, committed: int, keep: int) -> None:
        steps = self._checkpoints.steps()
        self._whole.pop(committed, None)
        self._whole = {step: self._whole.get(step) or self._describe(step) for step in steps}
        whole = {step: each for step, each in self._whole.items() if each is not None}
        kept = {committed, *list(whole)[:keep]}
        if (best := find_best_step({step: each.best_loss for step, each in whole.items()})) is not None:
            kept.add(best)
        doomed = [step for step in steps if step not in kept and (step in whole or step < committed)]
        self._checkpoints.remove(doomed)
        store, directory = self._checkpoints.store, self._checkpoints.url / BLOCKS_NAME
        if self.must_sweep:
            committed_at = store.head((self._checkpoints.step_url(committed) / MANIFEST_NAME).key).modified
            unused = {each.key for each in store.list_objects(directory.key) if each.modified < committed_at}
        else:
            unused = {(directory / name).key for step in doomed if step in whole for name in whole[step].blocks}
        unused.difference_update(
            (directory / name).key for step in kept if step in whole for name in whole[step].blocks
        )
        store.delete(sorted(unused))
        self.must_sweep = False

    def _describe(self, step: int) -> _KeptCheckpoint | None:
        """None for a checkpoint that is not whole, or damaged."""
        try:
            checkpoint = self._checkpoints.read(step)
        except (NotFound, CorruptCheckpointError):
            return None
        loss = checkpoint.manifest.meta.get("best_loss")
        return _KeptCheckpoint(loss, frozenset(block.name for block in checkpoint.blocks))


class StoreDestination:
    """The destination of one rank's shards at a URL. `attempt`, the same on all ranks, separates its records from
    those of an earlier attempt."""

    def __init__(self, checkpoints: CheckpointStore, rank: int, world_size: int, attempt: int, keep: int):
        self.rank = rank
        self._checkpoints, self._world_size, self._attempt = checkpoints, world_size, attempt
        self._retention = StoreRetention(checkpoints, keep)
        self._good_step: int | None = None
        self._known: KnownBlocks | None = None
        self._written: set[str] | None = None

    def continue_from(self, step: int) -> None:
        """The checkpoint of `step` was resumed from: its blocks are good, those of later ones may not be."""
        self._good_step, self._known, self._written = step, None, None

    def check_space(self, nbytes: int) -> None:
        """A store does not say how much fits."""

    def shard_path(self, step: int) -> StoreUrl:
        return self._checkpoints.step_url(step) / rank_file_name(self.rank)

    def write(
        self, step: int, image: Bytes, file_spec: ShardFileSpec, meta: dict[str, Any], cancelled: threading.Event
    ) -> None:
        """Write the blocks of this rank's file that the store lacks, then its record."""
        if self._written is not None:  # the last save was committed
            self._known = KnownBlocks(self._written)
        elif self._known is None:
            self._known = self._checkpoints.known_blocks(self._good_step, self.rank)
        content = image.data
        written = self._checkpoints.write_blocks(
            len(content), lambda start, stop: content[start:stop], self._known, cancelled
        )
        chunks = [
            xxhash.xxh3_64_hexdigest(content[start : start + CHUNK_BYTES])
            for start in range(0, len(content), CHUNK_BYTES)
        ]
        record = file_spec.make_record(chunks, step, str(self._attempt), self.rank, meta)
        self._checkpoints.write_record(record, written.names)
        self._written = set(written.names)
        logger.info("step %d: %d bytes sent, %d skipped", step, written.sent_bytes, written.skipped_bytes)

    def commit(self, step: int, meta: dict[str, Any]) -> tuple[StoreUrl, int]:
        """Make a checkpoint of what all ranks wrote, and remove old ones, before any rank writes again; return its URL
        and bytes."""
        records = [self._checkpoints.read_record(step, rank) for rank in range(self._world_size)]
        manifest = merge_rank_manifests(records, meta)
        content, sidecar = encode_manifest(manifest)
        self._checkpoints.write_manifest(step, manifest.files, content, sidecar)
        self._retention.apply(step)
        return self._checkpoints.step_url(step), manifest.nbytes + len(content) + len(sidecar)

    def remove_own(self, step: int) -> None:
        """Leave what was written of a save that is abandoned to a later retention: without a manifest it is no
        checkpoint, and the store may have failed."""
        self._written, self._retention.must_sweep = None, True
