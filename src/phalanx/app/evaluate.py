"""Evaluate a run's checkpoint on its validation set."""

from dataclasses import dataclass

from phalanx.app.trained_model import CheckpointSelection, ReportWarning, load_model
from phalanx.data import open_data
from phalanx.errors import UsageError
from phalanx.run import Run
from phalanx.train.distributed.environment import dist_env_from_environment
from phalanx.train.distributed.mesh import make_single_worker_mesh
from phalanx.train.evaluation import EvaluationResult, evaluate
from phalanx.train.inference import check_data, given_device
from phalanx.train.loss import LossFn, LossModule
from phalanx.train.tasks import Classification, load_task


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
        raise UsageError(f"{run.path}: no validation set (evaluation.holdout_fraction = 0 and no evaluation.source)")
    task = load_task(recipe.task, trained.folder)
    if isinstance(task, Classification):
        task.normalization = trained.image_normalization
    result = evaluate(
        LossModule(trained.model, LossFn(task, recipe.precision, dist_env.device)),
        data,
        dist_env=dist_env,
        mesh=make_single_worker_mesh(),
        max_samples=max_samples or data.num_validation_samples,
        micro_size=recipe.batch.micro_size,
    )
    assert result is not None  # nothing asks it to stop
    return CheckpointScores(trained.checkpoint.name, recipe.task, result)
