"""Numeric precision: the dtype of computation, and the loss scale for fp16.

Parameters, gradients, their sums and the optimizer's state are always fp32. `bf16` and `fp16` are the dtypes of matmuls
and convolutions (autocast). `fp8` is bf16 except for large linear layers (ops/float8.py). `tf32` is fp32 with matmuls
that NVIDIA's tensor cores may round to 10 bits; elsewhere it is the same as fp32.
"""

import contextlib
import math
from dataclasses import dataclass

import torch

from phalanx.recipe.devices import device_kind_of

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def autocast_context(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context for the model's forward and the loss."""
    if precision not in AUTOCAST_DTYPES:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=AUTOCAST_DTYPES[precision])


def set_matmul_precision(precision: str, device: torch.device) -> None:
    """Set the precision of this process's fp32 matmuls and convolutions: fp32, or TF32 for `tf32` on a GPU."""
    if device_kind_of(device.type).is_gpu:
        fast = precision == "tf32"
        torch.set_float32_matmul_precision("high" if fast else "highest")
        torch.backends.cudnn.allow_tf32 = fast  # torch's default is True, independent of matmuls


@dataclass
class GradScaler:
    """Keeps fp16 gradients from vanishing: losses are multiplied by `scale` and the sum of gradients divided by it.

    An overflow halves the scale and the step is skipped; `growth_interval` good steps in a row double it. All workers
    see the same summed gradient, so they make the same decisions without communication. Scales are powers of two, so
    dividing by them is exact. (Micikevicius et al. 2018, Mixed Precision Training.)
    """

    scale: float = 1.0
    good_steps: int = 0
    dynamic: bool = False
    growth_interval: int = 2000

    @classmethod
    def for_precision(cls, precision: str, num_terms: int) -> "GradScaler":
        """Make the initial scaler. The loss is a sum over about `num_terms` terms of the global batch, so the scale
        starts lower by this factor than 65,536, which is usual for a mean."""
        if precision != "fp16":
            return cls()
        return cls(scale=2.0 ** max(0, 16 - math.ceil(math.log2(max(1, num_terms)))), dynamic=True)

    def update(self, overflow: bool) -> None:
        """Update the scale after a step."""
        if not self.dynamic:
            return
        if overflow:
            self.scale = max(self.scale / 2, 2.0**-14)
            self.good_steps = 0
        else:
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.scale *= 2
                self.good_steps = 0

    @property
    def at_min_scale(self) -> bool:
        """Whether the scale cannot be lowered any more."""
        return not self.dynamic or self.scale <= 2.0**-14

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state as tensors, for a checkpoint; empty if the scale is fixed."""
        if not self.dynamic:
            return {}
        values = {"scale": self.scale, "good_steps": self.good_steps}
        return {f"scaler/{name}": torch.tensor(float(value), dtype=torch.float64) for name, value in values.items()}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Restore the state of a checkpoint; an empty one, of a run without a dynamic scale, changes nothing."""
        if self.dynamic and state:
            self.scale = float(state["scaler/scale"])
            self.good_steps = int(state["scaler/good_steps"])
