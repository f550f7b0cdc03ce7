"""Sentence embeddings from plain text: the halves of a passage should lie closer to each other than to those of others
(a contrastive loss with the other passages of the micro-batch as negatives; van den Oord et al. 2018).
"""

from typing import Any

import torch
from torch.nn import functional as F

Batch = dict[str, torch.Tensor]
CLS, SEP = 101, 102  # tokens that BERT's kind expects around a text


class Neighbours:
    """A batch holds `tokens`, int64 [passages, sequence]. The loss of a passage depends on the others of its
    micro-batch, so here `batch.micro_size` is part of what is learned: the recipe gives it."""

    temperature = 0.05

    def inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """First all left halves, then all right ones: [2 passages, sequence / 2 + 2]."""
        left, right = batch["tokens"].chunk(2, dim=1)
        halves = F.pad(torch.cat((left, right)), (1, 0), value=CLS)
        return (F.pad(halves, (0, 1), value=SEP),), {}

    def loss(self, output: Any, batch: Batch) -> tuple[torch.Tensor, int]:
        """The sum over passages of: which of all right halves belongs to this left one?"""
        similar = self.similarities(output)
        own = torch.arange(len(similar), device=similar.device)
        return F.cross_entropy(similar / self.temperature, own, reduction="sum"), len(similar)

    def metrics(self, output: Any, batch: Batch) -> dict[str, tuple[torch.Tensor, int]]:
        """How often the right half that lies closest is the right one."""
        similar = self.similarities(output)
        own = torch.arange(len(similar), device=similar.device)
        return {"accuracy": ((similar.argmax(1) == own).sum(), len(similar))}

    def similarities(self, output: Any) -> torch.Tensor:
        """Cosines [passages, passages] of left and right halves; an embedding is the mean over tokens, as the model was
        trained."""
        embeddings = F.normalize(output.last_hidden_state.float().mean(1), dim=-1)
        left, right = embeddings.chunk(2)
        return left @ right.T
