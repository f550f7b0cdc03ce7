"""Going back to a checkpoint: which one is good for every worker, and each worker's part of it."""

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from phalanx.errors import storage_failed
from phalanx.run import Run
from phalanx.train.checkpoint import (
    CorruptError,
    Loaded,
    Manifest,
    list_checkpoints,
    load_tensors,
    read_manifest,
    step_of,
)
from phalanx.train.nodes import exchanged
from phalanx.train.optimizers import Optimizer
from phalanx.train.parallel.divided import Divided
from phalanx.train.place import Place
from phalanx.train.precision import LossScale
from phalanx.train.state import load_held, load_state, model_tensors

OnReject = Callable[[Path, str, str], None]
TakeOver = Callable[[], None]
Rejected = tuple[str, str, str]
"""A checkpoint's path, the file's name, the reason."""
T = TypeVar("T")
NONE = -1
"""Instead of a checkpoint's step: none is good."""


def restore(
    run: Run,
    place: Place,
    divided: Divided,
    optimizer: Optimizer,
    scale: LossScale,
    on_reject: OnReject,
    in_place: bool = False,
) -> Loaded | None:
    """Load the newest checkpoint that is good for every worker into the model, optimizer and scale; None when there is
    none. Nothing changes before every worker has read its part of the same one, so all of them fall back to the one
    before, or none. A bad one is reported on every worker. OSError on every worker when one's storage failed and there
    is no other that all can read: a checkpoint that cannot be read now may be good.

    `in_place`: without memory for all of it once more. Weights are read over those that there are, and what the
    optimizer has is dropped first; so where None is returned or an error raised, the caller must not go on."""
    if in_place:
        optimizer.forget()

    def read(path: Path) -> tuple[Manifest, TakeOver]:
        manifest = read_manifest(path)
        if not divided.alike:
            return manifest, load_held(divided, optimizer, scale, path, manifest, in_place=in_place)
        into = _fitting(model_tensors(divided.modules[0]), manifest) if in_place else {}
        tensors = load_tensors(path, manifest.tensors, into, manifest=manifest)
        return manifest, lambda: load_state(divided.modules[0], optimizer, scale, tensors, str(path))

    mine, newest, unknown = None, None, False
    while True:
        bad: list[Rejected] = []
        if mine is None:
            mine, missed = _newest(run.checkpoints, newest, read, bad)
            unknown = unknown or missed
        said = exchanged(place, {"step": NONE if mine is None else step_of(mine[0]), "unknown": unknown, "bad": bad})
        report_rejected(said, on_reject)
        steps = [each["step"] for each in said]
        newest = min(steps)
        if newest == NONE or mine is None:
            if any(each["unknown"] for each in said):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(run.checkpoints))
            return None
        path, (manifest, take_over) = mine
        if max(steps) == newest:
            take_over()
            return Loaded(path, manifest, {})
        if step_of(path) > newest:  # another worker could not read this one
            mine = None


def _fitting(tensors: Mapping[str, Tensor], manifest: Manifest) -> dict[str, Tensor]:
    """Those that a checkpoint has just so."""
    records = {name: manifest.tensors[name] for name in tensors.keys() & manifest.tensors.keys()}
    return {
        name: tensors[name]
        for name, record in records.items()
        if (record.torch_dtype, tuple(record.shape)) == (tensors[name].dtype, tuple(tensors[name].shape))
    }


def _newest(
    directory: Path, newest: int | None, read: Callable[[Path], T], bad: list[Rejected]
) -> tuple[tuple[Path, T] | None, bool]:
    """The newest checkpoint that can be read here and is not newer than that step, and whether storage failed before.
    `bad` gets those that cannot be read."""
    unknown = False
    try:
        for path in list_checkpoints(directory):
            if newest is not None and step_of(path) > newest:
                continue
            try:
                return (path, read(path)), unknown
            except CorruptError as error:
                bad.append((str(path), error.file.name, error.reason))
                unknown = unknown or error.storage is not None
    except OSError as error:
        if not storage_failed(error):
            raise
        unknown = True
    return None, unknown


def report_rejected(said: Sequence[Mapping[str, Any]], on_reject: OnReject) -> None:
    """Report on every worker what any of them found `bad`, once."""
    for path, file, reason in dict.fromkeys(tuple(each) for theirs in said for each in theirs["bad"]):
        on_reject(Path(path), file, reason)
