"""Weights of 4 bits, packed into int32, with a scale for each 128 inputs of an output: W4A16 of vLLM.

Values are -8 to 7 times the scale. Of scales that clip the largest values more or less, the one with the least squared
error is taken, so no calibration data are needed."""

from collections.abc import Mapping

import torch
from torch import Tensor

from phalanx.train.checkpoint.export_forms.compressed_tensors import SCALE_SUFFIX, QuantizedForm

GROUP_SIZE = 128
MIN_CODE, MAX_CODE = -8, 7
PACKED_SUFFIX, SHAPE_SUFFIX = "weight_packed", "weight_shape"
CLIP_RATIOS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)
"""Largest value that a scale represents, as a share of the group's largest."""
_CODE_SHIFTS = torch.arange(0, 32, 4, dtype=torch.int32)


def quantize_weight(weight: Tensor, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """weight [out, in] -> `weight_packed` int32 [out, in / 8], `weight_scale` [out, in / 128], `weight_shape` [2]."""
    groups = weight.unflatten(1, (-1, GROUP_SIZE))
    scale = choose_scales(groups, scale_dtype)
    codes = _round_to_codes(groups, scale.float()).to(torch.int32).flatten(1)
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    return {PACKED_SUFFIX: pack_codes(codes), SCALE_SUFFIX: scale.squeeze(-1), SHAPE_SUFFIX: shape}


def round_weight(weight: Tensor, scale_dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] that is read back once it is quantized, in its own dtype."""
    groups = weight.float().unflatten(1, (-1, GROUP_SIZE))
    scale = choose_scales(groups, scale_dtype).float()
    return _round_to_codes(groups, scale).mul_(scale).flatten(1).to(weight.dtype)


def choose_scales(groups: Tensor, dtype: torch.dtype) -> Tensor:
    """Choose the scale of each group of weights [out, groups, 128] with the least squared error: [out, groups, 1]."""
    largest = groups.abs().amax(-1, keepdim=True) / MAX_CODE
    scales = [(largest * ratio).clamp_(min=torch.finfo(dtype).tiny).to(dtype) for ratio in CLIP_RATIOS]
    rounded = (_round_to_codes(groups, scale.float()).mul_(scale.float()) for scale in scales)
    errors = torch.stack([values.sub_(groups).square_().sum(-1, keepdim=True) for values in rounded])
    return torch.stack(scales).gather(0, errors.argmin(0, keepdim=True))[0]


def _round_to_codes(groups: Tensor, scale: Tensor) -> Tensor:
    return (groups / scale).round_().clamp_(MIN_CODE, MAX_CODE)


def pack_codes(codes: Tensor) -> Tensor:
    """codes -8..7 [out, in] -> int32 [out, in / 8], the first code in the lowest 4 bits."""
    return torch.sum((codes - MIN_CODE).unflatten(1, (-1, 8)) << _CODE_SHIFTS, -1, dtype=torch.int32)


def unpack_codes(packed: Tensor) -> Tensor:
    """Invert `pack_codes`."""
    return ((packed.unsqueeze(-1) >> _CODE_SHIFTS) & 15).flatten(1) + MIN_CODE


def dequantize_weight(tensors: Mapping[str, Tensor]) -> Tensor:
    """`weight_packed` and `weight_scale` -> weight [out, in] in fp32."""
    codes = unpack_codes(tensors[PACKED_SUFFIX]).unflatten(1, (-1, GROUP_SIZE))
    return torch.flatten(codes * tensors[SCALE_SUFFIX].float().unsqueeze(-1), 1)


INT4_FORM = QuantizedForm(
    format="pack-quantized",
    suffixes=(PACKED_SUFFIX, SCALE_SUFFIX, SHAPE_SUFFIX),
    weights={"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP_SIZE},
    quantize=quantize_weight,
    dequantize=dequantize_weight,
    max_loss_increase=0.046,
    group_size=GROUP_SIZE,
)
