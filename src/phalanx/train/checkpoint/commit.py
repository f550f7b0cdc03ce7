"""Commit a checkpoint: turn a directory of written files into a checkpoint, atomically.

Files are written under names that readers ignore, fsynced, and then renamed. A process that dies at any moment leaves
either a complete checkpoint or a temporary directory, which `clean_checkpoint_dir` removes. This module does not handle
tensors.
"""

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.run.directory import fsync_if_supported
from phalanx.train.checkpoint.format import (
    MANIFEST_HASH_NAME,
    MANIFEST_NAME,
    CorruptCheckpointError,
    encode_manifest,
    format_checkpoint_name,
    merge_rank_manifests,
)
from phalanx.train.checkpoint.rank_record import RankRecord, decode_record

_TEMPORARY_TAG = ".tmp-"
_OLD_SUFFIX = ".old"
_DELETED_TAG = "deleted"
DELETED_SUFFIX = f"{_TEMPORARY_TAG}{_DELETED_TAG}"
"""Suffix of a directory that is being removed."""


def make_temporary_path(final: Path, tag: str) -> Path:
    return final.with_name(f"{final.name}{_TEMPORARY_TAG}{tag}")


def write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        fsync_if_supported(file.fileno())


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fsync_if_supported(fd)
    finally:
        os.close(fd)


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
        return decode_record(path.read_bytes(), path)
    except (FileNotFoundError, CorruptCheckpointError):  # the worker died before or while it wrote the record
        raise OSError(errno.ENODATA, "the worker was lost before it had written its part", str(path)) from None


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


def clean_checkpoint_dir(directory: Path, keep_step: int | None = None) -> list[Path]:
    """Finish or undo what a killed process left in a directory of checkpoints. Return the paths that were removed.

    Call it on one process before any process saves, or while the only save in flight is that of `keep_step`. A
    checkpoint that was moved aside is moved back if its replacement was never put in place.
    """
    if not directory.is_dir():
        return []
    removed = []
    for path in sorted(directory.iterdir()):
        if keep_step is not None and path.name.startswith(format_checkpoint_name(keep_step)):
            continue
        if (
            path.name.endswith(_OLD_SUFFIX)
            and not (final := path.with_name(path.name.removesuffix(_OLD_SUFFIX))).exists()
        ):
            os.rename(path, final)
        elif path.name.endswith(_OLD_SUFFIX) or _TEMPORARY_TAG in path.name:
            discard_directory(path)
            removed.append(path)
        elif path.name.startswith(".") and path.name.endswith(".tmp"):  # a small file, written halfway
            path.unlink()
            removed.append(path)
    sync_directory(directory)
    return removed
