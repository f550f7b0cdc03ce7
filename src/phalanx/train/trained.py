"""A trained model out of a run: for text, scores, or anything else that only needs the weights."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from phalanx.data import Facts
from phalanx.errors import DataError, UsageError
from phalanx.recipe import Recipe, load_recipe
from phalanx.run import Run
from phalanx.train.checkpoint import checkpoint_name, list_checkpoints, load_tensors, newest_good
from phalanx.train.model import build_model
from phalanx.train.savable import EXTRA, extra_modules
from phalanx.train.saving import best_file
from phalanx.train.state import load_model, model_tensors
from phalanx.train.weights import allocate


@dataclass(frozen=True)
class Trained:
    """The model in evaluation mode, with what it was trained by."""

    model: nn.Module
    recipe: Recipe
    facts: Facts
    folder: Path
    checkpoint: Path


def load_trained(run: Run, step: int | None, best: bool, device: torch.device) -> Trained:
    """The model of the run's checkpoint of `step`, of its best one, or of its newest good one.

    UsageError when there is no such checkpoint, DataError when it is damaged.
    """
    checkpoint = _choose(run, step, best)
    recipe = load_recipe(run.resolved).recipe
    plan, environment = run.read_json(run.plan), run.read_json(run.environment)
    if plan is None or environment is None:
        raise DataError(f"{run.path}: plan.json or environment.json is missing; they tell how the model is built")
    if "facts" not in plan:
        raise UsageError(
            f"{run.path}: was trained by a loop of its own, and only that script can build the model; "
            f"`phalanx checkpoint export {run.path} OUT` writes its weights"
        )
    facts = Facts(**plan["facts"])
    folder = Path(environment["folder"])
    model = build_model(recipe.model, facts, folder, recipe.seed, device, recipe.adapter, load=False)
    allocate([model], device)
    names = [*model_tensors(model), *(EXTRA + name for name in extra_modules(model))]
    with torch.no_grad():
        load_model(model, load_tensors(checkpoint, names), str(checkpoint))
    return Trained(model.eval(), recipe, facts, folder, checkpoint)


def _choose(run: Run, step: int | None, best: bool) -> Path:
    if best:
        chosen = run.read_json(best_file(run))
        if chosen is None:
            raise UsageError(f"{run.path}: no best checkpoint is recorded; the run has not evaluated and saved yet")
        step = chosen["step"]
    if step is not None:
        path = run.checkpoints / checkpoint_name(step)
        if not path.is_dir():
            known = ", ".join(path.name for path in list_checkpoints(run.checkpoints)) or "none"
            raise UsageError(f"{run.path}: no checkpoint of step {step}; there are: {known}")
        return path
    rejected: list[str] = []
    found = newest_good(run.checkpoints, lambda path, file, reason: rejected.append(f"{path / file}: {reason}"))
    if found is None:
        raise DataError("\n".join(rejected)) if rejected else UsageError(f"{run.path}: no checkpoint yet")
    return found
