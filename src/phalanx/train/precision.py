"""Numeric precision: in what the model computes, and the loss scale that fp16 needs.

Parameters, gradients, their sums and the optimizer's state are always fp32; `bf16` and `fp16` are what matmuls and
convolutions compute in (autocast).
"""

import contextlib
import math
from dataclasses import dataclass

import torch

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def computing(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The context in which the model's forward and the loss run."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=AUTOCAST[precision])


@dataclass
class LossScale:
    """Keeps fp16 gradients from vanishing: losses are multiplied by `scale` and the sum of gradients divided by it.

    An overflow halves the scale and the step is skipped; `interval` good steps in a row double it. All workers see the
    same summed gradient, so they decide alike without asking each other. Scales are powers of two: dividing by them is
    exact. (Micikevicius et al. 2018, Mixed Precision Training.)
    """

    scale: float = 1.0
    good_steps: int = 0
    dynamic: bool = False
    interval: int = 2000

    @classmethod
    def for_precision(cls, precision: str, terms: int) -> "LossScale":
        """The scale to begin with. The loss is a sum over about `terms` terms of the global batch, so it starts lower
        by that factor than the 65,536 that is usual for a mean."""
        if precision != "fp16":
            return cls()
        return cls(scale=2.0 ** max(0, 16 - math.ceil(math.log2(max(1, terms)))), dynamic=True)

    def update(self, overflow: bool) -> None:
        """Take note of a step."""
        if not self.dynamic:
            return
        if overflow:
            self.scale = max(self.scale / 2, 2.0**-14)
            self.good_steps = 0
        else:
            self.good_steps += 1
            if self.good_steps == self.interval:
                self.scale *= 2
                self.good_steps = 0

    @property
    def at_bottom(self) -> bool:
        """Whether lowering the scale cannot help any more."""
        return not self.dynamic or self.scale <= 2.0**-14

    def state(self) -> dict[str, torch.Tensor]:
        """Its state as tensors, for a checkpoint; empty when the scale is fixed."""
        if not self.dynamic:
            return {}
        values = {"scale": self.scale, "good_steps": self.good_steps}
        return {f"scaler/{name}": torch.tensor(float(value), dtype=torch.float64) for name, value in values.items()}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Take over the state of a checkpoint; one of a run without a dynamic scale (empty) changes nothing."""
        if self.dynamic and state:
            self.scale = float(state["scaler/scale"])
            self.good_steps = int(state["scaler/good_steps"])
