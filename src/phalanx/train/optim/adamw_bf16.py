"""AdamW with low-precision moments: the base class, and the optimizer with bf16 moments. For 8 bits see adamw_8bit.py.

Each step reads the moments into fp32, updates them and the parameter there, and rounds the moments back
*stochastically*: up or down with the probability that makes the expectation exact (Gupta et al. 2015). With rounding to
nearest the slow second moment would not change: bf16 has 8 bits of precision, and 1 - beta2 = 0.001 is less than one.

The random bits are a hash of (seed, step, name of the parameter, index of the element in the whole tensor): a resumed
run uses the same bits, however FSDP shards the tensor.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

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
    def write_moments(self, state: StateDict, rows: slice, moments: list[Tensor], bits: Tensor | None) -> None:
        """Store both moments [rows, columns], rounded stochastically by `bits`, or to nearest if they are None."""

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
            direction = adam_direction(
                moments, gradient[rows].float().reshape(shape), step, group["betas"], group["eps"]
            )
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

    def write_moments(self, state: StateDict, rows: slice, moments: list[Tensor], bits: Tensor | None) -> None:
        for half, (name, moment) in enumerate(zip(MOMENT_NAMES, moments, strict=True)):
            stored = state[name][rows]
            value = moment if bits is None else round_to_bf16(moment, take_half(bits, half))
            stored.copy_(value.view(stored.shape))


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
