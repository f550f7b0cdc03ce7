"""Next-byte prediction with label smoothing, and the share of bytes that were guessed right."""

from typing import Any

import torch
from torch.nn import functional as F

Batch = dict[str, torch.Tensor]
IGNORED = -100  # a target that does not count


class SmoothedBytes:
    """A batch holds `tokens` and `targets`, int64 [samples, sequence] each."""

    smoothing = 0.1

    def inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the model's forward."""
        return (batch["tokens"],), {}

    def loss(self, output: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The *sum* of the losses, and how many there are: the engine divides once, over the whole global batch, so
        that the result does not depend on how the batch was split."""
        targets = batch["targets"].flatten()
        total = F.cross_entropy(
            output.flatten(0, 1).float(),
            targets,
            ignore_index=IGNORED,
            label_smoothing=self.smoothing,
            reduction="sum",
        )
        return total, (targets != IGNORED).sum()

    def metrics(self, output: torch.Tensor, batch: Batch) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Optional. Each metric is a sum and a count, too; they are taken on held-out data."""
        targets = batch["targets"]
        # An ignored target is no token, so no guess can equal it.
        return {"accuracy": ((output.argmax(-1) == targets).sum(), (targets != IGNORED).sum())}
