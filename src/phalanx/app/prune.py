"""Choose what a trained model keeps when it is made smaller, and measure what that costs."""

import torch

from phalanx.app.evaluate import score_model
from phalanx.data import RunData
from phalanx.errors import UsageError
from phalanx.train.checkpoint.format import read_manifest
from phalanx.train.checkpoint.pruning import PruningPlan, PruningRequest, find_family, plan_pruning
from phalanx.train.distributed.environment import dist_env_from_environment
from phalanx.train.hf.reload import ProofCheck
from phalanx.train.inference import TrainedModel
from phalanx.train.tasks import LanguageModeling

NUM_SAMPLES = 128
"""Training samples that decide what is kept."""


def prune_trained(
    trained: TrainedModel, data: RunData, request: PruningRequest
) -> tuple[PruningPlan, list[ProofCheck]]:
    """Choose by training samples what is kept, and mask the rest in the model. Return the choice, what it keeps of the
    importance, and the loss of the validation set before and after. Raises UsageError if there is no such set, or the
    model has less than is asked for."""
    if not data.num_validation_samples:
        raise UsageError("pruning measures the validation loss, and the run has no validation set")
    before = _compute_validation_loss(trained, data)
    samples = range(min(NUM_SAMPLES, data.num_train_samples))
    inputs = (torch.from_numpy(data.read_training(number, 1)["tokens"]) for number in samples)
    plan = plan_pruning(trained.model, find_family(read_manifest(trained.checkpoint).meta["model"]), request, inputs)
    plan.mask_model(trained.model)
    after = _compute_validation_loss(trained, data)
    shares = {"channel_importance": plan.channel_importance, "block_importance": plan.layer_importance}
    found = (
        f"{len(plan.channels[0])} of {plan.num_channels} channels, {plan.channel_importance:.1%} of the importance; "
    )
    found += f"{len(plan.layers)} of {plan.num_layers} blocks, {plan.layer_importance:.1%}: {list(plan.layers)}"
    loss = f"validation loss {before:.4f} before, {after:.4f} after: {after / before - 1:+.1%}"
    losses = {"before": before, "after": after}
    return plan, [ProofCheck("kept", True, found, shares), ProofCheck("pruning", True, loss, losses)]


def _compute_validation_loss(trained: TrainedModel, data: RunData) -> float:
    dist_env = dist_env_from_environment({}, "cpu")
    return score_model(trained, LanguageModeling(), data, dist_env, trained.recipe.evaluation.max_samples).loss
