"""AdamW with low-precision moments: the base class, and the optimizers with bf16 and with 8-bit moments.

Each step reads the moments into fp32, updates them and the parameter there, and rounds the moments back
*stochastically*: up or down with the probability that makes the expectation exact (Gupta et al. 2015). With rounding to
nearest the slow second moment would not change: bf16 has 8 bits of precision, and 1 - beta2 = 0.001 is less than one.

The random bits are a hash of (seed, step, name of the parameter, index of the element in the whole tensor): a resumed
run uses the same bits, however FSDP shards the tensor.

8-bit moments are quantized block-wise (Dettmers et al. 2022), in plain tensors. A block of 256 elements shares a scale,
its largest magnitude; each element is an 8-bit code, an index into a table of 256 numbers up to 1 that are denser
towards 0. Differences from the paper, and the reasons:

- Blocks are within rows (dimension 0), so that FSDP, which shards by rows, changes no block and no bit. It also gives
  every token of an embedding its own scale, for which the paper needs a special embedding layer.
- Rounding is stochastic.
- The first moment's scale has the sign of the largest magnitude, so that this element is exact with either sign.
- A positive second moment never becomes zero, because a step is divided by its root.

Vectors, and matrices with rows too short to share a scale, stay in fp32.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.nn.functional import pad

from phalanx.train.distributed.dtensor_utils import distribute_like, to_local

StateDict = dict[str, Any]
MOMENT_NAMES = ("exp_avg", "exp_avg_sq")
CPU_CHUNK_ELEMENTS, GPU_CHUNK_ELEMENTS = 1 << 20, 1 << 24
"""Elements converted to fp32 at once: few enough for the CPU's caches; enough to keep a GPU busy in little memory."""


@dataclass(frozen=True)
class ParamOrigin:
    """Origin of a local parameter: its name, and the index of its first local row in the whole tensor."""

    name: str
    row: int = 0


class LowPrecisionAdamW(torch.optim.Optimizer):
    """Base of AdamW (Loshchilov & Hutter 2019) with moments stored in low precision.

    `origins` has every parameter. State: `step` (0-d, on the CPU), and the result of `init_state`.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        origins: Mapping[Tensor, ParamOrigin],
        seed: int,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._origins = origins
        self._seed = seed

    @abstractmethod
    def init_state(self, part: Tensor) -> dict[str, Tensor]:
        """Return stored moments of zero for a local part of a parameter."""

    @abstractmethod
    def read_moments(self, state: StateDict, rows: slice) -> list[Tensor]:
        """Return both moments of some rows in fp32 [rows, columns], as new tensors."""

    @abstractmethod
    def write_moments(self, state: StateDict, rows: slice, moments: list[Tensor], bits: Tensor) -> None:
        """Store both moments [rows, columns], rounded stochastically by `bits`."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # closures are not supported
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update_parameter(parameter, group)

    def _update_parameter(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, weight = self.state[parameter], to_local(parameter)
        assert parameter.grad is not None
        gradient = to_local(parameter.grad)
        if not state:
            state["step"] = torch.zeros((), device="cpu")  # on the host, to be read without a device synchronization
            state.update({name: distribute_like(parameter, value) for name, value in self.init_state(weight).items()})
        state["step"] += 1
        step, origin = int(state["step"]), self._origins[parameter]
        key = xxhash.xxh3_64_intdigest(f"{self._seed}/{step}/{origin.name}".encode())
        stored = {name: view_at_least_1d(to_local(value)) for name, value in state.items() if name != "step"}
        weight, gradient = view_at_least_1d(weight), view_at_least_1d(gradient)
        columns = weight[:1].numel()
        chunk = max(1, (CPU_CHUNK_ELEMENTS if weight.device.type == "cpu" else GPU_CHUNK_ELEMENTS) // max(1, columns))
        for begin in range(0, len(weight), chunk):
            rows = slice(begin, min(begin + chunk, len(weight)))
            shape = (rows.stop - begin, columns)
            moments = self.read_moments(stored, rows)
            rows_of_gradient = gradient[rows].float().reshape(shape)
            direction = adam_direction(moments, rows_of_gradient, step, group["betas"], group["eps"])
            weight[rows].mul_(1 - group["lr"] * group["weight_decay"])
            weight[rows].add_(direction.view(weight[rows].shape), alpha=-group["lr"])
            bits = make_random_bits(shape, (origin.row + begin) * columns, key, weight.device)
            self.write_moments(stored, rows, moments, bits)


class AdamWBf16(LowPrecisionAdamW):
    """AdamW with both moments in bf16: 4 bytes of state per parameter. State: `step`, `exp_avg`, `exp_avg_sq`."""

    def init_state(self, part: Tensor) -> dict[str, Tensor]:
        return {name: torch.zeros_like(part, dtype=torch.bfloat16) for name in MOMENT_NAMES}

    def read_moments(self, state: StateDict, rows: slice) -> list[Tensor]:
        stored = [state[name][rows] for name in MOMENT_NAMES]
        return [moment.float().reshape(len(moment), moment.shape[1:].numel()) for moment in stored]

    def write_moments(self, state: StateDict, rows: slice, moments: list[Tensor], bits: Tensor) -> None:
        for half, (name, moment) in enumerate(zip(MOMENT_NAMES, moments, strict=True)):
            stored = state[name][rows]
            stored.copy_(round_to_bf16(moment, take_half(bits, half)).view(stored.shape))


def adam_direction(
    moments: list[Tensor], gradient: Tensor, step: int, betas: tuple[float, float], eps: float
) -> Tensor:
    """Return Adam's update direction (Kingma & Ba 2015), to be multiplied by the learning rate and subtracted. Updates
    the moments in place. `step` counts from 1."""
    mean, square = moments
    mean.lerp_(gradient, 1 - betas[0])
    square.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    scale = square.sqrt().div_((1 - betas[1] ** step) ** 0.5).add_(eps)
    return (mean / scale).div_(1 - betas[0] ** step)


def make_random_bits(shape: tuple[int, int], first: int, key: int, device: torch.device) -> Tensor:
    """Return 32 random bits (int32) for each element of a matrix [rows, columns] with the first element index `first`.
    A pure function of `key` (64 bits) and the element's index, the same on every device."""
    # lowbias32 (Wellons 2018). Half of the key enters first and half later, so that another key does not merely shift
    # the sequence. int32 wraps around; its right shift copies the sign, which the masks remove.
    x = torch.arange(shape[0] * shape[1], dtype=torch.int32, device=device)
    x.add_(_to_int32(first)).bitwise_xor_(_to_int32(key))
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    x.bitwise_xor_(_to_int32(key >> 32))
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_to_int32(0x846CA68B))
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    return x.view(shape)


def take_half(bits: Tensor, half: int) -> Tensor:
    """Return the lower (0) or upper (1) 16 of 32 random bits, as a number from 0 to 65535."""
    return (bits >> 16 * half).bitwise_and_(0xFFFF)


def round_to_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 to bf16, up or down so that the expectation over `bits` (0 to 65535, int32) is x. NaN stays NaN."""
    # The upper half of an fp32 pattern is a bf16 pattern. A random number added to the lower half carries into it with
    # the desired probability, for either sign, since the pattern orders magnitudes.
    pattern = (x.view(torch.int32) + bits).bitwise_and_(-0x10000)
    return torch.where(x.isnan(), x, pattern.view(torch.float32)).to(torch.bfloat16)


def view_at_least_1d(x: Tensor) -> Tensor:
    """Return a view of x with at least one dimension."""
    return x if x.dim() else x.view(1)


def _to_int32(value: int) -> int:
    """Return the lower 32 bits as a signed number."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


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
            stored, scale = _as_matrix(state[name][rows]), state.get(name + SCALE_SUFFIX)
            if scale is None:
                values.append(stored.clone())
            else:
                values.append(dequantize_blockwise(stored, scale[rows], _moment_table(index, stored)))
        return values

    def write_moments(self, state: StateDict, rows: slice, moments: list[Tensor], bits: Tensor) -> None:
        for index, (name, moment) in enumerate(zip(MOMENT_NAMES, moments, strict=True)):
            stored = state[name][rows]
            if name + SCALE_SUFFIX in state:
                chance = take_half(bits, index) / 65536
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
def make_dynamic_table(is_signed: bool, device: torch.device) -> Tensor:
    """Return the dynamic table [256], ascending, for signed numbers from -0.993 to 1, or twice as dense for those from
    0 to 1. Each decade below 1 has half as many numbers as the decade above it."""
    density = 1 if is_signed else 2
    positive = [number for decade in range(7) for number in _decade_midpoints(decade, density * 2**decade)]
    negative = [-number for number in reversed(positive)] if is_signed else []
    return torch.tensor([*negative, 0.0, *positive, 1.0], device=device)


def _decade_midpoints(decade: int, count: int) -> list[float]:
    """Return the midpoints of `count` equal parts of [0.1, 1], times 10 to the power of decade - 6."""
    return [10.0 ** (decade - 6) * (0.1 + 0.9 * (index + 0.5) / count) for index in range(count)]


def _moment_table(moment: int, x: Tensor) -> Tensor:
    return make_dynamic_table(moment == 0, x.device)


def _look_up(table: Tensor, indices: Tensor) -> Tensor:
    return table.index_select(0, indices.flatten()).view(indices.shape)


def _as_matrix(x: Tensor) -> Tensor:
    return x.reshape(len(x), x.shape[1:].numel())
