"""Going back to a checkpoint: which one is good for every worker, and each worker's part of it."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

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


def restore(
    run: Run, place: Place, divided: Divided, optimizer: Optimizer, scale: LossScale, on_reject: OnReject
) -> Loaded | None:
    """Load the newest checkpoint that is good for every worker into the model, optimizer and scale; None when there is
    none."""
    if not divided.mesh.only_replicates:
        return _restore_parts(run, place, divided, optimizer, scale, on_reject)
    loaded = load_newest(run.checkpoints, on_reject)
    step = _agreed_step(place, None if loaded is None else loaded.path)
    if step is None:
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
    for path in list_checkpoints(run.checkpoints):
        good = True
        try:
            manifest = read_manifest(path)
            load_held(divided, optimizer, scale, path, manifest)
        except CorruptError as error:
            on_reject(path, error.file.name, error.reason)
            good = False
        if _agreed_step(place, path if good else None) is not None:
            return Loaded(path, manifest, {})
    return None


def _agreed_step(place: Place, path: Path | None) -> int | None:
    """The oldest of the checkpoints that the workers read; None when one of them could read none."""
    step = -1 if path is None else step_of(path)
    if place.world > 1:
        oldest = torch.tensor(step, device=place.device)
        dist.all_reduce(oldest, dist.ReduceOp.MIN)
        step = int(oldest)
    return None if step < 0 else step
