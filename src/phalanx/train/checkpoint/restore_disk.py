"""Restore from checkpoints on disk: workers agree on the newest that is good for all, and each reads its part of it."""

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from phalanx.errors import is_storage_error
from phalanx.run import Run
from phalanx.train.checkpoint import (
    CheckpointManifest,
    CorruptCheckpointError,
    list_checkpoints,
    load_tensors,
    parse_step,
    read_manifest,
)
from phalanx.train.checkpoint.load_plan import load_full_state, read_local_state
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.module_state import get_model_tensors
from phalanx.train.distributed.object_collectives import all_gather_json
from phalanx.train.train_state import AppState

OnRejectFn = Callable[[Path, str, str], None]
ApplyFn = Callable[[], None]
RejectedFile = tuple[str, str, str]
"""A checkpoint's path, the file's name, and the reason."""
ResultT = TypeVar("ResultT")
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
) -> RestoredCheckpoint | None:
    """Load the newest checkpoint that is good for every worker into the model, optimizer and grad scaler.

    Nothing changes before every worker has read its part of the same checkpoint, so all fall back to the same older
    one. Returns None if no checkpoint is good. A bad one is reported on every worker. Raises OSError on every worker if
    one worker's storage failed and no other checkpoint is readable for all: the unreadable one may be good.

    `in_place` avoids memory for a second copy: weights are read over the existing ones, and the optimizer state is
    dropped first. If None is returned or an error raised, the live state is then invalid and must not be used."""
    if in_place:
        state.optimizer.forget()

    def read(path: Path) -> tuple[CheckpointManifest, ApplyFn]:
        manifest = read_manifest(path)
        if not state.parallel_model.fully_replicated:
            return manifest, read_local_state(state, path, manifest, in_place=in_place)
        model = state.parallel_model.modules[0]
        into = _fitting(get_model_tensors(model), manifest) if in_place else {}
        tensors = load_tensors(path, manifest.tensors, into, manifest=manifest)
        return manifest, lambda: load_full_state(model, state.optimizer, state.scaler, tensors, str(path))

    candidate, newest, storage_error_seen = None, None, False
    while True:
        rejected: list[RejectedFile] = []
        if candidate is None:
            candidate, storage_failed_now = _read_newest(run.checkpoints, newest, read, rejected)
            storage_error_seen = storage_error_seen or storage_failed_now
        gathered = all_gather_json(
            dist_env,
            {
                "step": NO_CHECKPOINT if candidate is None else parse_step(candidate[0]),
                "unknown": storage_error_seen,
                "bad": rejected,
            },
        )
        report_rejected_files(gathered, on_reject)
        steps = [each["step"] for each in gathered]
        newest = min(steps)
        if newest == NO_CHECKPOINT or candidate is None:
            if any(each["unknown"] for each in gathered):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(run.checkpoints))
            return None
        path, (manifest, apply) = candidate
        if max(steps) == newest:
            apply()
            return RestoredCheckpoint(path, manifest)
        if parse_step(path) > newest:  # another worker could not read this one
            candidate = None


def _fitting(tensors: Mapping[str, Tensor], manifest: CheckpointManifest) -> dict[str, Tensor]:
    """Return the tensors that the checkpoint holds with the same dtype and shape."""
    records = {name: manifest.tensors[name] for name in tensors.keys() & manifest.tensors.keys()}
    return {
        name: tensors[name]
        for name, record in records.items()
        if (record.torch_dtype, tuple(record.shape)) == (tensors[name].dtype, tuple(tensors[name].shape))
    }


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


def report_rejected_files(gathered: Sequence[Mapping[str, Any]], on_reject: OnRejectFn) -> None:
    """Report each bad file that any worker found, once, on every worker."""
    for path, file, reason in dict.fromkeys(tuple(each) for theirs in gathered for each in theirs["bad"]):
        on_reject(Path(path), file, reason)
