"""Evaluate a run's checkpoint on its validation set."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from phalanx.data import RunData, open_data
from phalanx.errors import UsageError
from phalanx.run import Run
from phalanx.train.distributed.environment import DistEnv, dist_env_from_environment
from phalanx.train.distributed.mesh import make_single_worker_mesh
from phalanx.train.evaluation import EvaluationResult, evaluate
from phalanx.train.inference import TrainedModel, check_data, given_device, load_trained_model
from phalanx.train.loss import LossFn, LossModule
from phalanx.train.reference import load_reference
from phalanx.train.tasks import AssistantTokens, Classification, Task, load_task
from phalanx.train.tasks.preference import Preference

ReportWarning = Callable[[str], None]


@dataclass(frozen=True)
class CheckpointSelection:
    """Which checkpoint of a run to load: that of `step`, the best, or by default the newest good one."""

    step: int | None = None
    best: bool = False
    trust_code: bool = False
    """Import the run's code even if this user has not trained with it."""


def load_model(run: Run, selection: CheckpointSelection, device: torch.device, warn: ReportWarning) -> TrainedModel:
    """Load the model in evaluation mode; call `warn` for what of the run is lost or damaged."""
    trained = load_trained_model(run, selection.step, selection.best, device, selection.trust_code)
    for note in trained.notes:
        warn(note)
    return trained


@dataclass(frozen=True)
class CheckpointScores:
    """What a checkpoint scores on the validation set."""

    checkpoint: str
    task: str
    result: EvaluationResult


def evaluate_run(
    run: Run,
    selection: CheckpointSelection,
    device: str | None = None,
    max_samples: int | None = None,
    warn: ReportWarning = lambda text: None,
) -> CheckpointScores:
    """Evaluate the selected checkpoint in this process.

    Args:
        device: default: the `device` of the run's recipe.
        max_samples: default: the whole validation set.
        warn: called for what of the run is lost or damaged.

    Raises:
        UsageError: the run has no such checkpoint, or no validation set.
        DataError: the checkpoint or the data are damaged.
    """
    dist_env = dist_env_from_environment({}, device or given_device(run))
    trained = load_model(run, selection, dist_env.device, warn)
    recipe = trained.recipe
    check_data(recipe)
    data = open_data(recipe.data, recipe.evaluation, recipe.seed)
    if data.num_validation_samples == 0:
        raise UsageError(
            f"{run.location}: no validation set (evaluation.holdout_fraction = 0 and no evaluation.source)"
        )
    task = AssistantTokens() if recipe.task == "chat" else load_task(recipe.task, trained.folder)
    if isinstance(task, Classification):
        task.normalization = trained.image_normalization
    if isinstance(task, Preference) and (reference := load_reference(run, data.fingerprint)) is not None:
        task.set_reference(reference, dist_env.device)
    result = score_model(trained, task, data, dist_env, max_samples or data.num_validation_samples)
    return CheckpointScores(trained.checkpoint.name, recipe.task_kind, result)


def score_model(
    trained: TrainedModel, task: Task, data: RunData, dist_env: DistEnv, max_samples: int
) -> EvaluationResult:
    """Score a model on at most `max_samples` of the validation set, in this process."""
    loss_module = LossModule(trained.model, LossFn(task, trained.recipe.precision, dist_env.device))
    mesh = make_single_worker_mesh()
    micro_size = trained.recipe.batch.micro_size
    result = evaluate(loss_module, data, dist_env=dist_env, mesh=mesh, max_samples=max_samples, micro_size=micro_size)
    assert result is not None  # nothing asks it to stop
    return result
