"""Numeric precision: in what the model computes, and the loss scale that fp16 needs.

Parameters, gradients, their sums and the optimizer's state are always fp32; `bf16` and `fp16` are what matmuls and
convolutions compute in (autocast). `fp8` is bf16 but for some linear layers (distributed/float8_select.py); `tf32` is
fp32 whose products NVIDIA's tensor cores may round to 10 bits, and the same as fp32 elsewhere.
"""

import contextlib
import math
from dataclasses import dataclass

import torch

from phalanx.recipe.devices import device_kind_of

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def autocast_context(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The context in which the model's forward and the loss run."""
    if precision not in AUTOCAST_DTYPES:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=AUTOCAST_DTYPES[precision])


def set_matmul_precision(precision: str, device: torch.device) -> None:
    """What fp32 products and convolutions of this process are computed in: fp32, with `tf32` on a GPU in TF32."""
    if device_kind_of(device.type).is_gpu:
        fast = precision == "tf32"
        torch.set_float32_matmul_precision("high" if fast else "highest")
        torch.backends.cudnn.allow_tf32 = fast  # torch's own default is True, whatever matmuls do


@dataclass
class GradScaler:
    """Keeps fp16 gradients from vanishing: losses are multiplied by `scale` and the sum of gradients divided by it.

    An overflow halves the scale and the step is skipped; `growth_interval` good steps in a row double it. All workers
    see the
    same summed gradient, so they decide alike without asking each other. Scales are powers of two: dividing by them is
    exact. (Micikevicius et al. 2018, Mixed Precision Training.)
    """

    scale: float = 1.0
    good_steps: int = 0
    dynamic: bool = False
    growth_interval: int = 2000

    @classmethod
    def for_precision(cls, precision: str, num_terms: int) -> "GradScaler":
        """The scale to begin with. The loss is a sum over about `num_terms` terms of the global batch, so it starts
        lower by that factor than the 65,536 that is usual for a mean."""
        if precision != "fp16":
            return cls()
        return cls(scale=2.0 ** max(0, 16 - math.ceil(math.log2(max(1, num_terms)))), dynamic=True)

    def update(self, overflow: bool) -> None:
        """Take note of a step."""
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
