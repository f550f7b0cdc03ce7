"""Which linear layers a run computes in fp8: those in blocks whose matrices are so large that it is faster here.

Small products lose, since finding the scales and casting costs as much as it saves; where the border lies depends on
the device. So both ways are timed, forward and backward, for each distinct shape, on the very device and as they will
run (compiled or not). All workers go by what the leading one measured, and the run keeps it (`fp8.json`): a run that
goes on chooses alike. What is never computed in fp8: the head, whose logits need the digits, and what a module with
`keeps_precision = True` contains, such as the router of a mixture of experts.
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

from phalanx.cluster.matmul import median_seconds
from phalanx.errors import RecipeError
from phalanx.recipe.checks import FP8, NO_FP8, has_fp8
from phalanx.run import Run
from phalanx.run.cache import remembered
from phalanx.run.directory import write_json
from phalanx.train.fp8 import QuantisedWeight, compute_in_fp8, fits, linear, quantise_once
from phalanx.train.nodes import exchanged, said_by
from phalanx.train.place import Place

GAIN = 1.05
"""fp8 is chosen where it is at least so many times faster: less would be within the noise of the measurement."""
ROWS = 8192
"""Rows of a layer's input that are assumed where nothing tells: in a loop of the user's own."""
SECONDS = 0.2  # for each way to compute a shape


@dataclass(frozen=True, order=True)
class Shape:
    """Of a layer's product: [rows, inputs] x [inputs, outputs]."""

    rows: int
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Times:
    """Seconds of a layer's forward and backward."""

    bf16: float
    fp8: float


def worth(times: Mapping[Shape, Times]) -> frozenset[Shape]:
    """The shapes for which fp8 is faster by at least `GAIN`."""
    return frozenset(shape for shape, each in times.items() if each.bf16 >= GAIN * each.fp8)


def candidates(model: nn.Module, blocks: Iterable[str]) -> dict[str, nn.Linear]:
    """Linear layers in blocks that can be computed in fp8, by name."""
    inside = tuple(f"{block}." for block in blocks)
    kept = tuple(f"{name}." for name, module in model.named_modules() if getattr(module, "keeps_precision", False))
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(inside) and not name.startswith(kept) and fits(module)
    }


def rows_of(model: nn.Module, run: Callable[[], Any]) -> dict[str, int]:
    """Rows of what enters each linear layer when `run()` calls the model; 0 for a layer that it does not use."""
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
class Chooser:
    """Chooses for a model that tensor parallel has cut already: `rows` of a micro-batch for each layer by name, ROWS
    for those that it does not know."""

    run: Run
    place: Place
    rows: Mapping[str, int]
    compiled: bool
    always: bool = False

    def __call__(self, model: nn.Module, blocks: Iterable[str]) -> list[str]:
        """Have the layers that are worth it computed in fp8; their names. RecipeError on a device without fp8. Every
        worker calls it."""
        layers = candidates(model, blocks)
        if self.always:
            chosen = set(layers)
        else:
            check_device(self.place.device)
            shapes = {name: self._shape(name, layer) for name, layer in layers.items()}
            good = worth(self._agreed(set(shapes.values())))
            chosen = {name for name, shape in shapes.items() if shape in good}
        for name in chosen:
            compute_in_fp8(layers[name])
        quantise_once(model)
        return sorted(chosen)

    def _shape(self, name: str, layer: nn.Linear) -> Shape:
        outputs, inputs = layer.weight.shape
        return Shape(self.rows.get(name, ROWS), inputs, outputs)

    def _agreed(self, shapes: Collection[Shape]) -> dict[Shape, Times]:
        """The same times on all workers: of their shapes together, as the leading one measured them."""
        if self.place.world > 1:
            everybody = exchanged(self.place, [asdict(shape) for shape in shapes])
            shapes = {Shape(**each) for said in everybody for each in said}
        found: dict[Shape, Times] = {}
        if self.place.leads:
            path = self.run.path / "fp8.json"
            known = _read(self.run, path)
            found = {shape: known.get(shape) or self._measured(shape) for shape in sorted(shapes)}
            if found.keys() - known.keys():
                _write(path, known | found)
        if self.place.world > 1:
            told = said_by(0, [[asdict(shape), asdict(times)] for shape, times in found.items()])
            found = {Shape(**shape): Times(**times) for shape, times in told}
        return found

    def _measured(self, shape: Shape) -> Times:
        device = self.place.device
        key: dict[str, Any] = {"shape": asdict(shape), "compiled": self.compiled, "torch": torch.__version__}
        key["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return Times(**remembered("fp8", key, lambda: asdict(measure(shape, device, self.compiled))))


def chooser(run: Run, place: Place, rows: Mapping[str, int], compiled: bool) -> Chooser:
    """The chooser of a run, as the environment wants it."""
    return Chooser(run, place, rows, compiled, always=os.environ.get(FP8) == "always")


def check_device(device: torch.device) -> None:
    """RecipeError unless the device has tensor cores for fp8."""
    is_nvidia = device.type == "cuda" and not torch.version.hip  # AMD's capabilities are other numbers
    if not has_fp8(torch.cuda.get_device_capability(device) if is_nvidia else None):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        raise RecipeError(f"precision: {NO_FP8.format(name)}")


def measure(shape: Shape, device: torch.device, compiled: bool, seconds: float = SECONDS) -> Times:
    """Time forward and backward of a layer of this shape both ways, with fp32 weights under bf16 autocast."""
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
        return median_seconds(run, seconds, time.perf_counter)

    known = QuantisedWeight.room_for(weight)  # as a run has it, where it is quantised once a step
    known.fill(weight)
    fp8 = seconds_of(lambda x, weight: linear(x, weight, quantised_weight=known))
    return Times(bf16=seconds_of(lambda x, weight: F.linear(x, weight)), fp8=fp8)


def _read(run: Run, path: Path) -> dict[Shape, Times]:
    kept = (run.read_json(path) or {}).get("layers", [])
    return {Shape(**each["shape"]): Times(**each["seconds"]) for each in kept}


def _write(path: Path, times: Mapping[Shape, Times]) -> None:
    good = worth(times)
    layers = [
        {"shape": asdict(shape), "seconds": asdict(each), "chosen": shape in good}
        for shape, each in sorted(times.items())
    ]
    write_json(path, {"layers": layers})
