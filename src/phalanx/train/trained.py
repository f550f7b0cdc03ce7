"""A trained model out of a run: for text, scores, or anything else that only needs the weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from phalanx.data import Facts
from phalanx.errors import DataError, UsageError
from phalanx.recipe import Recipe, load_recipe
from phalanx.run import Run
from phalanx.run.trust import HUGGING_FACE, check_trusted, code_of
from phalanx.train.checkpoint import checkpoint_name, list_checkpoints, load_tensors, newest_good
from phalanx.train.checkpoint.format import EXTRA
from phalanx.train.model import build_model
from phalanx.train.savable import extra_modules
from phalanx.train.saving import best_file
from phalanx.train.state import load_model, model_tensors
from phalanx.train.weights import allocate

LARGEST = 1 << 31
"""Beyond every vocabulary, number of classes, length of a sequence and side of a picture."""


@dataclass(frozen=True)
class Trained:
    """The model in evaluation mode, with what it was trained by."""

    model: nn.Module
    recipe: Recipe
    facts: Facts
    folder: Path | None
    checkpoint: Path


def load_trained(run: Run, step: int | None, best: bool, device: torch.device, trusted: bool = False) -> Trained:
    """The model of the run's checkpoint of `step`, of its best one, or of its newest good one.

    UsageError when there is no such checkpoint, and where the run needs code that this user has not trained with unless
    it is `trusted`; DataError when it is damaged.
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
    facts = _facts(run, plan["facts"])
    named = environment.get("folder")
    if not isinstance(named, str) or not Path(named).is_absolute() or "\0" in named:
        raise DataError(f"{run.environment}: folder is {named!r}, expected an absolute path")
    folder = Path(named)
    if not trusted:
        check_trusted(run.path, recipe, folder)
    # Without code of the user's own no module is looked for in a folder that a stranger may have named.
    modules = folder if code_of(recipe) or recipe.model.build.startswith(HUGGING_FACE) else None
    model = build_model(recipe.model, facts, modules, recipe.seed, device, recipe.adapter, load=False)
    allocate([model], device)
    names = [*model_tensors(model), *(EXTRA + name for name in extra_modules(model))]
    with torch.no_grad():
        load_model(model, load_tensors(checkpoint, names), str(checkpoint))
    return Trained(model.eval(), recipe, facts, folder if code_of(recipe) else None, checkpoint)


def _facts(run: Run, told: Any) -> Facts:
    """What plan.json says of the data. DataError where that is not of its kind."""
    try:
        facts = TypeAdapter(Facts).validate_python(told)
        sizes = (facts.vocab, facts.classes, facts.sequence, *(facts.shape or ()))
        if not all(size is None or 0 < size < LARGEST for size in sizes):
            raise ValueError(f"sizes {sizes}")
    except ValueError as error:  # pydantic's, too
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise DataError(f"{run.plan}: facts is not what data have ({why})") from None
    return facts


def _choose(run: Run, step: int | None, best: bool) -> Path:
    if best:
        chosen = run.read_json(best_file(run))
        if chosen is None:
            raise UsageError(f"{run.path}: no best checkpoint is recorded; the run has not evaluated and saved yet")
        step = chosen.get("step")
        if type(step) is not int:
            raise DataError(f"{best_file(run)}: step is {step!r}, expected a number")
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
