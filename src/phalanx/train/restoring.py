"""Going back to a checkpoint: which one is good for every worker, and each worker's part of it."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.errors import storage_failed
from phalanx.run import Run
from phalanx.train.checkpoint import (
    CorruptError,
    Loaded,
    checkpoint_name,
    list_checkpoints,
    load_newest,
    load_tensors,
    read_manifest,
    step_of,
)
from phalanx.train.optimizers import Optimizer
from phalanx.train.parallel.divided import Divided
from phalanx.train.place import Place
from phalanx.train.precision import LossScale
from phalanx.train.state import load_held, load_state

OnReject = Callable[[Path, str, str], None]
NONE, UNKNOWN = -1, -2
"""Instead of a checkpoint's step: none is good; or storage could not read one that may be."""


def restore(
    run: Run, place: Place, divided: Divided, optimizer: Optimizer, scale: LossScale, on_reject: OnReject
) -> Loaded | None:
    """Load the newest checkpoint that is good for every worker into the model, optimizer and scale; None when there is
    none. OSError on every worker when one's storage failed and there is no other that all can read: a checkpoint that
    cannot be read now may be good."""
    if not divided.alike:
        return _restore_parts(run, place, divided, optimizer, scale, on_reject)
    loaded, step = None, NONE
    try:
        loaded = load_newest(run.checkpoints, on_reject)
        step = NONE if loaded is None else step_of(loaded.path)
    except OSError as error:
        if not storage_failed(error):
            raise
        step = UNKNOWN
    step = _oldest(place, step)
    if step < 0:
        _check_known(run, step)
        return None
    if loaded is None or step_of(loaded.path) != step:  # another worker could not read a newer one
        path = run.checkpoints / checkpoint_name(step)
        manifest = read_manifest(path)
        loaded = Loaded(path, manifest, load_tensors(path, manifest=manifest))
    load_state(divided.modules[0], optimizer, scale, loaded.tensors, str(loaded.path))
    return loaded


def _restore_parts(
    run: Run, place: Place, divided: Divided, optimizer: Optimizer, scale: LossScale, on_reject: OnReject
) -> Loaded | None:
    """`restore` where each worker reads only what it holds: they try one checkpoint after the other together, since one
    may be bad in a part that only one of them reads."""
    worst = NONE
    for path in list_checkpoints(run.checkpoints):
        step = step_of(path)
        try:
            manifest = read_manifest(path)
            load_held(divided, optimizer, scale, path, manifest)
        except CorruptError as error:
            on_reject(path, error.file.name, error.reason)
            step = NONE if error.storage is None else UNKNOWN
        if (agreed := _oldest(place, step)) >= 0:
            return Loaded(path, manifest, {})
        worst = min(worst, agreed)
    _check_known(run, worst)
    return None


def _oldest(place: Place, step: int) -> int:
    """The oldest of the checkpoints that the workers read; NONE or UNKNOWN when one of them could read none."""
    if place.world > 1:
        oldest = torch.tensor(step, device=place.device)
        dist.all_reduce(oldest, dist.ReduceOp.MIN)
        return int(oldest)
    return step


def _check_known(run: Run, why: int) -> None:
    """OSError unless it is known that there is no checkpoint to go on from."""
    if why == UNKNOWN:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(run.checkpoints))
