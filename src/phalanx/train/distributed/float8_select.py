"""Select the linear layers that a run computes in fp8: those in blocks that are large enough for fp8 to be faster.

For small matmuls, scaling and casting cost more than fp8 gains; the threshold depends on the device. So each distinct
shape is timed in both precisions, forward and backward, on the actual device and compiled or not as in the run. All
workers use the measurements of rank 0, which the run stores (`fp8.json`): a resumed run selects the same layers. Never
computed in fp8 are the head, since logits need the precision, and modules inside one with `keeps_precision = True`,
such as the router of a mixture of experts.
"""

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.cluster.matmul_benchmark import median_seconds
from phalanx.errors import RecipeError
from phalanx.recipe.device_checks import FP8_VARIABLE, NO_FP8_TEXT, has_fp8
from phalanx.run import Run
from phalanx.run.cache import load_or_measure
from phalanx.run.directory import write_json
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.object_collectives import all_gather_json, broadcast_json
from phalanx.train.ops.float8 import (
    Float8Weight,
    can_use_float8,
    convert_to_float8,
    float8_linear,
    quantize_weights_once,
)

MIN_SPEEDUP = 1.05
"""Minimum speedup for fp8 to be selected; less would be within the noise of the measurement."""
DEFAULT_ROWS = 8192
"""Rows of a layer's input that are assumed if they are unknown, as in a user's own loop."""
TIMING_DURATION_S = 0.2  # for each precision and shape


@dataclass(frozen=True, order=True)
class MatmulShape:
    """Shape of a layer's matmul: [rows, inputs] x [inputs, outputs]."""

    rows: int
    inputs: int
    outputs: int


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of a layer's forward and backward in each precision."""

    bf16: float
    fp8: float


def select_shapes(times: Mapping[MatmulShape, LayerTimes]) -> frozenset[MatmulShape]:
    """Return the shapes for which fp8 is faster by at least `MIN_SPEEDUP`."""
    return frozenset(shape for shape, each in times.items() if each.bf16 >= MIN_SPEEDUP * each.fp8)


def find_candidates(model: nn.Module, blocks: Iterable[str]) -> dict[str, nn.Linear]:
    """Return linear layers in blocks that fp8 supports, by name."""
    inside = tuple(f"{block}." for block in blocks)
    excluded = tuple(f"{name}." for name, module in model.named_modules() if getattr(module, "keeps_precision", False))
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name.startswith(inside)
        and not name.startswith(excluded)
        and can_use_float8(module)
    }


def measure_layer_rows(model: nn.Module, run: Callable[[], Any]) -> dict[str, int]:
    """Return the input rows of each linear layer when `run()` calls the model; 0 for a layer that is not used."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    rows = dict.fromkeys(layers, 0)

    def noting(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            rows[name] = max(rows[name], args[0].numel() // args[0].shape[-1] if args else 0)

        return hook

    hooks = [module.register_forward_pre_hook(noting(name)) for name, module in layers.items()]
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return rows


@dataclass(frozen=True)
class Float8Selector:
    """Selects layers of a model after tensor parallelism. `rows` of a micro-batch by layer name; DEFAULT_ROWS for
    others."""

    run: Run
    dist_env: DistEnv
    rows: Mapping[str, int]
    compiled: bool
    always: bool = False

    def __call__(self, model: nn.Module, blocks: Iterable[str]) -> list[str]:
        """Convert the selected layers to fp8 and return their names. Raises RecipeError on a device without fp8. Every
        worker calls it."""
        layers = find_candidates(model, blocks)
        if self.always:
            selected = set(layers)
        else:
            check_float8_device(self.dist_env.device)
            shapes = {name: self._layer_shape(name, layer) for name, layer in layers.items()}
            good = select_shapes(self._gather_times(set(shapes.values())))
            selected = {name for name, shape in shapes.items() if shape in good}
        for name in selected:
            convert_to_float8(layers[name])
        quantize_weights_once(model)
        return sorted(selected)

    def _layer_shape(self, name: str, layer: nn.Linear) -> MatmulShape:
        outputs, inputs = layer.weight.shape
        return MatmulShape(self.rows.get(name, DEFAULT_ROWS), inputs, outputs)

    def _gather_times(self, shapes: Collection[MatmulShape]) -> dict[MatmulShape, LayerTimes]:
        """Return the times of the shapes of all workers, as rank 0 measured them; the same on all workers."""
        if self.dist_env.world_size > 1:
            gathered = all_gather_json(self.dist_env, [asdict(shape) for shape in shapes])
            shapes = {MatmulShape(**each) for shapes_of_rank in gathered for each in shapes_of_rank}
        found: dict[MatmulShape, LayerTimes] = {}
        if self.dist_env.is_rank_zero:
            path = self.run.path / "fp8.json"
            known = _read_times(self.run, path)
            found = {shape: known.get(shape) or self._measure_cached(shape) for shape in sorted(shapes)}
            if found.keys() - known.keys():
                _write_times(path, known | found)
        if self.dist_env.world_size > 1:
            broadcast_times = broadcast_json(0, [[asdict(shape), asdict(times)] for shape, times in found.items()])
            found = {MatmulShape(**shape): LayerTimes(**times) for shape, times in broadcast_times}
        return found

    def _measure_cached(self, shape: MatmulShape) -> LayerTimes:
        device = self.dist_env.device
        key: dict[str, Any] = {"shape": asdict(shape), "compiled": self.compiled, "torch": torch.__version__}
        key["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return LayerTimes(**load_or_measure("fp8", key, lambda: asdict(time_layer(shape, device, self.compiled))))


def make_float8_selector(run: Run, dist_env: DistEnv, rows: Mapping[str, int], compiled: bool) -> Float8Selector:
    """Make the selector of a run."""
    return Float8Selector(run, dist_env, rows, compiled, always=os.environ.get(FP8_VARIABLE) == "always")


def check_float8_device(device: torch.device) -> None:
    """Raise RecipeError unless the device has fp8 tensor cores."""
    is_nvidia = device.type == "cuda" and not torch.version.hip  # AMD's capabilities are numbered differently
    if not has_fp8(torch.cuda.get_device_capability(device) if is_nvidia else None):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        raise RecipeError(f"precision: {NO_FP8_TEXT.format(name)}")


def time_layer(
    shape: MatmulShape, device: torch.device, compiled: bool, duration_s: float = TIMING_DURATION_S
) -> LayerTimes:
    """Time forward and backward of a layer of this shape in both precisions, with fp32 weights under bf16 autocast."""
    x = torch.randn(shape.rows, shape.inputs, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(shape.outputs, shape.inputs, device=device, requires_grad=True)
    grad = torch.randn(shape.rows, shape.outputs, device=device, dtype=torch.bfloat16)

    def seconds_of(product: Callable[[Tensor, Tensor], Tensor]) -> float:
        called = torch.compile(product, dynamic=False) if compiled else product

        def run() -> None:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                out = called(x, weight)
            torch.autograd.grad(out, (x, weight), grad)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        run()  # compiles
        return median_seconds(run, duration_s, time.perf_counter)

    float8_weight = Float8Weight.allocate_for(weight)  # as in a run, where it is quantized once per step
    float8_weight.quantize_from(weight)
    fp8 = seconds_of(lambda x, weight: float8_linear(x, weight, float8_weight=float8_weight))
    return LayerTimes(bf16=seconds_of(lambda x, weight: F.linear(x, weight)), fp8=fp8)


def _read_times(run: Run, path: Path) -> dict[MatmulShape, LayerTimes]:
    records = run.read_json_or_empty(path).get("layers", [])
    try:
        return {MatmulShape(**each["shape"]): LayerTimes(**each["seconds"]) for each in records}
    except (KeyError, TypeError):  # damaged: they are measured again
        return {}


def _write_times(path: Path, times: Mapping[MatmulShape, LayerTimes]) -> None:
    good = select_shapes(times)
    layers = [
        {"shape": asdict(shape), "seconds": asdict(each), "chosen": shape in good}
        for shape, each in sorted(times.items())
    ]
    write_json(path, {"layers": layers})
