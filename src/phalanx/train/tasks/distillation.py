"""Distillation: learn the teacher's distribution over the next token (Hinton et al. 2015; Agarwal et al. 2024, GKD)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.recipe.schema import DistillationConfig
from phalanx.train.hf.inputs import get_logits
from phalanx.train.ops.linear_cross_entropy import IGNORED_TARGET
from phalanx.train.tasks import LanguageModeling, TensorBatch, add_auxiliary_loss


class Distillation:
    """The task `distillation`. The teacher is a frozen model on the worker's device; it is no part of what is trained
    or saved. There is no `head_loss`: both distributions are needed as a whole."""

    def __init__(self, config: DistillationConfig, teacher: nn.Module):
        self.config = config
        self._teacher = teacher.eval().requires_grad_(False)

    def inputs(self, batch: TensorBatch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return LanguageModeling().inputs(batch)

    def loss(self, output: Any, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        is_target = batch["targets"] != IGNORED_TARGET
        student = get_logits(output)[is_target].float()  # [n, v]
        args, kwargs = self.inputs(batch)
        with torch.no_grad():
            teacher = get_logits(self._teacher(*args, **kwargs))[is_target].float()
        weight, num_terms = self.config.data_loss_weight, is_target.sum()
        losses = (1 - weight) * compute_divergence(student, teacher, self.config).sum()
        if weight:
            losses = losses + weight * F.cross_entropy(student, batch["targets"][is_target], reduction="sum")
        return add_auxiliary_loss(losses, num_terms, output), num_terms


def compute_divergence(student: Tensor, teacher: Tensor, config: DistillationConfig) -> Tensor:
    """Return the divergence [n] of the distributions of logits [n, v], times the temperature squared."""
    temperature = config.temperature
    log_p, log_q = ((logits / temperature).log_softmax(-1) for logits in (teacher, student))
    if config.divergence == "forward":
        divergence = kl_divergence(log_p, log_q)
    elif config.divergence == "reverse":
        divergence = kl_divergence(log_q, log_p)
    else:
        share = torch.tensor(config.jsd_beta, dtype=log_p.dtype, device=log_p.device)
        log_mixture = torch.logaddexp(log_p + share.log(), log_q + (1 - share).log())
        divergence = share * kl_divergence(log_p, log_mixture) + (1 - share) * kl_divergence(log_q, log_mixture)
    return divergence * temperature**2


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p, q) [n] of log-probabilities [n, v]."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)
