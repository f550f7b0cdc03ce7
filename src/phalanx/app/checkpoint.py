"""List, verify, digest and export the checkpoints of a run."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.errors import DataError, UsageError
from phalanx.run import Run
from phalanx.safe_files import check_links
from phalanx.train.checkpoint import CorruptCheckpointError as CorruptCheckpointError
from phalanx.train.checkpoint import digest_checkpoint as digest_checkpoint
from phalanx.train.checkpoint import (
    export_huggingface,
    list_checkpoints,
    parse_step,
    read_manifest,
)
from phalanx.train.checkpoint import verify_checkpoint as verify_checkpoint
from phalanx.train.inference import set_threads


def describe_checkpoints(path: Path, warn: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """Describe checkpoints from their manifests, newest first, as JSON values.

    Args:
        path: a run directory, a directory of checkpoints, or one checkpoint.
        warn: called when the record of the best checkpoint cannot be read.
    """
    found = find_checkpoints(path)
    best_step = _read_best_step(found[0].parent, warn)
    rows = []
    for checkpoint in found:
        step = parse_step(checkpoint.absolute())
        row = {"step": step, "path": str(checkpoint), "written_at": checkpoint.stat().st_mtime}
        row |= {"best": step == best_step, "damaged": None}
        try:
            manifest = read_manifest(checkpoint)
        except CorruptCheckpointError as error:
            rows.append({**row, "damaged": f"{error.file.name}: {error.reason}"})
            continue
        row |= {"size_bytes": manifest.nbytes, "num_samples": manifest.meta.get("samples_consumed")}
        rows.append({**row, "num_tensors": len(manifest.tensors), "num_files": len(manifest.files)})
    return rows


def export_to_huggingface(checkpoint: Path, out: Path, dtype: str | None = None) -> tuple[list[str], list[str]]:
    """Export the weights as a Hugging Face directory, which is created; return its files, and notes for its user.
    `dtype` is fp32, bf16 or fp16; by default each weight has the dtype that it came with."""
    notes: list[str] = []
    num_threads = read_manifest(checkpoint).meta.get("recipe", {}).get("num_threads")
    if isinstance(num_threads, int) and num_threads > 0:
        set_threads(num_threads)
    exported = export_huggingface(checkpoint, out, notes=notes.append, dtype=dtype)
    return sorted(file.name for file in exported.iterdir()), notes


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
