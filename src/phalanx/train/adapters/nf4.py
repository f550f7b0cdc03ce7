"""Matrices in NF4 by bitsandbytes: 4 bits a number, with an fp32 scale for each 64 (Dettmers et al. 2023)."""

import math
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import RecipeError

BLOCK_SIZE = 64


def import_bitsandbytes() -> Any:
    """Return bitsandbytes.functional. Raises RecipeError if it is not installed."""
    try:
        import bitsandbytes.functional
    except ImportError as error:
        raise RecipeError(
            f"adapter.base_dtype: nf4 needs bitsandbytes, which cannot be imported ({error}): "
            "pip install 'phalanx[bitsandbytes]', or give base_dtype: int8"
        ) from None
    return bitsandbytes.functional


def quantize_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes (uint8 [rows, columns / 2]) and the scales [blocks] (fp32) of a matrix with an even number of
    columns; uninitialized for one on the meta device."""
    rows, columns = weight.shape
    if weight.is_meta:
        num_blocks = math.ceil(weight.numel() / BLOCK_SIZE)
        return weight.new_empty(rows, columns // 2, dtype=torch.uint8), weight.new_empty(
            num_blocks, dtype=torch.float32
        )
    packed, state = import_bitsandbytes().quantize_4bit(
        weight.float().contiguous(), blocksize=BLOCK_SIZE, quant_type="nf4", compress_statistics=False
    )
    return packed.view(rows, columns // 2), state.absmax


def dequantize_nf4(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the matrix in a floating-point dtype of 16 or 32 bits."""
    functional = import_bitsandbytes()
    shape = torch.Size((codes.shape[0], codes.shape[1] * 2))
    state = functional.QuantState(scale, shape=shape, dtype=dtype, blocksize=BLOCK_SIZE, quant_type="nf4")
    weight: Tensor = functional.dequantize_4bit(codes.view(-1, 1), state)
    return weight
