"""Trials before a run: what a recipe's model weighs, how many FLOPs a sample takes, how fast a precision really is.

Each function runs in a short process of its own (it may fail or fill memory without harm) and returns plain numbers,
from which `plan` chooses.
"""

import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from phalanx.cluster import measure_matmul
from phalanx.compat import scale_in_place
from phalanx.data import Data, open_data
from phalanx.errors import RecipeError
from phalanx.recipe import Recipe, import_object, told
from phalanx.run import Run
from phalanx.train.callbacks import load_callbacks
from phalanx.train.loop import StopRequest
from phalanx.train.model import build_model
from phalanx.train.optimizers import Optimizer, trainable
from phalanx.train.place import from_environment
from phalanx.train.precision import computing
from phalanx.train.reporter import ToRun
from phalanx.train.step import to_device
from phalanx.train.tasks import Task, TensorBatch, load_task
from phalanx.train.trace import trace
from phalanx.train.worker import assemble, prepare_torch, units_per_sample

FLOPS_RULE = (
    "matmuls, convolutions and attention (full, not causal-half) of one forward pass, x 3 for forward and backward; "
    "recomputation not counted"
)
REPEATS = 5


def profile(payload: dict[str, Any]) -> dict[str, Any]:
    """What `recipe` (sources prepared) needs for a sample: parameters, FLOPs, bytes saved for backward."""
    model, task, data = _open(payload)
    place = from_environment({})
    flops, saved = [], []
    for samples in (1, 2):
        batch = to_device(data.train(0, samples), place.device)
        counter = FlopCounterMode(display=False)
        storages: dict[int, int] = {}

        def keep(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            _forward(model, task, batch, "fp32", place.device)
        flops.append(counter.get_total_flops())
        saved.append(sum(storages.values()))
    return {
        "parameters": sum(p.numel() for p in trainable(model).values()),
        "flops_per_sample": 3.0 * (flops[1] - flops[0]),
        "flops_rule": FLOPS_RULE,
        "facts": asdict(data.facts),
        "unit": "tokens" if data.facts.kind == "tokens" else "samples",
        "units_per_sample": units_per_sample(data.facts),
        "saved_bytes_per_sample": max(0, saved[1] - saved[0]),
    }


def race(payload: dict[str, Any]) -> dict[str, float]:
    """Seconds of forward and backward of one micro-batch in each of `payload["precisions"]`, and of an `update`: norm,
    clipping, optimizer. Medians of a few, precisions in turn, after a warm-up, with the run's own model, micro-batch
    and threads."""
    model, task, data = _open(payload)
    place = from_environment({})
    torch.set_num_threads(payload["threads"])
    batch = to_device(data.train(0, payload["micro"]), place.device)
    times: dict[str, list[float]] = {precision: [] for precision in payload["precisions"]}
    for _ in range(REPEATS + 1):
        for precision, seconds in times.items():
            begun = time.perf_counter()
            _forward(model, task, batch, precision, place.device).backward()
            if place.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
            model.zero_grad(set_to_none=True)
    optimizer = Optimizer(model, Recipe.model_validate(payload["recipe"]).optim)
    _forward(model, task, batch, payload["precisions"][0], place.device).backward()
    times["update"] = []
    for _ in range(REPEATS + 1):
        begun = time.perf_counter()
        gradients = [parameter.grad for parameter in optimizer.names if parameter.grad is not None]
        scale_in_place(gradients, 1.0 / (1.0 + float(nn.utils.get_total_norm(gradients))))
        optimizer.step(0.0)
        if place.device.type == "cuda":
            torch.cuda.synchronize()
        times["update"].append(time.perf_counter() - begun)
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}


def matmul(payload: dict[str, Any]) -> dict[str, float]:
    """The machine's matmul rate in TFLOP/s by precision, with the threads of one worker."""
    return measure_matmul(payload["device"], payload["threads"])


def traced(payload: dict[str, Any]) -> dict[str, Any]:
    """A profile of a few steps of a resolved recipe, as plain values."""
    recipe, folder = Recipe.model_validate(payload["recipe"]), Path(payload["folder"])
    place = from_environment({})
    prepare_torch(recipe, place)
    data = open_data(recipe.data, recipe.evaluate, recipe.seed)
    nowhere = Run(Path(payload["out"]).parent)
    parts = assemble(nowhere, recipe, folder, place, data, ToRun(nowhere, leads=False), StopRequest())
    return asdict(trace(parts, payload["steps"], 3, Path(payload["out"])))


def importable(payload: dict[str, Any]) -> str:
    """RecipeError unless everything that a recipe names by import path exists. Returns a hash of the source files of
    model and task and of what they imported from the recipe's folder, by which one knows that earlier trials still
    hold."""
    folder = Path(payload["folder"])
    build = import_object(payload["build"], folder, key="model.build")
    task = load_task(payload["task"], folder)
    load_callbacks(payload["callbacks"], folder)
    named = {build.__module__, type(task).__module__}
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    sources = {file for name, file in files.items() if name in named or Path(file).is_relative_to(folder)}
    return xxhash.xxh3_64_hexdigest(b"".join(Path(it).read_bytes() for it in sorted(sources) if it.endswith(".py")))


def _open(payload: dict[str, Any]) -> tuple[nn.Module, Task, Data]:
    recipe = Recipe.model_validate(payload["recipe"])
    folder = Path(payload["folder"])
    data = open_data(recipe.data, recipe.evaluate, recipe.seed)
    device = from_environment({}).device
    model = build_model(recipe.model, data.facts, folder, recipe.seed, device)
    return model.train(), load_task(recipe.task, folder), data


def _forward(model: nn.Module, task: Task, batch: TensorBatch, precision: str, device: torch.device) -> Tensor:
    try:
        with computing(precision, device):
            args, kwargs = task.inputs(batch)
            return task.loss(model(*args, **kwargs), batch)[0]
    except Exception as error:
        raise RecipeError(f"a trial forward of the model and its loss failed: {told(error)}") from error
