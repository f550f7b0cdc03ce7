"""From a directory full of written files to a checkpoint, in one step that cannot be seen half done.

Everything happens under names that no reader looks at, is fsynced, and is then renamed. A process that dies at any
moment leaves either the whole checkpoint or a temporary directory, which `clean` removes. Nothing here knows tensors.
"""

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from phalanx.run.directory import sync
from phalanx.train.checkpoint.format import MANIFEST, SIDECAR, Share, checkpoint_name, encode_manifest, merge

_TEMPORARY = ".tmp-"
_OLD = ".old"
_GOING = "deleted"
DELETED = f"{_TEMPORARY}{_GOING}"
"""How the name of a directory ends that is being removed."""


def temporary_name(final: Path, tag: str) -> Path:
    return final.with_name(f"{final.name}{_TEMPORARY}{tag}")


def write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        sync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(fd)
    finally:
        os.close(fd)


def publish(temporary: Path, final: Path, shares: Sequence[Path], meta: dict[str, Any]) -> int:
    """Make `temporary`, in which every rank's data lie fsynced, the checkpoint `final`; return its bytes.

    `shares` are the ranks' own manifests (JSON); they are merged and removed. A checkpoint that has the name already (a
    step done again after a fall-back) is moved aside first and removed when the new one stands. OSError when the disk
    refuses, or a rank never wrote its share; what was there before then still stands.
    """
    manifest = merge([_read_share(path) for path in shares], meta)
    content, sidecar = encode_manifest(manifest)
    write_synced(temporary / MANIFEST, content)
    write_synced(temporary / SIDECAR, sidecar)
    for path in temporary.iterdir():
        if path.name not in {MANIFEST, SIDECAR, *manifest.files}:
            path.unlink()
    sync_directory(temporary)
    _put(temporary, final)
    return manifest.nbytes + len(content) + len(sidecar)


def _read_share(path: Path) -> Share:
    """A rank's manifest, which it writes last, when its data are on the disk."""
    try:
        return Share.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):  # killed before it began with it, or within
        raise OSError(errno.ENODATA, "the worker was lost before it had written its part", str(path)) from None


def _put(temporary: Path, final: Path) -> None:
    if not final.exists():
        os.rename(temporary, final)
        sync_directory(final.parent)
        return
    old = final.with_name(final.name + _OLD)
    if old.exists():
        discard(old)
    os.rename(final, old)
    try:
        os.rename(temporary, final)
    except OSError:
        os.rename(old, final)
        raise
    sync_directory(final.parent)
    discard(old)


def discard(path: Path) -> None:
    """Remove a directory so that one who dies meanwhile leaves only what `clean` removes."""
    if _TEMPORARY not in path.name:
        doomed = temporary_name(path, _GOING)
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        path = doomed
    shutil.rmtree(path)


def clean(directory: Path, spare: int | None = None) -> list[Path]:
    """Finish or undo what a killed process left in a directory of checkpoints, and return what was removed.

    One process calls it before any starts to save, or while they save the step to `spare` and no other. A checkpoint
    that had been moved aside comes back if the one that was to replace it never got its place.
    """
    if not directory.is_dir():
        return []
    removed = []
    for path in sorted(directory.iterdir()):
        if spare is not None and path.name.startswith(checkpoint_name(spare)):
            continue
        if path.name.endswith(_OLD) and not (final := path.with_name(path.name.removesuffix(_OLD))).exists():
            os.rename(path, final)
        elif path.name.endswith(_OLD) or _TEMPORARY in path.name:
            discard(path)
            removed.append(path)
        elif path.name.startswith(".") and path.name.endswith(".tmp"):  # a small file that was being written
            path.unlink()
            removed.append(path)
    sync_directory(directory)
    return removed
