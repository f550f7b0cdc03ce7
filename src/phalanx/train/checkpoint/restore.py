"""Restore the newest complete checkpoint of a run into the live state: the one entry to every source.

Sources are the memory of this node, that of other nodes (in-memory checkpoints), the disk, and the store of the run.
Workers agree on the source, and nothing live changes before all of them have read and verified their part.

In memory each worker verifies some of the shards on its node byte by byte, and the workers exchange what is good. A
shard that a node needs and lacks is fetched from a node that has it, over the process group, and then kept on both.
Copies of another history (`run/in_memory_checkpoint.py`) are ignored by name.
"""

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from phalanx.errors import UsageError, is_storage_error
from phalanx.recipe.schema import CheckpointConfig
from phalanx.run import Run
from phalanx.run.in_memory_checkpoint import (
    create_node_dir,
    find_base_dir,
    find_node_dir,
    is_private,
    is_valid_copy,
    read_epochs,
    truncate_history,
)
from phalanx.storage.run_objects import StoredSteps
from phalanx.storage.url import StoreUrl, is_url, parse_url
from phalanx.train.checkpoint.format import (
    CheckpointManifest,
    CorruptCheckpointError,
    list_checkpoints,
    parse_step,
    read_manifest,
)
from phalanx.train.checkpoint.in_memory.format import (
    format_copy_name,
    list_copies,
    list_shard_records,
    merge_copy,
    parse_rank,
    prune_copies,
    read_shard,
)
from phalanx.train.checkpoint.load import find_needed_files
from phalanx.train.checkpoint.load_plan import execute_load_plan, make_load_plan
from phalanx.train.checkpoint.shard_file import RankRecord, as_bytes, write_record
from phalanx.train.checkpoint.store_fetch import RejectedFile, StoreSource
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.object_collectives import (
    NodeMap,
    all_gather_json,
    broadcast_json_from_rank_zero,
    gather_node_map,
)
from phalanx.train.train_state import AppState

OnRejectFn = Callable[[Path | StoreUrl, str, str], None]
ApplyFn = Callable[[], None]
ResultT = TypeVar("ResultT")
logger = logging.getLogger(__name__)
NO_CHECKPOINT = -1
"""Step that stands for: no good checkpoint."""


@dataclass(frozen=True)
class RestoredCheckpoint:
    """A checkpoint that was loaded into the live state. `in_memory`: it was not on disk. `fetched_bytes` of it came
    from other nodes, over all workers."""

    path: Path
    manifest: CheckpointManifest
    in_memory: bool = False
    fetched_bytes: int = 0


def restore_from_disk(
    run: Run,
    dist_env: DistEnv,
    state: AppState,
    on_reject: OnRejectFn,
    in_place: bool = False,
    source: StoreSource | None = None,
) -> RestoredCheckpoint | None:
    """Load the newest checkpoint that is good for every worker into the model, optimizer and grad scaler. Those of
    `source` that are newer are fetched to the disk first.

    Nothing changes before every worker has read its part of the same checkpoint, so all fall back to the same older
    one. Returns None if no checkpoint is good. A bad one is reported on every worker. Raises OSError on every worker if
    one worker's storage failed and no other checkpoint is readable for all: the unreadable one may be good.

    `in_place` avoids memory for a second copy: weights are read over the existing ones, and the optimizer state is
    dropped first. If None is returned or an error raised, the live state is then invalid and must not be used."""
    if in_place:
        state.optimizer.forget()

    def read(path: Path) -> tuple[CheckpointManifest, ApplyFn]:
        manifest = read_manifest(path)
        load_plan = make_load_plan(state.parallel_model, path, manifest)
        return manifest, execute_load_plan(load_plan, state, path, manifest, in_place)

    candidate, newest, storage_error_seen = None, None, False
    while True:
        rejected: list[RejectedFile] = []
        if candidate is None:
            candidate, storage_failed_now = _read_newest(run.checkpoints, newest, read, rejected)
            storage_error_seen = storage_error_seen or storage_failed_now
        own_step = NO_CHECKPOINT if candidate is None else parse_step(candidate[0])
        own = {"step": own_step, "unknown": storage_error_seen, "bad": rejected}
        gathered = all_gather_json(dist_env, own)
        report_rejected_files((each["bad"] for each in gathered), on_reject)
        steps = [each["step"] for each in gathered]
        newest = min(steps)
        if source is not None and (stored := source.next_above(newest)) is not None:
            bad = source.fetch(stored)
            report_rejected_files([bad or ()], on_reject)
            if bad == []:
                candidate, newest = None, stored
            continue
        if newest == NO_CHECKPOINT or candidate is None:
            if any(each["unknown"] for each in gathered) or (source is not None and source.problem):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(run.checkpoints))
            return None
        path, (manifest, apply) = candidate
        if max(steps) == newest:
            apply()
            return RestoredCheckpoint(path, manifest)
        if parse_step(path) > newest:  # another worker could not read this one
            candidate = None


def _read_newest(
    directory: Path, max_step: int | None, read: Callable[[Path], ResultT], rejected: list[RejectedFile]
) -> tuple[tuple[Path, ResultT] | None, bool]:
    """Return the newest checkpoint up to step `max_step` that this worker can read, and whether storage failed before
    it. Unreadable ones are appended to `rejected`."""
    storage_error_seen = False
    try:
        for path in list_checkpoints(directory):
            if max_step is not None and parse_step(path) > max_step:
                continue
            try:
                return (path, read(path)), storage_error_seen
            except CorruptCheckpointError as error:
                rejected.append((str(path), error.file.name, error.reason))
                storage_error_seen = storage_error_seen or error.storage_error is not None
    except OSError as error:
        if not is_storage_error(error):
            raise
        storage_error_seen = True
    return None, storage_error_seen


def report_rejected_files(gathered: Iterable[Iterable[Sequence[str]]], on_reject: OnRejectFn) -> None:
    """Report each bad file that any worker found, once, on every worker."""
    for path, file, reason in dict.fromkeys(tuple(each) for theirs in gathered for each in theirs):
        on_reject(parse_url(path) if is_url(path) else Path(path), file, reason)


def restore_newest(
    run: Run,
    dist_env: DistEnv,
    state: AppState,
    on_reject: OnRejectFn,
    durable_only: bool = False,
    in_place: bool = False,
    store_url: str | None = None,
) -> RestoredCheckpoint | None:
    """Load the newest checkpoint that is good for every worker into the model, optimizer and grad scaler; None if there
    is none. Every worker calls it. In-memory checkpoints count only if they are newer than all on disk or in the store.

    Args:
        on_reject: called on every worker for each bad file, with the checkpoint's path, the file's name and the reason.
        durable_only: leave out in-memory checkpoints.
        in_place: as in `restore_from_disk`, which this falls back to.
        store_url: where the run has checkpoints in a store (`find_store_url`).

    Raises OSError on every worker if storage failed and no other checkpoint is readable for all."""
    source = None if store_url is None else StoreSource(run, dist_env, store_url)
    if source is not None and source.problem:
        if run.store_url is not None:  # what is on the disk may be old
            raise OSError(errno.EIO, source.problem, store_url)
        logger.warning("%s: %s; restoring without it", store_url, source.problem)
    if not durable_only:
        verified = find_verified_copies(run, dist_env, on_reject, newest_stored=0 if source is None else source.newest)
        restored = None if verified is None else restore_in_memory(run, verified, dist_env, state, on_reject)
        if restored is not None:
            return restored
    return restore_from_disk(run, dist_env, state, on_reject, in_place, source)


def find_store_url(run: Run, config: CheckpointConfig) -> str | None:
    """Return the URL below which a run has checkpoints in a store, if any."""
    return run.store_url or (config.upload.to if config.upload is not None else None)


def has_checkpoint(run: Run, config: CheckpointConfig, dist_env: DistEnv) -> bool:
    """Return whether any worker sees a checkpoint on its disk, or the run has one in its store, where it says so. Every
    worker calls it."""
    seen = bool(list_checkpoints(run.checkpoints))
    if not seen and dist_env.is_rank_zero and (url := find_store_url(run, config)) is not None:
        try:
            seen = next(StoredSteps(parse_url(url)).whole_steps(), None) is not None
        except (OSError, UsageError):  # the restore says what is wrong, on every worker
            seen = True
    return any(all_gather_json(dist_env, seen))


MESSAGE_BYTES = 16 << 20
"""Bytes of one message."""
CopyId = tuple[int, str]
"""Step and token."""


@dataclass(frozen=True)
class VerifiedCopies:
    """Shards that passed verification: for each copy, the owner ranks and the workers that read each shard.
    `own_shards` are those that this worker read."""

    node_map: NodeMap
    readers_by_copy: Mapping[CopyId, Mapping[int, Sequence[int]]]
    own_shards: Mapping[CopyId, Mapping[int, RankRecord]]


def find_verified_copies(
    run: Run,
    dist_env: DistEnv,
    on_reject: OnRejectFn,
    environment: Mapping[str, str] = os.environ,
    newest_stored: int = 0,
) -> VerifiedCopies | None:
    """Verify the shards of this run's copies that are newer than its checkpoints on disk and in the store; None if the
    run never had an in-memory checkpoint. Every worker calls it. A bad shard is removed and passed to `on_reject` on
    every worker."""
    history = None
    if dist_env.is_rank_zero:
        newest = max((parse_step(path) for path in list_checkpoints(run.checkpoints)), default=0)
        newest = max(newest, newest_stored)
        epochs, saved = read_epochs(run)
        history = {"epochs": epochs if saved <= newest else [], "newest": newest}
    history = broadcast_json_from_rank_zero(dist_env, history)
    if not history["epochs"]:
        return None
    node_map, folder = gather_node_map(dist_env, environment), find_node_dir(run, environment)
    copies = []
    if folder is not None and is_private(folder):
        copies = [(folder / format_copy_name(*copy), copy) for copy in list_copies(folder)]
    own_shards: dict[CopyId, dict[int, RankRecord]] = {}
    bad: list[RejectedFile] = []
    ranks_on_node = node_map.ranks_on_same_node(dist_env.rank)
    records = [
        (step, token, record)
        for path, (step, token) in copies
        if step > history["newest"] and is_valid_copy(history["epochs"], token, step)
        for record in list_shard_records(path)
        # By rank and not by position in the list, because another worker may remove a bad one meanwhile.
        if parse_rank(record) % len(ranks_on_node) == ranks_on_node.index(dist_env.rank)
    ]
    for step, token, path in records:
        try:
            shard = read_shard(path)
        except CorruptCheckpointError as error:
            bad.append((str(path.parent), error.file.name, error.reason))
            path.unlink(missing_ok=True)
            continue
        own_shards.setdefault((step, token), {})[shard.rank] = shard
    good = [[step, token, sorted(readers_by_copy)] for (step, token), readers_by_copy in own_shards.items()]
    readers_by_copy: dict[CopyId, dict[int, list[int]]] = {}
    gathered = all_gather_json(dist_env, {"good": good, "bad": bad})
    report_rejected_files((each["bad"] for each in gathered), on_reject)
    for rank, theirs in enumerate(gathered):
        for step, token, ranks in theirs["good"]:
            for owner in ranks:
                readers_by_copy.setdefault((step, token), {}).setdefault(owner, []).append(rank)
    return VerifiedCopies(node_map, readers_by_copy, own_shards)


def restore_in_memory(
    run: Run,
    verified: VerifiedCopies,
    dist_env: DistEnv,
    state: AppState,
    on_reject: OnRejectFn,
    environment: Mapping[str, str] = os.environ,
) -> RestoredCheckpoint | None:
    """Load the newest complete copy into the model, optimizer and grad scaler; None if there is none. Every worker
    calls it. Nothing changes before every worker has read its part."""
    if not verified.readers_by_copy:
        return None
    folder, bad = Path(), list[RejectedFile]()
    try:
        folder = create_node_dir(run, environment)
    except (OSError, UsageError) as error:
        bad = [(str(find_base_dir(environment)), "", f"no folder for shards from other nodes: {error}")]
    if _report_bad_copies(dist_env, bad, on_reject):
        return None
    for copy in sorted(verified.readers_by_copy, reverse=True):
        shards = _gather_shard_records(verified, dist_env, copy)
        ranks_on_node = set(verified.node_map.ranks_on_same_node(dist_env.rank))
        ranks_present = {
            owner for owner, readers in verified.readers_by_copy[copy].items() if ranks_on_node & set(readers)
        }
        try:
            manifest = merge_copy(list(shards.values()), ranks_present)
        except ValueError:  # shards were on nodes that are gone; this is so on all workers, which see the same shards
            continue
        path = folder / format_copy_name(*copy)
        load_plan = make_load_plan(state.parallel_model, path, manifest)
        files = find_needed_files(manifest, load_plan.all_blocks)
        lacking = [owner for owner, shard in shards.items() if owner not in ranks_present and shard.file_name in files]
        fetched = _fetch_missing_shards(verified, dist_env, copy, path, shards, lacking)
        apply: ApplyFn | None = None
        bad = []
        try:
            apply = execute_load_plan(load_plan, state, path, manifest)
        except CorruptCheckpointError as error:
            bad = [(str(path), error.file.name, error.reason)]
        if not _report_bad_copies(dist_env, bad, on_reject):
            assert apply is not None
            apply()
            return RestoredCheckpoint(path, manifest, in_memory=True, fetched_bytes=fetched)
    return None


def prune_stale(run: Run, dist_env: DistEnv, step: int, kept_copy: Path | None) -> None:
    """Remove copies when the run resumes from `step`: copies of later steps become invalid, and all copies on this node
    except `kept_copy` (the one it resumes from, if any) are deleted. Every worker calls it."""
    if dist_env.is_rank_zero:
        truncate_history(run, step)
    folder = find_node_dir(run, os.environ)
    if dist_env.local_rank == 0 and folder is not None and is_private(folder):
        prune_copies(folder, () if kept_copy is None else (kept_copy.name,))


def _report_bad_copies(dist_env: DistEnv, bad: list[RejectedFile], on_reject: OnRejectFn) -> bool:
    """Report bad shards that any worker found, on all of them. Return whether there were any."""
    gathered = all_gather_json(dist_env, bad)
    report_rejected_files(gathered, on_reject)
    return any(gathered)


def _gather_shard_records(verified: VerifiedCopies, dist_env: DistEnv, copy: CopyId) -> dict[int, RankRecord]:
    """Gather all shards of a copy by rank; each is sent by the first worker that read it."""
    own_shards = verified.own_shards.get(copy, {})
    first = [owner for owner, readers in verified.readers_by_copy[copy].items() if readers[0] == dist_env.rank]
    gathered = all_gather_json(dist_env, [own_shards[owner].model_dump(mode="json") for owner in first])
    shards = [RankRecord.model_validate(shard) for theirs in gathered for shard in theirs]
    return {shard.rank: shard for shard in sorted(shards, key=lambda shard: shard.rank)}


def _fetch_missing_shards(
    verified: VerifiedCopies,
    dist_env: DistEnv,
    copy: CopyId,
    path: Path,
    shards: Mapping[int, RankRecord],
    lacking: Sequence[int],
) -> int:
    """Fetch to each node the shards that its workers need and lack; return their bytes, over all nodes. All workers do
    the transfers in the same order, so they cannot deadlock."""
    missing_by_rank = all_gather_json(dist_env, list(lacking))
    fetched = 0
    for node in range(verified.node_map.num_nodes):
        ranks = verified.node_map.ranks_on(node)
        for owner in sorted({owner for rank in ranks for owner in missing_by_rank[rank]}):
            readers, shard = verified.readers_by_copy[copy][owner], shards[owner]
            source = readers[node % len(readers)]
            fetched += shard.files[shard.file_name].bytes
            if dist_env.rank == source:
                _send_shard_file(path / shard.file_name, shard, ranks[0])
            elif dist_env.rank == ranks[0]:
                _receive_shard_file(path, shard, source)
    if fetched:
        all_gather_json(dist_env, None)  # after this, what one worker of a node received is visible to the others
    return fetched


def _send_shard_file(file: Path, shard: RankRecord, target: int) -> None:
    """Send a shard's file. The receiver waits for a fixed number of bytes, so what cannot be read is sent as zeros; the
    receiver then finds the shard damaged."""
    start = 0
    for size in _message_sizes(shard):
        read = b""
        with contextlib.suppress(OSError), open(file, "rb") as content:
            content.seek(start)
            read = content.read(size)
        dist.send(torch.frombuffer(bytearray(read.ljust(size, b"\0")), dtype=torch.uint8), target)
        start += size


def _receive_shard_file(copy: Path, shard: RankRecord, source: int) -> None:
    """Receive a shard's file. If the disk is full, verification finds it damaged."""
    path = copy / shard.file_name
    with contextlib.suppress(OSError):
        copy.mkdir(mode=0o700, exist_ok=True)
        path.write_bytes(b"")
    for size in _message_sizes(shard):
        message = torch.empty(size, dtype=torch.uint8)
        dist.recv(message, source)
        with contextlib.suppress(OSError), open(path, "ab") as content:
            content.write(as_bytes(message).data)
    with contextlib.suppress(OSError):
        write_record(copy, shard)


def _message_sizes(shard: RankRecord) -> Iterator[int]:
    """Yield the sizes of the messages that transfer the shard's file."""
    left = shard.files[shard.file_name].bytes
    while left:
        yield min(left, MESSAGE_BYTES)
        left -= min(left, MESSAGE_BYTES)
