"""Quantization-aware training: linear layers compute with the weights that an INT4 export of the model would hold.

Gradients pass the rounding unchanged (straight-through, Bengio et al. 2013), and what is trained and saved is the
weight before it. The layers, scales and rounding are those of the export, so that it computes what was trained.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.train.checkpoint.export_forms.compressed_tensors import choose_layers
from phalanx.train.checkpoint.export_forms.int4 import INT4_FORM, round_weight


class Int4AwareLinear(nn.Linear):
    """A linear layer that rounds its weight in each forward. Parameters, names and dtypes are those of nn.Linear."""

    scale_dtype = torch.float32
    rounds_weight = True

    def forward(self, x: Tensor) -> Tensor:
        weight = _RoundWeight.apply(self.weight, self.scale_dtype) if self.rounds_weight else self.weight
        return F.linear(x, weight, self.bias)


class _RoundWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale_dtype: torch.dtype) -> Tensor:
        return round_weight(weight, scale_dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def make_int4_aware(model: nn.Module, scale_dtype: torch.dtype) -> None:
    """Convert, in place, the layers that an INT4 export quantizes. `scale_dtype`: that of the export. Raises UsageError
    if there are none."""
    for name in choose_layers(INT4_FORM, model)[0]:
        layer: Any = model.get_submodule(name)
        layer.__class__ = Int4AwareLinear
        layer.scale_dtype = scale_dtype
