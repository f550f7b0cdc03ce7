"""AdamW with 8-bit moments: block-wise dynamic quantization (Dettmers et al. 2022), in plain tensors.

A block of 256 elements shares a scale, its largest magnitude; each element is an 8-bit code, an index into a table of
256 numbers up to 1 that are denser towards 0. Differences from the paper, and the reasons:

- Blocks are within rows (dimension 0), so that FSDP, which shards by rows, changes no block and no bit. It also gives
  every token of an embedding its own scale, for which the paper needs a special embedding layer.
- Rounding is stochastic, as in adamw_bf16.py: rounding to nearest would lose small changes of a moment.
- The first moment's scale has the sign of the largest magnitude, so that this element is exact with either sign.
- A positive second moment never becomes zero, because a step is divided by its root.

Vectors, and matrices with rows too short to share a scale, stay in fp32.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from phalanx.train.optim.adamw_bf16 import MOMENT_NAMES, LowPrecisionAdamW, StateDict, take_half

QUANT_BLOCK_SIZE = 256
MIN_ROW_LENGTH = 64
"""Minimum row length for 8 bits; for shorter rows, the scales would outweigh the savings."""
SCALE_SUFFIX = "_scale"


class AdamW8bit(LowPrecisionAdamW):
    """AdamW with both moments in 8 bits: about 2 bytes of state per parameter. State: `step`; `exp_avg` and
    `exp_avg_sq`, the codes (uint8, shape of the parameter); their `_scale` (fp32, [rows, blocks per row])."""

    def init_state(self, part: Tensor) -> dict[str, Tensor]:
        if not should_quantize(part):
            return {name: torch.zeros_like(part, dtype=torch.float32) for name in MOMENT_NAMES}
        # If the scale is zero, every code represents zero.
        codes = {name: torch.zeros_like(part, dtype=torch.uint8) for name in MOMENT_NAMES}
        return codes | {
            name + SCALE_SUFFIX: torch.zeros(scale_shape(part.shape), device=part.device) for name in MOMENT_NAMES
        }

    def read_moments(self, state: StateDict, rows: slice) -> list[Tensor]:
        values = []
        for index, name in enumerate(MOMENT_NAMES):
            stored = _as_matrix(state[name][rows])
            if name + SCALE_SUFFIX in state:
                values.append(
                    dequantize_blockwise(stored, state[name + SCALE_SUFFIX][rows], _moment_table(index, stored))
                )
            else:
                values.append(stored.clone())
        return values

    def write_moments(self, state: StateDict, rows: slice, moments: list[Tensor], bits: Tensor | None) -> None:
        for index, (name, moment) in enumerate(zip(MOMENT_NAMES, moments, strict=True)):
            stored = state[name][rows]
            if name + SCALE_SUFFIX in state:
                chance = 0.5 if bits is None else take_half(bits, index) / 65536
                codes, scale = quantize_blockwise(moment, _moment_table(index, moment), chance)
                state[name + SCALE_SUFFIX][rows].copy_(scale)
                stored.copy_(codes.view(stored.shape))
            else:
                stored.copy_(moment.view(stored.shape))


def should_quantize(part: Tensor) -> bool:
    """Return whether the moments of a parameter with such a local part are kept in 8 bits."""
    return part.dim() >= 2 and part.shape[1:].numel() >= MIN_ROW_LENGTH


def scale_shape(shape: torch.Size) -> torch.Size:
    """Return the shape of the scales for a parameter, or part of one, of this shape: [rows, blocks per row]."""
    return torch.Size([shape[0], -(-shape[1:].numel() // QUANT_BLOCK_SIZE)])


def quantize_blockwise(x: Tensor, table: Tensor, threshold: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return codes [rows, columns] (uint8) and scales [rows, blocks] of x (fp32, [rows, columns]). An element is
    rounded down if its fraction of the distance between two numbers of the table is at most `threshold`, in [0, 1)."""
    columns = x.shape[1]
    blocks = pad(x, (0, -columns % QUANT_BLOCK_SIZE)).view(len(x), -1, QUANT_BLOCK_SIZE)
    low, high = blocks.aminmax(dim=2)
    scale = torch.where(-low > high, low, high)
    normal = x / torch.where(scale == 0, 1.0, scale).repeat_interleave(QUANT_BLOCK_SIZE, dim=1)[:, :columns]
    lower = torch.bucketize(normal, table, right=True, out_int32=True).sub_(1).clamp_(0, len(table) - 2)
    floor, ceiling = _look_up(table, lower), _look_up(table, lower + 1)
    codes = lower.add_((normal - floor) > threshold * (ceiling - floor))
    if table[0] == 0:
        codes.clamp_(min=1).mul_(normal > 0)
    return codes.to(torch.uint8), scale


def dequantize_blockwise(codes: Tensor, scale: Tensor, table: Tensor) -> Tensor:
    """Return the values [rows, columns] in fp32."""
    return _look_up(table, codes.int()).mul_(scale.repeat_interleave(QUANT_BLOCK_SIZE, dim=1)[:, : codes.shape[1]])


def encode_state(part: Tensor, entries: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert AdamW's state, of any precision, of a parameter with this local part to the form of `AdamW8bit`. Codes
    are not changed."""
    if not should_quantize(part):
        return {name: value.float() for name, value in decode_state(entries).items()}
    result = dict(entries)
    for index, name in enumerate(MOMENT_NAMES):
        value = entries.get(name)
        if value is not None and value.dtype != torch.uint8:
            codes, scale = quantize_blockwise(_as_matrix(value.float()), _moment_table(index, value), 0.5)
            result |= {name: codes.view(value.shape), name + SCALE_SUFFIX: scale}
    return result


def decode_state(entries: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert AdamW's state, of any precision, to floating-point moments."""
    result = {name: value for name, value in entries.items() if not name.endswith(SCALE_SUFFIX)}
    for index, name in enumerate(MOMENT_NAMES):
        codes, scale = entries.get(name), entries.get(name + SCALE_SUFFIX)
        if codes is not None and scale is not None:
            result[name] = dequantize_blockwise(_as_matrix(codes), scale, _moment_table(index, codes)).view(codes.shape)
    return result


@cache
def signed_table(device: torch.device) -> Tensor:
    """Return the dynamic table for signed numbers [256], ascending, from -0.993 to 1. Each decade below 1 has half as
    many numbers as the decade above it."""
    positive = [number for decade in range(7) for number in _decade_midpoints(decade, 2**decade)]
    return torch.tensor([*(-number for number in reversed(positive)), 0.0, *positive, 1.0], device=device)


@cache
def unsigned_table(device: torch.device) -> Tensor:
    """Return the dynamic table for non-negative numbers [256], ascending, from 0 to 1: twice as dense."""
    positive = [number for decade in range(7) for number in _decade_midpoints(decade, 2 ** (decade + 1))]
    return torch.tensor([0.0, *positive, 1.0], device=device)


def _decade_midpoints(decade: int, count: int) -> list[float]:
    """Return the midpoints of `count` equal parts of [0.1, 1], times 10 to the power of decade - 6."""
    return [10.0 ** (decade - 6) * (0.1 + 0.9 * (index + 0.5) / count) for index in range(count)]


def _moment_table(moment: int, x: Tensor) -> Tensor:
    return (signed_table, unsigned_table)[moment](x.device)


def _look_up(table: Tensor, indices: Tensor) -> Tensor:
    return table.index_select(0, indices.flatten()).view(indices.shape)


def _as_matrix(x: Tensor) -> Tensor:
    return x.reshape(len(x), x.shape[1:].numel())
