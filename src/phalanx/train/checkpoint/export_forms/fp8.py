"""Weights of 8 bits as floating-point numbers (E4M3) with a scale for each output. Servers round the inputs of these
layers, too, with a scale for each token, and multiply in FP8: FP8_DYNAMIC of vLLM and llm-compressor."""

from collections.abc import Mapping

import torch
from torch import Tensor

from phalanx.train.checkpoint.export_forms.compressed_tensors import SCALE_SUFFIX, QuantizedForm

MAX_E4M3 = torch.finfo(torch.float8_e4m3fn).max


def quantize_weight(weight: Tensor, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """weight [out, in] -> `weight` in E4M3 and `weight_scale` [out, 1]."""
    scale = _find_scale(weight, scale_dtype)
    return {"weight": _round_to_e4m3(weight, scale.float()), SCALE_SUFFIX: scale}


def dequantize_weight(tensors: Mapping[str, Tensor]) -> Tensor:
    """`weight` and `weight_scale` -> weight [out, in] in fp32."""
    return tensors["weight"].float() * tensors[SCALE_SUFFIX].float()


def round_inputs(inputs: Tensor) -> Tensor:
    """Round inputs [..., in] to E4M3 and back, with a scale for each token."""
    scale = _find_scale(inputs, inputs.dtype)
    return _round_to_e4m3(inputs, scale).to(inputs.dtype) * scale


def _find_scale(values: Tensor, dtype: torch.dtype) -> Tensor:
    return (values.abs().amax(-1, keepdim=True) / MAX_E4M3).clamp_(min=torch.finfo(dtype).tiny).to(dtype)


def _round_to_e4m3(values: Tensor, scale: Tensor) -> Tensor:
    return (values / scale).clamp_(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn)  # larger ones would become NaN


FP8_FORM = QuantizedForm(
    format="float-quantized",
    suffixes=("weight", SCALE_SUFFIX),
    weights={"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
    quantize=quantize_weight,
    dequantize=dequantize_weight,
    max_loss_increase=0.005,
    input_activations={"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True},
    round_inputs=round_inputs,
)
