"""List, verify, digest and export the checkpoints of a run."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import DataError, UsageError
from phalanx.run import Run
from phalanx.safe_files import check_links
from phalanx.train.checkpoint import (
    CheckpointManifest,
    export_huggingface,
    list_checkpoints,
    parse_step,
    read_manifest,
    verify_checkpoint,
)
from phalanx.train.checkpoint import CorruptCheckpointError as CorruptCheckpointError
from phalanx.train.checkpoint import digest_checkpoint as digest_checkpoint
from phalanx.train.inference import set_threads


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint as its manifest describes it."""

    step: int
    path: Path
    written_at: float
    """Seconds since the epoch."""
    best: bool
    manifest: CheckpointManifest | None
    """None where it is damaged."""
    damage: str | None = None


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint of which every byte was read and is good."""

    path: Path
    num_bytes: int
    num_files: int
    duration_s: float


@dataclass(frozen=True)
class ExportedCheckpoint:
    """An export: the checkpoint that it was made from, its files, and notes for its user."""

    path: Path
    files: tuple[str, ...]
    notes: tuple[str, ...]


def describe_checkpoints(path: Path, warn: Callable[[str], None] = lambda text: None) -> list[CheckpointInfo]:
    """Describe checkpoints from their manifests, newest first.

    Args:
        path: a run directory, a directory of checkpoints, or one checkpoint.
        warn: called when the record of the best checkpoint cannot be read.
    """
    found = find_checkpoints(path)
    best_step = _read_best_step(found[0].parent, warn)
    return [_describe_checkpoint(checkpoint, best_step) for checkpoint in found]


def verify_selected(checkpoint: Path) -> VerifiedCheckpoint:
    """Verify every byte of a checkpoint against its checksums. Raises CorruptCheckpointError."""
    start_s = time.perf_counter()
    manifest = verify_checkpoint(checkpoint)
    return VerifiedCheckpoint(checkpoint, manifest.nbytes, len(manifest.files), time.perf_counter() - start_s)


def export_to_huggingface(checkpoint: Path, out: Path, dtype: str | None = None) -> ExportedCheckpoint:
    """Export the weights as a Hugging Face directory, which is created. `dtype` is fp32, bf16 or fp16; by default each
    weight has the dtype that it came with."""
    notes: list[str] = []
    num_threads = read_manifest(checkpoint).meta.get("recipe", {}).get("num_threads")
    if isinstance(num_threads, int) and num_threads > 0:
        set_threads(num_threads)
    exported = export_huggingface(checkpoint, out, notes=notes.append, dtype=dtype)
    files = sorted(file.name for file in exported.iterdir())
    return ExportedCheckpoint(checkpoint, tuple(files), tuple(notes))


def find_checkpoints(path: Path) -> list[Path]:
    """Find the checkpoints of a run or of a directory of checkpoints, newest first; or return the one at `path`."""
    is_checkpoint = re.fullmatch(r"step-\d+", path.absolute().name) and path.is_dir()
    found = [path] if is_checkpoint else list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not found:
        raise UsageError(f"{path}: no checkpoint here; name a run directory or a checkpoint such as step-000000060")
    check_links(path)
    return found


def select_checkpoint(path: Path, step: int | None) -> Path:
    """Select the checkpoint of a step, by default the newest, among those that `find_checkpoints` finds."""
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


def _describe_checkpoint(checkpoint: Path, best_step: int | None) -> CheckpointInfo:
    step, written_at = parse_step(checkpoint.absolute()), checkpoint.stat().st_mtime
    try:
        manifest, damage = read_manifest(checkpoint), None
    except CorruptCheckpointError as error:
        manifest, damage = None, f"{error.file.name}: {error.reason}"
    return CheckpointInfo(step, checkpoint, written_at, step == best_step, manifest, damage)
