"""The durable destination of saves: a directory of checkpoints on disk, from writing to retention.

Each rank writes its file and then its record to a temporary directory, fsynced; one rank commits: it renames the
directory. A process that dies at any moment leaves either a complete checkpoint or a temporary directory, which
`clean_checkpoint_dir` removes. Old checkpoints are removed in the background.
"""

import errno
import os
import shutil
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.formatting import format_bytes
from phalanx.run import Run
from phalanx.run.directory import sync_directory, write_json, write_synced
from phalanx.run.event_types import RunWarning
from phalanx.run.events import ReportEventFn
from phalanx.train.checkpoint.format import (
    MANIFEST_HASH_NAME,
    MANIFEST_NAME,
    Bytes,
    CorruptCheckpointError,
    encode_manifest,
    format_checkpoint_name,
    list_checkpoints,
    merge_rank_manifests,
    parse_step,
    rank_file_name,
    read_manifest,
)
from phalanx.train.checkpoint.shard_file import (
    RankRecord,
    ShardFileSpec,
    decode_record,
    encode_record,
    write_with_checksums,
)


class DurableDirectory:
    """The destination of one rank's shards in a directory of checkpoints. `attempt`, the same on all ranks, separates
    our temporary files from those of an earlier process that is not dead yet."""

    def __init__(self, directory: Path, rank: int, world_size: int, attempt: int = 0):
        self.rank = rank
        self._directory, self._world_size, self._attempt = directory, world_size, attempt
        self._space_checked = False

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
        """Make a checkpoint of what all ranks wrote; return its path and bytes. Called on one rank. If storage fails,
        what all ranks wrote is removed."""
        temporary, final = self._write_dir(step), self._directory / format_checkpoint_name(step)
        records = [self._record_path(step, rank) for rank in range(self._world_size)]
        try:
            return final, commit_checkpoint(temporary, final, records, meta)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def remove_own(self, step: int) -> None:
        """Remove this rank's files; the last rank removes the directory. What storage refuses to remove is left to
        `clean_checkpoint_dir`."""
        record_path = self._record_path(step, self.rank)
        with suppress(OSError):
            record_path.unlink(missing_ok=True)
            self.shard_path(step).unlink(missing_ok=True)
            record_path.parent.rmdir()

    def _write_dir(self, step: int) -> Path:
        """Return the directory that ranks write to."""
        return make_temporary_path(self._directory / format_checkpoint_name(step), str(self._attempt))

    def _record_path(self, step: int, rank: int) -> Path:
        return self._write_dir(step) / f"rank-{rank:05d}.json"


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


_TEMPORARY_TAG = ".tmp-"
_OLD_SUFFIX = ".old"
_DELETED_TAG = "deleted"
DELETED_SUFFIX = f"{_TEMPORARY_TAG}{_DELETED_TAG}"
"""Suffix of a directory that is being removed."""


def make_temporary_path(final: Path, tag: str) -> Path:
    return final.with_name(f"{final.name}{_TEMPORARY_TAG}{tag}")


def commit_checkpoint(temporary: Path, final: Path, record_paths: Sequence[Path], meta: dict[str, Any]) -> int:
    """Rename `temporary`, which holds the fsynced data of all ranks, to the checkpoint `final`; return its bytes.

    The records of the ranks are merged and removed. If `final` exists already (a step was repeated after a rollback),
    it is moved aside first and removed once the new checkpoint is in place. Raises OSError if the disk fails or a rank
    did not finish writing; `final` is then what it was before.
    """
    manifest = merge_rank_manifests([_read_record(path) for path in record_paths], meta)
    content, sidecar = encode_manifest(manifest)
    write_synced(temporary / MANIFEST_NAME, content)
    write_synced(temporary / MANIFEST_HASH_NAME, sidecar)
    for path in temporary.iterdir():
        if path.name not in {MANIFEST_NAME, MANIFEST_HASH_NAME, *manifest.files}:
            path.unlink()
    sync_directory(temporary)
    _rename_to_final(temporary, final)
    return manifest.nbytes + len(content) + len(sidecar)


def _read_record(path: Path) -> RankRecord:
    """Read a rank's record. The rank writes it last, after its data are on disk."""
    try:
        return decode_record(path.read_bytes(), path, RankRecord)
    except (FileNotFoundError, CorruptCheckpointError):  # storage did not keep what the rank wrote
        raise OSError(errno.ENODATA, "a part that was written is missing or damaged", str(path)) from None


def _rename_to_final(temporary: Path, final: Path) -> None:
    if not final.exists():
        os.rename(temporary, final)
        sync_directory(final.parent)
        return
    old = final.with_name(final.name + _OLD_SUFFIX)
    if old.exists():
        discard_directory(old)
    os.rename(final, old)
    try:
        os.rename(temporary, final)
    except OSError:
        os.rename(old, final)
        raise
    sync_directory(final.parent)
    discard_directory(old)


def discard_directory(path: Path) -> None:
    """Remove a directory. If the process dies halfway, `clean_checkpoint_dir` removes the rest."""
    if _TEMPORARY_TAG not in path.name:
        doomed = make_temporary_path(path, _DELETED_TAG)
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        path = doomed
    shutil.rmtree(path)


def clean_checkpoint_dir(directory: Path) -> None:
    """Finish or undo what a killed process left in a directory of checkpoints.

    Call it on one process before any process saves. A checkpoint that was moved aside is moved back if its replacement
    was never put in place.
    """
    if not directory.is_dir():
        return
    for path in sorted(directory.iterdir()):
        final = path.with_name(path.name.removesuffix(_OLD_SUFFIX))
        if final != path and not final.exists():
            os.rename(path, final)
        elif final != path or _TEMPORARY_TAG in path.name:
            discard_directory(path)
        elif path.name.startswith(".") and path.name.endswith(".tmp"):  # a small file, written halfway
            path.unlink()
    sync_directory(directory)


def discard_abandoned(directory: Path, committed: int) -> None:
    """Remove what failed saves left before the commit of a step: storage may have refused to remove it then."""
    try:
        committed_at = (directory / format_checkpoint_name(committed) / MANIFEST_NAME).stat().st_mtime
    except FileNotFoundError:  # it is in a store
        return
    for path in directory.glob(f"step-*[0-9]{_TEMPORARY_TAG}*"):
        if path.stat().st_mtime < committed_at:  # a save that is in flight now is newer
            discard_directory(path)


def apply_retention(directory: Path, keep: int, protect: Collection[int] = ()) -> None:
    """Remove all checkpoints except the `keep` newest complete ones and the protected steps (the best one). Call it
    after a commit.

    Complete means that the manifest is good; reading all data after each save would be too expensive. An incomplete
    checkpoint does not count as kept. If the process is killed meanwhile, `clean_checkpoint_dir` removes the rest.
    Failed removals are tried again at the next call. Raises OSError if storage fails.
    """
    for path in directory.glob(f"step-*{DELETED_SUFFIX}"):
        discard_directory(path)
    whole = 0
    for path in list_checkpoints(directory):
        if whole >= keep:
            if parse_step(path) not in protect:
                discard_directory(path)
        else:
            with suppress(CorruptCheckpointError):
                read_manifest(path)
                whole += 1


class Retention:
    """Removes the old checkpoints of a run in the background, on the worker that commits. `keep` newest ones and the
    best stay. A removal that fails is reported, and training continues."""

    def __init__(self, run: Run, keep: int, report_event: ReportEventFn):
        self._run, self._keep, self._report_event = run, keep, report_event
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="retention")
        self._removals: list[Future[None]] = []

    def remove_old(self, step: int, in_use: Collection[int] = ()) -> None:
        """Remove old checkpoints, but not that of `step`, which is good, and those `in_use`."""
        self._report_failures()
        self._removals.append(self._thread.submit(self._apply, step, in_use))

    def record_best(self, step: int, loss: float) -> None:
        """Record that this checkpoint has the lowest validation loss, before `remove_old`."""
        try:
            write_json(best_checkpoint_file(self._run), {"step": step, "loss": loss})
        except OSError as error:  # the checkpoint may have filled the disk; training continues
            text = f"step {step} is the best so far, but this could not be written: {error}"
            self._report_event(RunWarning(text=text))

    def close(self) -> None:
        """Wait until all removals are done."""
        self._thread.shutdown()
        self._report_failures()

    def _apply(self, step: int, in_use: Collection[int]) -> None:
        discard_abandoned(self._run.checkpoints, step)
        best = self._run.read_json_or_empty(best_checkpoint_file(self._run)).get("step")
        protected = [step, *in_use, *self._run.list_steps_in_evaluation(), *([best] if isinstance(best, int) else [])]
        apply_retention(self._run.checkpoints, self._keep, protected)

    def _report_failures(self) -> None:
        done = [removal for removal in self._removals if removal.done()]
        self._removals = [removal for removal in self._removals if removal not in done]
        for removal in done:
            try:
                removal.result()
            except OSError as error:
                self._report_event(RunWarning(text=f"an old checkpoint could not be removed: {error}"))


def best_checkpoint_file(run: Run) -> Path:
    """Return the file that names the checkpoint with the lowest validation loss."""
    return run.checkpoints / "best.json"
