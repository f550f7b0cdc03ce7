"""List, verify, digest, copy and remove the checkpoints of a run."""

import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.errors import DataError, UsageError
from phalanx.run import Run
from phalanx.safe_files import check_links
from phalanx.storage.errors import NotFound
from phalanx.storage.run_objects import split_checkpoint_url
from phalanx.storage.store import check_writable
from phalanx.storage.url import StoreUrl, is_url, parse_url
from phalanx.train.checkpoint.checkpoint_store import CheckpointStore, find_best_step, remove_stored
from phalanx.train.checkpoint.digest import digest_checkpoint as digest_checkpoint
from phalanx.train.checkpoint.durable import discard_directory, make_temporary_path
from phalanx.train.checkpoint.format import (
    MANIFEST_NAME,
    CheckpointManifest,
    format_checkpoint_name,
    list_checkpoints,
    parse_step,
    read_manifest,
)
from phalanx.train.checkpoint.format import CorruptCheckpointError as CorruptCheckpointError
from phalanx.train.checkpoint.load import verify_checkpoint as verify_checkpoint
from phalanx.train.checkpoint.store_fetch import localize_checkpoint, verify_stored
from phalanx.train.checkpoint.upload import upload_checkpoint


def describe_checkpoints(location: str, warn: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """Describe checkpoints from their manifests, newest first, as JSON values.

    Args:
        location: a run directory, a directory of checkpoints, one checkpoint, or a URL of a run or checkpoint.
        warn: called when the record of the best checkpoint cannot be read.
    """
    if is_url(location):
        return _describe_stored(parse_url(location))
    found = find_checkpoints(Path(location))
    best_step = _read_best_step(found[0].parent, warn)
    rows = []
    for path in found:
        step = parse_step(path.absolute())
        row, _ = _describe(step, str(path), path.stat().st_mtime, partial(read_manifest, path))
        rows.append({**row, "best": step == best_step})
    return rows


def _describe_stored(url: StoreUrl) -> list[dict[str, Any]]:
    """Describe the checkpoints at a URL; those that are not whole as damaged."""
    run_url, own_step = split_checkpoint_url(url)
    checkpoints = CheckpointStore(run_url)
    rows, losses = [], {}
    for step in checkpoints.steps() if own_step is None else [own_step]:
        step_url = checkpoints.step_url(step)
        objects = checkpoints.store.list_objects(step_url.key)
        if objects:  # a directory that is used as a store keeps empty ones
            written_at = max(each.modified for each in objects)
            row, losses[step] = _describe(step, str(step_url), written_at, partial(checkpoints.read_manifest, step))
            rows.append(row)
    if not rows:
        raise UsageError(f"{url}: no checkpoint here; name the URL of a run or of a checkpoint")
    return [{**row, "best": row["step"] == find_best_step(losses)} for row in rows]


def _describe(
    step: int, location: str, written_at: float, read: Callable[[], CheckpointManifest]
) -> tuple[dict[str, Any], float | None]:
    """Describe a checkpoint, the manifest of which `read` returns; return its row and its validation loss, too."""
    row = {"step": step, "path": location, "written_at": written_at, "best": False, "damaged": None}
    try:
        manifest = read()
    except NotFound:
        return {**row, "damaged": f"incomplete: it has no {MANIFEST_NAME}"}, None
    except CorruptCheckpointError as error:
        return {**row, "damaged": f"{error.file.name}: {error.reason}"}, None
    row |= {"size_bytes": manifest.nbytes, "num_samples": manifest.meta.get("samples_consumed")}
    row |= {"num_tensors": len(manifest.tensors), "num_files": len(manifest.files)}
    return row, manifest.meta.get("best_loss")


def verify_at(location: str, step: int | None) -> tuple[str, CheckpointManifest]:
    """Verify every byte of a checkpoint, and return its path or URL and its manifest. Raises CorruptCheckpointError,
    which names the bad file or block."""
    if is_url(location):
        url, manifest = verify_stored(parse_url(location), step)
        return str(url), manifest
    path = select_checkpoint(location, step)
    return str(path), verify_checkpoint(path)


def copy_checkpoint(source: str, to: str, step: int | None) -> str:
    """Copy a checkpoint below a run directory or URL, and return where it is. What is there already is not sent again.
    Raises UsageError where another checkpoint of its step is at a directory."""
    if is_url(to):
        check_writable(parse_url(to))
    path = select_checkpoint(source, step)
    verify_checkpoint(path)
    if is_url(to):
        return str(upload_checkpoint(path, parse_url(to)))
    directory = Run(Path(to)).checkpoints
    final = directory / format_checkpoint_name(parse_step(path.absolute()))
    if final.exists():
        if read_manifest(final) == read_manifest(path):
            return str(final)
        raise UsageError(f"{final}: exists, and is another checkpoint; remove it first: phalanx checkpoint rm {final}")
    temporary = make_temporary_path(final, "copy")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(path, temporary)
    os.rename(temporary, final)
    return str(final)


def remove_checkpoint(location: str, step: int | None) -> str:
    """Remove a checkpoint, and return where it was. UsageError unless its step or its own path is given."""
    is_named = re.search(r"step-\d+/?$", location) is not None
    if step is None and not is_named:
        raise UsageError(f"{location}: name the checkpoint to remove: --step STEP, or its own path or URL")
    if is_url(location):
        return str(remove_stored(parse_url(location), step))
    path = select_checkpoint(location, step)
    discard_directory(path)
    return str(path)


def find_checkpoints(path: Path) -> list[Path]:
    """Find the checkpoints of a run or of a directory of checkpoints, newest first; or return the one at `path`."""
    is_checkpoint = re.fullmatch(r"step-\d+", path.absolute().name) and path.is_dir()
    found = [path] if is_checkpoint else list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not found:
        raise UsageError(f"{path}: no checkpoint here; name a run directory or a checkpoint such as step-000000060")
    check_links(path)
    return found


def select_checkpoint(location: str, step: int | None) -> Path:
    """Select the checkpoint of a step, by default the newest, among those that `find_checkpoints` finds; of one at a
    URL its node-local copy."""
    if is_url(location):
        return localize_checkpoint(parse_url(location), step)
    path = Path(location)
    found = find_checkpoints(path)
    if step is None:
        return found[0]
    steps = {parse_step(checkpoint.absolute()): checkpoint for checkpoint in found}
    if step not in steps:
        raise UsageError(f"{path}: no checkpoint of step {step}; there are {', '.join(map(str, sorted(steps)))}")
    return steps[step]


def _read_best_step(directory: Path, warn: Callable[[str], None]) -> int | None:
    try:
        best = Run(directory.parent).read_json(directory / "best.json")
    except DataError as error:
        warn(f"{error}; which checkpoint is the best is not known")
        return None
    return best.get("step") if best else None
