"""Upload checkpoints from the disk to a store, in the background while training continues.

One upload is in flight at a time, of the same step on all workers. Each worker sends the blocks of its files and their
records, and raises flags in the per-step all-reduce; `step_done` acts on the sums, so all make the same transition:

    none -> uploading -> sent by all -> manifest written by rank 0 -> none
            uploading -> failed on one -> given up by all -> none      reported; the next save is uploaded again

A worker that dies leaves blocks without a manifest, which the next upload uses.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from phalanx.errors import PhalanxError, describe_os_error
from phalanx.recipe.schema import UploadConfig
from phalanx.run.event_types import CheckpointUploaded, RunWarning
from phalanx.safe_files import open_regular, read_bytes
from phalanx.storage.url import StoreUrl
from phalanx.train.checkpoint.checkpoint_store import CheckpointStore, KnownBlocks, Pace, StoreRetention, WrittenBlocks
from phalanx.train.checkpoint.format import (
    MANIFEST_HASH_NAME,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    CheckpointManifest,
    CorruptCheckpointError,
    format_checkpoint_name,
    make_unreadable_error,
    parse_step,
    read_manifest,
)
from phalanx.train.checkpoint.in_memory.format import parse_rank
from phalanx.train.checkpoint.save import SaveContext, lower_thread_priority
from phalanx.train.checkpoint.shard_file import RankRecord
from phalanx.train.distributed.object_collectives import all_gather_json
from phalanx.train.step_metrics import StepFlags

_POLL_INTERVAL_S = 1.0


def upload_file(
    checkpoints: CheckpointStore,
    directory: Path,
    manifest: CheckpointManifest,
    name: str,
    known: KnownBlocks,
    cancelled: threading.Event,
    pace: Pace | None = None,
) -> WrittenBlocks:
    """Write a file of the checkpoint at `directory` to a store, and its record. Raises CorruptCheckpointError if the
    file is damaged. The parameters are those of one upload."""
    path, file, size = directory / name, manifest.files[name], manifest.chunk_bytes

    def read(start: int, stop: int) -> memoryview:
        try:
            with open(open_regular(path), "rb", buffering=0) as source:
                data = os.pread(source.fileno(), stop - start, start)
        except OSError as error:
            raise make_unreadable_error(path, error) from None
        if len(data) != stop - start:
            raise CorruptCheckpointError(path, f"ends at byte {start + len(data):,}")
        for chunk in range(-(-start // size), len(file.chunks) if stop == file.bytes else stop // size):
            at = chunk * size - start
            if xxhash.xxh3_64_hexdigest(data[at : at + size]) != file.chunks[chunk]:
                raise CorruptCheckpointError(path, f"damaged in chunk {chunk} (its checksum differs)")
        return memoryview(data)

    written = checkpoints.write_blocks(file.bytes, read, known, cancelled, pace)
    tensors = {
        tensor_name: tensor.model_copy(update={"pieces": pieces})
        for tensor_name, tensor in manifest.tensors.items()
        if (pieces := tuple(piece for piece in tensor.pieces if piece.file == name))
    }
    record = RankRecord(
        files={name: file}, tensors=tensors, step=parse_step(directory), token="upload", rank=parse_rank(path), meta={}
    )
    checkpoints.write_record(record, written.names)
    return written


def finish_upload(checkpoints: CheckpointStore, directory: Path, manifest: CheckpointManifest) -> None:
    """Write the manifest of a checkpoint, after all its files."""
    content = read_bytes(directory / MANIFEST_NAME, MAX_MANIFEST_BYTES)
    sidecar = read_bytes(directory / MANIFEST_HASH_NAME, MAX_MANIFEST_BYTES)
    checkpoints.write_manifest(parse_step(directory), manifest.files, content, sidecar)


def upload_checkpoint(directory: Path, to: StoreUrl) -> StoreUrl:
    """Write a checkpoint below the URL of a run or prefix; blocks that are there are not written again."""
    checkpoints, manifest = CheckpointStore(to), read_manifest(directory)
    if not checkpoints.holds(directory):
        known, cancelled = KnownBlocks(since=0.0), threading.Event()
        for name in sorted(manifest.files):
            upload_file(checkpoints, directory, manifest, name, known, cancelled)
        finish_upload(checkpoints, directory, manifest)
    return checkpoints.step_url(parse_step(directory))


@dataclass
class _Upload:
    """A worker's part of the upload in flight."""

    step: int
    started_at: float
    job: "Future[WrittenBlocks | None]"  # None: it was in the store already
    commit: "Future[None] | None" = None


class CheckpointUploads:
    """The uploads of one worker. Every worker makes the same calls at the same step."""

    def __init__(self, save_context: SaveContext, config: UploadConfig):
        self._run, self._dist_env, self._config = save_context.run, save_context.dist_env, config
        self._report_event, self._record_progress = save_context.report_event, save_context.record_progress
        self._checkpoints = CheckpointStore(config.to)
        self._retention = StoreRetention(self._checkpoints, config.keep)
        bandwidth = config.max_bandwidth
        self._pace = None if bandwidth is None else Pace(bandwidth / self._dist_env.world_size)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload", initializer=lower_thread_priority)
        self._known: KnownBlocks | None = None
        self._cancelled = threading.Event()
        self._last_step: int | None = None
        self._due: int | None = None
        self._in_flight: _Upload | None = None
        self._num_requests = 0  # before the upload in flight

    @property
    def steps_in_use(self) -> Collection[int]:
        """The checkpoints on disk that are needed."""
        steps = (self._due, None if self._in_flight is None else self._in_flight.step)
        return [step for step in steps if step is not None]

    def add(self, step: int, is_last: bool = False) -> None:
        """Upload the checkpoint of a step when no other is in flight, if it is the last or `every` steps have been done
        since the one before."""
        every, last = self._config.every or 1, self._last_step
        if is_last or last is None or step - last >= every or step < last:  # or training went back
            self._due = step

    def raise_flags(self, flags: StepFlags) -> None:
        """Set the flags of this worker's upload in flight."""
        upload = self._in_flight
        if upload is not None and upload.job.done():
            flags.uploaded = upload.job.exception() is None
            flags.upload_ended = not flags.uploaded or (upload.commit is not None and upload.commit.done())

    def step_done(self, flags: StepFlags) -> None:
        """Advance the upload after a step, given the sums of the flags over all workers."""
        upload = self._in_flight
        if upload is None:
            if self._due is not None:
                self._start(self._due)
        elif flags.upload_ended:
            self._end(upload)
        elif flags.uploaded == self._dist_env.world_size and self._dist_env.is_rank_zero and upload.commit is None:
            upload.commit = self._thread.submit(self._commit, upload.step, upload.job.result() is not None)

    def wait(self, exchange_flags: Callable[[], None]) -> None:
        """Wait until all uploads have ended. `exchange_flags` does what a step does with the flags."""
        while self._in_flight is not None or self._due is not None:
            self._record_progress()
            if (upload := self._in_flight) is not None:
                jobs: list[Future[Any]] = [upload.commit or upload.job]
                wait(jobs, _POLL_INTERVAL_S)
            exchange_flags()
        self._thread.shutdown(wait=False)

    def _start(self, step: int) -> None:
        self._due, self._last_step, self._cancelled = None, step, threading.Event()
        self._checkpoints.store.counters.retries.clear()
        self._num_requests = self._checkpoints.store.counters.requests
        job = self._thread.submit(self._send, step, self._cancelled)
        self._in_flight = _Upload(step, time.perf_counter(), job)

    def _send(self, step: int, cancelled: threading.Event) -> WrittenBlocks | None:
        """Send this worker's files: its own, and of a checkpoint of more workers every world-size-th."""
        directory, rank = self._run.checkpoints / format_checkpoint_name(step), self._dist_env.rank
        if self._checkpoints.holds(directory):
            return None
        manifest = read_manifest(directory)
        if self._known is None:
            earlier = (each for each in self._checkpoints.whole_steps() if each < step)
            self._known = self._checkpoints.known_blocks(next(earlier, None), rank)
        parts = [
            upload_file(self._checkpoints, directory, manifest, name, self._known, cancelled, self._pace)
            for name in sorted(manifest.files)[rank :: self._dist_env.world_size]
        ]
        names = tuple(name for part in parts for name in part.names)
        return WrittenBlocks(names, sum(each.sent_bytes for each in parts), sum(each.skipped_bytes for each in parts))

    def _commit(self, step: int, is_new: bool) -> None:
        directory = self._run.checkpoints / format_checkpoint_name(step)
        if is_new:
            finish_upload(self._checkpoints, directory, read_manifest(directory))
        self._retention.apply(step)

    def _end(self, upload: _Upload) -> None:
        """Report on rank 0 how the upload ended; every worker calls it at the same step."""
        self._in_flight = None
        self._cancelled.set()  # the part of another worker may have failed
        ended = [each for each in (upload.job, upload.commit) if each is not None and each.done()]
        reason = next(filter(None, map(_describe_failure, ended)), "")
        part = upload.job.result() if upload.job.done() and not upload.job.exception() else None
        counters = self._checkpoints.store.counters
        own = {
            "reason": reason,
            "sent": part and part.sent_bytes,
            "skipped": part and part.skipped_bytes,
            "requests": counters.requests - self._num_requests,
            "retries": dict(counters.retries),
        }
        gathered = all_gather_json(self._dist_env, own)
        reason = next((each["reason"] for each in gathered if each["reason"]), "")
        if reason:
            self._known, self._last_step, self._retention.must_sweep = None, None, True
            text = f"the checkpoint of step {upload.step} was not uploaded to {self._config.to}: {reason}"
            self._report_event(RunWarning(text=f"{text}; training continues"))
        elif part is not None:
            self._known = KnownBlocks(set(part.names))
            self._report_event(
                CheckpointUploaded(
                    step=upload.step,
                    url=self._config.to,
                    sent_bytes=sum(each["sent"] or 0 for each in gathered),
                    skipped_bytes=sum(each["skipped"] or 0 for each in gathered),
                    duration_s=time.perf_counter() - upload.started_at,
                    retries=dict(sum((Counter(each["retries"]) for each in gathered), Counter())),
                    requests=sum(each["requests"] for each in gathered),
                )
            )


def _describe_failure(job: "Future[WrittenBlocks | None] | Future[None]") -> str:
    """Return why a job of an upload failed, "" if it did not. An error that is not storage's or data's is raised."""
    error = job.exception()
    if error is None or isinstance(error, PhalanxError):
        return "" if error is None else str(error)
    if isinstance(error, OSError):
        return describe_os_error(error)
    raise error
