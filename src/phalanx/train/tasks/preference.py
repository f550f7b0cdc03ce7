"""Losses of preferences: DPO, IPO, ORPO and SimPO of pairs, KTO of answers with a label.

Each is a few lines over the log-probabilities of whole sequences, so that packing, micro-batches and ranks do not
change it: the sum over pairs (`kto`: answers), and their number. The reference is the model before the first step. Its
log-probabilities are computed once (`reference.py`), so training needs no second model.

Sources: Rafailov et al. 2023 (DPO), Mitchell 2023 (label smoothing), Azar et al. 2023 (IPO, over means of tokens as in
TRL), Hong et al. 2024 (ORPO), Meng et al. 2024 (SimPO), Ethayarajh et al. 2024 (KTO). KTO's reference point is 0 here:
its estimate from other answers of the batch would make the loss depend on how a batch is divided.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.errors import DataError
from phalanx.recipe.schema import PreferenceConfig
from phalanx.train.hf.inputs import get_logits
from phalanx.train.ops.linear_cross_entropy import IGNORED_TARGET, get_current_vocab_shard, linear_log_probs
from phalanx.train.tasks import TensorBatch, add_auxiliary_loss

LOG_PROBS = "log_probs"
"""Name of the log-probabilities in a stored reference."""


@dataclass(frozen=True)
class SequenceScores:
    """Sequences of a batch of b samples, at most d in each: sums of log-probabilities fp32 [b, d], numbers of tokens in
    the loss int64 [b, d] (0: no sequence), and which are rejected bool [b, d]."""

    log_probs: Tensor
    num_tokens: Tensor
    is_rejected: Tensor

    @property
    def mean_log_probs(self) -> Tensor:
        """Mean of the log-probabilities of each sequence's tokens, fp32 [b, d]."""
        return self.log_probs / self.num_tokens.clamp(min=1)

    def pairs(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values [b, d] of chosen and rejected sequences, [n] each."""
        is_pair = (self.num_tokens[:, 0::2] > 0) & (self.num_tokens[:, 1::2] > 0)
        return values[:, 0::2][is_pair], values[:, 1::2][is_pair]


def score_sequences(token_log_probs: Tensor, batch: TensorBatch) -> SequenceScores:
    """Sum log-probabilities of targets fp32 [b, s], 0 where there is none, over the sequences of a batch."""
    documents, has_target = batch["documents"].long(), batch["targets"] != IGNORED_TARGET
    size = int(documents.max()) + 1
    shape = documents.shape[0], size + size % 2  # pairs of sequences
    sums = token_log_probs.new_zeros(shape).scatter_add(1, documents, token_log_probs)
    counts = documents.new_zeros(shape).scatter_add(1, documents, has_target.long())
    rejected = documents.new_zeros(shape).scatter_add(1, documents, (batch["rejected"] & has_target).long())
    return SequenceScores(sums, counts, rejected > 0)


def compute_token_log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probability fp32 [b, s] of each target [b, s] by logits [b, s, v]; 0 where there is none."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED_TARGET)
    return -losses.view(targets.shape)


class Preference:
    """The task `preference`. `reference` is set before the first step of a loss that needs one: log-probabilities fp32
    [ids, d] by sample id; until then, as in trials, the model is its own reference."""

    def __init__(self, config: PreferenceConfig):
        self.config = config
        self.reference: Tensor | None = None

    def set_reference(self, reference: Mapping[str, Tensor], device: torch.device) -> None:
        """Take what the run stored before its first step."""
        self.reference = reference[LOG_PROBS].to(device)

    def inputs(self, batch: TensorBatch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (batch["tokens"],), {"documents": batch["documents"]}

    def loss(self, output: Any, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        token_log_probs = compute_token_log_probs(get_logits(output), batch["targets"])
        loss, num_terms = self._compute_loss(token_log_probs, batch)
        return add_auxiliary_loss(loss, num_terms, output), num_terms

    def head_loss(self, hidden: Tensor, weight: Tensor, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        """Compute the loss from the input of the output layer, hidden [b, s, w], and its weight [v, w], without
        materializing all logits."""
        targets = batch["targets"]
        log_probs = linear_log_probs(hidden.flatten(0, 1), weight, targets.flatten(), get_current_vocab_shard())
        return self._compute_loss(log_probs.view(targets.shape), batch)

    def metrics(self, output: Any, batch: TensorBatch) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Return how often the chosen answer has the higher reward, and by how much; of labels the rewards."""
        scores = score_sequences(compute_token_log_probs(get_logits(output), batch["targets"]), batch)
        rewards = self._rewards(scores, batch)
        if self.config.loss == "kto":
            good = (scores.num_tokens > 0) & ~scores.is_rejected
            bad = (scores.num_tokens > 0) & scores.is_rejected
            return {
                "reward_desirable": (rewards[good].sum(), good.sum()),
                "reward_undesirable": (rewards[bad].sum(), bad.sum()),
            }
        chosen, rejected = scores.pairs(rewards)
        count = torch.tensor(len(chosen), device=chosen.device)
        return {
            "reward_accuracy": ((chosen > rejected).float().sum(), count),
            "reward_margin": ((chosen - rejected).sum(), count),
        }

    def _rewards(self, scores: SequenceScores, batch: TensorBatch) -> Tensor:
        """The implicit rewards [b, d]."""
        if not self.config.needs_reference:
            return self.config.beta * scores.mean_log_probs
        return self.config.beta * (scores.log_probs - self._reference_of(scores, batch))

    def _reference_of(self, scores: SequenceScores, batch: TensorBatch) -> Tensor:
        """The reference's log-probabilities [b, d] of the sequences."""
        if self.reference is None:
            return scores.log_probs.detach()
        rows = self.reference[batch["sample_ids"]]
        width = scores.log_probs.shape[1]
        return F.pad(rows, (0, max(width - rows.shape[1], 0)))[:, :width].to(scores.log_probs.dtype)

    def _compute_loss(self, token_log_probs: Tensor, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        scores, config = score_sequences(token_log_probs, batch), self.config
        if config.loss == "kto":
            return self._compute_kto(scores, batch)
        is_chosen, is_second = scores.pairs(~scores.is_rejected)
        if not bool(is_chosen.all() & ~is_second.any()):
            raise DataError(f"data.source: the loss {config.loss} is of pairs, and a sample has answers with labels")
        losses = self._compute_pair_losses(scores, batch)
        if config.chat_loss_weight:
            losses = losses - config.chat_loss_weight * scores.pairs(scores.mean_log_probs)[0]
        return losses.sum(), torch.tensor(len(losses), device=losses.device)

    def _compute_pair_losses(self, scores: SequenceScores, batch: TensorBatch) -> Tensor:
        """The losses of pairs [n]."""
        config = self.config
        if config.loss == "simpo":
            chosen, rejected = scores.pairs(scores.mean_log_probs)
            return -F.logsigmoid(config.beta * (chosen - rejected) - config.margin)
        if config.loss == "orpo":
            chosen, rejected = scores.pairs(scores.mean_log_probs)
            log_odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
            return -chosen - config.beta * F.logsigmoid(log_odds)
        log_ratios = scores.log_probs - self._reference_of(scores, batch)
        if config.loss == "ipo":
            chosen, rejected = scores.pairs(log_ratios / scores.num_tokens.clamp(min=1))
            return (chosen - rejected - 1 / (2 * config.beta)) ** 2
        chosen, rejected = scores.pairs(log_ratios)
        logits, smoothing = config.beta * (chosen - rejected), config.label_smoothing
        return -F.logsigmoid(logits) * (1 - smoothing) - F.logsigmoid(-logits) * smoothing

    def _compute_kto(self, scores: SequenceScores, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        rewards, is_sequence = self._rewards(scores, batch), scores.num_tokens > 0
        weights = torch.where(
            scores.is_rejected, self.config.undesirable_weight, self.config.desirable_weight
        ) * is_sequence.to(rewards.dtype)
        losses = torch.sigmoid(torch.where(scores.is_rejected, rewards, -rewards))
        return (weights * losses).sum(), is_sequence.sum()


class SequenceLogProbs(Preference):
    """The log-probabilities [b, d] of a batch's sequences in place of a loss: what a reference is computed with."""

    def _compute_loss(self, token_log_probs: Tensor, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        scores = score_sequences(token_log_probs, batch)
        return scores.log_probs, scores.num_tokens.count_nonzero()
