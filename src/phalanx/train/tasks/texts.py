"""Tasks of whole texts: a reward learnt from pairs, the class of a text, and embeddings.

The texts of a micro-batch are computed together, one in a row, with padding behind the shorter ones and a mask, as
transformers does it. So one call of the model serves encoders and decoders, and an export gives the same scores.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.errors import RecipeError
from phalanx.train.hf.inputs import get_logits
from phalanx.train.tasks import TensorBatch, add_auxiliary_loss

Metrics = Mapping[str, tuple[Tensor, int]]


def split_texts(batch: TensorBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Put each text of a batch's samples into a row of its own, as long as the longest one. Returns tokens and mask (1:
    a token) int64 [n, l], and the number of each text in its sample [n]."""
    sequences = batch["sequences"].long()
    is_token, samples = sequences >= 0, torch.arange(len(sequences), device=sequences.device)[:, None]
    keys = (samples * sequences.shape[1] + sequences)[is_token]
    _, row, lengths = torch.unique_consecutive(keys, return_inverse=True, return_counts=True)
    starts = lengths.cumsum(0) - lengths
    column = torch.arange(len(row), device=row.device) - starts[row]
    tokens, mask = keys.new_zeros(2, len(lengths), int(lengths.max()))
    tokens[row, column], mask[row, column] = batch["tokens"][is_token], 1
    return tokens, mask, sequences[is_token][starts]


class TextTask:
    """What these tasks have in common. Their losses are over samples."""

    def __init__(self, config: Any):
        self.config = config

    def inputs(self, batch: TensorBatch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens, mask, _ = split_texts(batch)
        return (tokens,), {"attention_mask": mask}

    def loss(self, output: Any, batch: TensorBatch) -> tuple[Tensor, int]:
        losses = self._compute_losses(output, batch)
        return add_auxiliary_loss(losses.sum(), len(losses), output), len(losses)

    def metrics(self, output: Any, batch: TensorBatch) -> Metrics:
        """Return the sum over samples, and their number, of each measure."""
        return {name: (values.sum(), len(values)) for name, values in self._measure(output, batch).items()}

    def _compute_losses(self, output: Any, batch: TensorBatch) -> Tensor:
        """The loss of each sample [b]."""
        raise NotImplementedError

    def _measure(self, output: Any, batch: TensorBatch) -> dict[str, Tensor]:
        """Measures of each sample [b]."""
        raise NotImplementedError


class Reward(TextTask):
    """The task `reward` (Bradley-Terry; TRL's RewardTrainer): the chosen text of a pair is to have the higher score, by
    `margin` where a record has one."""

    def _compute_losses(self, output: Any, batch: TensorBatch) -> Tensor:
        chosen, rejected = get_scores(output, 1).view(-1, 2).unbind(1)
        centering: Tensor = self.config.center_rewards_coefficient * (chosen + rejected) ** 2
        return centering - F.logsigmoid(chosen - rejected - batch["margins"])

    def _measure(self, output: Any, batch: TensorBatch) -> dict[str, Tensor]:
        chosen, rejected = get_scores(output, 1).view(-1, 2).unbind(1)
        measures = {"reward_accuracy": chosen > rejected, "reward_margin": chosen - rejected}
        return {**measures, "reward_chosen": chosen, "reward_rejected": rejected}


class TextClassification(TextTask):
    """The task `text-classification`: cross-entropy over classes, as transformers has it for a single label."""

    def _compute_losses(self, output: Any, batch: TensorBatch) -> Tensor:
        return F.cross_entropy(get_scores(output, len(self.config.classes)), batch["labels"], reduction="none")

    def _measure(self, output: Any, batch: TensorBatch) -> dict[str, Tensor]:
        return {"accuracy": get_scores(output, len(self.config.classes)).argmax(1) == batch["labels"]}


class Embedding(TextTask):
    """The task `embedding`: which of the positives and negatives of the micro-batch belongs to an anchor
    (MultipleNegativesRankingLoss of sentence-transformers; InfoNCE)?"""

    def _compute_losses(self, output: Any, batch: TensorBatch) -> Tensor:
        logits = self.config.scale * self._compute_cosines(output, batch)
        return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device), reduction="none")

    def _measure(self, output: Any, batch: TensorBatch) -> dict[str, Tensor]:
        cosines = self._compute_cosines(output, batch)
        own = torch.arange(len(cosines), device=cosines.device)
        return {"accuracy": cosines.argmax(1) == own, "cosine": cosines.diagonal()}

    def _compute_cosines(self, output: Any, batch: TensorBatch) -> Tensor:
        """The cosines [b, n] of anchors with the b positives, then with the negatives."""
        _, mask, number = split_texts(batch)
        embeddings = F.normalize(pool_hidden(output, mask, self.config.pooling), dim=-1)
        return embeddings[number == 0] @ torch.cat((embeddings[number == 1], embeddings[number > 1])).T


def get_scores(output: Any, width: int) -> Tensor:
    """Return the scores fp32 [n, width] of n texts. Raises RecipeError if the model has others."""
    logits = get_logits(output)
    if logits.dim() != 2 or logits.shape[1] != width:
        raise RecipeError(
            f"task: the model returned logits of shape {list(logits.shape)}, expected {width} for each text; use a "
            f"model of sequence classification with model.args.num_labels={width}"
        )
    return logits.float()


def pool_hidden(output: Any, mask: Tensor, pooling: str) -> Tensor:
    """Return the embedding fp32 [n, w] of each text by the last hidden states [n, l, w] in a model's output, or the
    output itself, and the mask [n, l] of its tokens. Raises RecipeError if there are none."""
    hidden = output if isinstance(output, Tensor) else getattr(output, "last_hidden_state", None)
    if hidden is None or hidden.dim() != 3:
        raise RecipeError("task: embedding needs hidden states [n, l, w]; use model.args.architectures=[AutoModel]")
    if pooling == "mean":
        return (hidden.float() * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
    at = torch.zeros_like(mask[:, 0]) if pooling == "cls" else mask.sum(1) - 1
    return hidden[torch.arange(len(hidden), device=hidden.device), at].float()


TEXT_TASKS = {"reward": Reward, "text-classification": TextClassification, "embedding": Embedding}
"""Tasks by the `kind` of a recipe's key `task`."""
