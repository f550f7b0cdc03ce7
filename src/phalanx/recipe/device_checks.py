"""Check what a recipe asks of a device: precision, CUDA graphs, deterministic kernels."""

import os
from collections.abc import Callable, Iterator, Sequence

from phalanx.recipe.devices import DeviceKind, device_kind_of
from phalanx.recipe.schema import Recipe
from phalanx.recipe.validation_errors import join_problems

MIN_FP8_CAPABILITY = (8, 9)
"""CUDA compute capability (Ada, Hopper) from which tensor cores know fp8."""
BF16_SINCE = (8, 0)
"""Likewise (Ampere) of bf16, which torch computes on older ones as well, slowly."""
FP8_VARIABLE = "PHALANX_FLOAT8"
"""Environment variable; "always" takes fp8 for every layer that fits, on any device, without measuring. For tests."""
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
    """RecipeError when what `recipe` asks for cannot be had on this device of torch ("cpu", "cuda", ...), `rocm` if it
    is AMD's."""
    device_kind = device_kind_of(device, rocm)
    fp8 = fp8_anywhere or ("fp8" in device_kind.precisions and has_fp8(capability))
    if problems := [
        f"{location_of(key)}: {problem}" for key, problem in device_problems(recipe, device_kind, name, fp8)
    ]:
        raise join_problems(problems)


def find_device_problems(recipe: Recipe, workers: int) -> Iterator[tuple[str, str]]:
    """What no device of a kind that the recipe names has, whichever machine it is on."""
    if recipe.device == "auto":
        return
    kind = device_kind_of(recipe.device)
    fp8_anywhere = os.environ.get(FP8_VARIABLE) == "always"
    yield from device_problems(recipe, kind, kind.description, "fp8" in kind.precisions or fp8_anywhere)
    if workers > 1 and kind.dist_backend is None:
        yield (
            "device",
            f"found {recipe.device}, on which torch has no way to exchange gradients; use one worker, or cpu",
        )


def device_problems(recipe: Recipe, kind: DeviceKind, name: str, fp8: bool) -> Iterator[tuple[str, str]]:
    """What a recipe asks for that a kind of device does not have; `name` is what the device is called."""
    if recipe.precision == "fp8" and not fp8:
        yield "precision", NO_FP8_TEXT.format(name + kind.fp8_note)
    if recipe.compile == "cuda-graphs" and not kind.has_cuda_graphs:
        what = "has none" if kind.is_gpu else "is no GPU"
        yield "compile", f"cuda-graphs need a GPU that has them, and {name} {what}; true or false would be valid"
    if recipe.determinism in ("fixed-world", "elastic") and not kind.names_nondeterministic_ops:
        yield (
            "determinism",
            f"found {recipe.determinism}, but torch does not say which kernels give the same bits twice on {name}; "
            "auto or off would be valid, or device=cpu",
        )
