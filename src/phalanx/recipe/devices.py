"""The kinds of devices that torch trains on here, and whether they have what a recipe asks for. Nothing imports torch.

Training ran on CPUs and NVIDIA's GPUs; the row of AMD's is what torch's documentation says (docs/reference/devices.md).
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from phalanx.recipe.schema import Recipe
from phalanx.recipe.validation_errors import join_problems

_PRECISIONS_WITHOUT_FP8 = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True)
class DeviceKind:
    """A row of the table. `type` is torch's name of the device: AMD's GPUs are "cuda", too."""

    type: str
    description: str
    """One-sentence description."""
    dist_backend: str
    """Backend of torch.distributed for tensors on the device."""
    precisions: tuple[str, ...]
    """What it may compute in; fp8 only from a compute capability on (`has_fp8`)."""
    fp8_note: str = ""
    """What to say besides that it has no fp8."""

    @property
    def is_gpu(self) -> bool:
        """Whether each worker has one of its own, with memory of its own."""
        return self.type != "cpu"

    @property
    def process_group_backend(self) -> str:
        """The backends of a process group, for tensors on the host and on the device."""
        return f"cpu:gloo,{self.type}:{self.dist_backend}" if self.is_gpu else "gloo"


DEVICE_KINDS = {
    "cpu": DeviceKind("cpu", "a CPU", "gloo", _PRECISIONS_WITHOUT_FP8),
    "cuda": DeviceKind("cuda", "an NVIDIA or AMD GPU", "nccl", (*_PRECISIONS_WITHOUT_FP8, "fp8")),
    "rocm": DeviceKind(
        "cuda",
        "an AMD GPU",
        "nccl",
        _PRECISIONS_WITHOUT_FP8,
        fp8_note=" (AMD's formats of fp8, such as e4m3fnuz on MI300, are others)",
    ),
}
"""Devices by their name in the table; a recipe's `device` is the `type`."""


def device_kind_of(device: str, rocm: bool = False) -> DeviceKind:
    """The row of a device of torch; `rocm`: torch was built for AMD's GPUs (`torch.version.hip`). For tensors that are
    nowhere (meta) it is the CPU's."""
    return DEVICE_KINDS["rocm" if rocm and device == "cuda" else device if device in DEVICE_KINDS else "cpu"]


def size_table_of(device: str) -> str:
    """Under which name tables of sizes to measure have those for a device: a CPU's or a GPU's."""
    return "cuda" if device_kind_of(device).is_gpu else "cpu"


MIN_FP8_CAPABILITY = (8, 9)
"""CUDA compute capability (Ada, Hopper) from which tensor cores know fp8."""
BF16_SINCE = (8, 0)
"""Likewise (Ampere) of bf16, which torch computes on older ones as well, slowly."""
FP8_VARIABLE = "PHALANX_FLOAT8"
"""Environment variable; "always" takes fp8 for every layer that fits, small ones too, on any device. For tests."""
NO_FP8_TEXT = (
    "fp8 needs tensor cores that support it (NVIDIA Ada, Hopper or later: compute capability 8.9), and {} has none; "
    "bf16, fp16 or fp32 would be valid here"
)
"""What to say to that of a device by this name."""


def has_fp8(capability: Sequence[int] | None) -> bool:
    """Whether a device of this CUDA compute capability (None: it is no such device) multiplies in fp8."""
    return capability is not None and tuple(capability) >= MIN_FP8_CAPABILITY


def has_bf16(capability: Sequence[int] | None) -> bool:
    """Whether a device of this CUDA compute capability (None: it is no such device) is no slower in bf16 than in fp32:
    False for NVIDIA GPUs before Ampere."""
    return capability is None or tuple(capability) >= BF16_SINCE


def check_device(
    recipe: Recipe,
    device: str,
    name: str,
    capability: Sequence[int] | None,
    location_of: Callable[[str], str] = str,
    fp8_anywhere: bool = False,
    rocm: bool = False,
) -> None:
    """RecipeError when what `recipe` asks for cannot be had on this device of torch ("cpu" or "cuda"), `rocm` if it
    is AMD's."""
    device_kind = device_kind_of(device, rocm)
    fp8 = fp8_anywhere or ("fp8" in device_kind.precisions and has_fp8(capability))
    if problems := [
        f"{location_of(key)}: {problem}" for key, problem in device_problems(recipe, device_kind, name, fp8)
    ]:
        raise join_problems(problems)


def find_device_problems(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """What no device of a kind that the recipe names has, whichever machine it is on."""
    if recipe.device == "auto":
        return
    kind = device_kind_of(recipe.device)
    fp8_anywhere = os.environ.get(FP8_VARIABLE) == "always"
    yield from device_problems(recipe, kind, kind.description, "fp8" in kind.precisions or fp8_anywhere)


def device_problems(recipe: Recipe, kind: DeviceKind, name: str, fp8: bool) -> Iterator[tuple[str, str]]:
    """What a recipe asks for that a kind of device does not have; `name` is what the device is called."""
    if recipe.precision == "fp8" and not fp8:
        yield "precision", NO_FP8_TEXT.format(name + kind.fp8_note)
    if recipe.compile == "cuda-graphs" and not kind.is_gpu:
        yield "compile", f"cuda-graphs need a GPU, and {name} is none; true or false would be valid"
