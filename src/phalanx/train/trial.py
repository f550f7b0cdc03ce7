"""Trials before a run: what a recipe's model weighs, how many FLOPs a sample takes, how fast a precision really is.

Each function runs in a short process of its own (it may fail or fill memory without harm) and returns plain numbers,
from which `plan` chooses.
"""

import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from phalanx.cluster import measure_matmul, this_machine
from phalanx.compat import die_first, fake_tensors, nondeterministic, scale_in_place, set_determinism
from phalanx.data import Data, open_data
from phalanx.errors import RecipeError
from phalanx.recipe import Recipe, huggingface_directory, import_object, told
from phalanx.recipe.devices import kind_of
from phalanx.recipe.exchanges import (
    CHANGES,
    DETERMINISM_LIMIT,
    DETERMINISTIC_COST,
    LOSES,
    NONDETERMINISTIC,
    ONLY_GPU,
    WRITES,
)
from phalanx.recipe.imports import CONFIG
from phalanx.recipe.schema import Parallelism
from phalanx.run import Run
from phalanx.train import huggingface, weights
from phalanx.train.callbacks import load_callbacks
from phalanx.train.cast_once import CastLinear, cast_once, linear_in
from phalanx.train.causality import check_causal, check_documents, check_split
from phalanx.train.forward_state import listed, weights_now, what_changes
from phalanx.train.head import evaluating
from phalanx.train.memory import is_out_of_memory
from phalanx.train.model import build_model, check_room, seed_everything
from phalanx.train.objective import Objective, Scoring
from phalanx.train.optimizers import Optimizer, trainable
from phalanx.train.parallel.blocks import find_blocks
from phalanx.train.parallel.compiled import compile_blocks
from phalanx.train.parallel.parallelize import Choices, outline
from phalanx.train.parallel.recompute import Recompute, apply_recompute
from phalanx.train.parallel.staging import cut_up
from phalanx.train.peak import bytes_per_sample
from phalanx.train.place import broken_gpu, from_environment
from phalanx.train.precision import AUTOCAST, computing
from phalanx.train.reporter import ToRun
from phalanx.train.same_model import new_buffer, other_parameter
from phalanx.train.savable import persistent_buffers
from phalanx.train.step import to_device
from phalanx.train.stop import StopRequest
from phalanx.train.tasks import LanguageModeling, Task, TensorBatch, load_task
from phalanx.train.trace import trace
from phalanx.train.worker import assemble, casts_once, head_of, prepare_torch, set_kernels, units_per_sample

FLOPS_RULE = (
    "matmuls, convolutions and attention (full, not causal-half) of one forward pass, x 3 for forward and backward; "
    "recomputation not counted"
)
REPEATS = 5
UPDATE = "update"
OUT_OF_MEMORY = "out_of_memory"
"""Key of what a trial returns that ran out of memory."""
WAYS: tuple[Recompute, ...] = ("none", "selective", "full")


def profile(payload: dict[str, Any]) -> dict[str, Any]:
    """What `recipe` (sources prepared) needs for a sample: parameters, FLOPs, and the peak bytes of forward and
    backward, for each of the `losses` and each way of recomputing among `ways`; None where that way ran out of memory
    or does not go with the model. `{"out_of_memory": 1.0}` when that is so of a forward alone. Computes with so many
    `threads`."""
    try:
        return _profile(payload)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {OUT_OF_MEMORY: 1.0}


def imagined(payload: dict[str, Any]) -> dict[str, Any]:
    """`profile` with tensors that have neither memory nor values, for a model that no worker holds whole: no weight is
    read and nothing is computed. Memory is counted as on a CPU, and whether the model looks ahead is not checked. Empty
    where the model cannot be followed so, because what it does depends on values."""
    try:
        with fake_tensors(symbols=False):
            return _profile(payload, values=False)
    except Exception:  # noqa: BLE001 any model may fail at this in its own way; `profile` tells what is really wrong
        return {}


def _profile(payload: dict[str, Any], values: bool = True) -> dict[str, Any]:
    torch.set_num_threads(payload["threads"])  # more, beside other work, would wait for each other
    model, task, data = _open(payload, values)
    built, buffers = dict(model.named_parameters()), persistent_buffers(model)
    device = _device(payload) if values else torch.device("cpu")
    if not values:
        huggingface.materialise(model, device)
    # FLOPs do not depend on the precision, but in fp32 a GPU has no kernel for grouped heads that keeps no scores.
    counting = payload.get("precision", "fp32") if kind_of(device.type).is_gpu else "fp32"
    if values and isinstance(task, LanguageModeling):
        check_documents(model, task, to_device(data.train(0, 1), device))
    flops, before = [], weights_now(model, values)

    def count(samples: int) -> None:
        counter, batch = FlopCounterMode(display=False), to_device(data.train(0, samples), device)
        seed_everything(0, device)
        with _untrained(model), counter, torch.no_grad():
            _loss(Scoring(task, counting, device), model, batch)
        flops.append(counter.get_total_flops())

    changed, lost = what_changes(model, lambda: count(1)) if values else ([], [])
    if not values:
        count(1)
    count(2)
    if values and (
        what := other_parameter(built, dict(model.named_parameters())) or new_buffer(buffers, persistent_buffers(model))
    ):
        raise RecipeError(f"a trial forward of the model: {what}")
    now = weights_now(model, values)
    if values and isinstance(task, LanguageModeling):  # a forward that fails has been told by now
        with computing(counting, device):
            check_causal(model, task, to_device(data.train(0, 1), device))
            if payload.get("context", 1) > 1:
                check_split(model, task, to_device(data.train(0, 1), device))
    parameters = sum(p.numel() for p in trainable(model).values())
    scorings = _scorings(payload, model, task, data, device)
    return {
        "trainable_parameters": parameters,
        "frozen_parameters": sum(p.numel() for p in model.parameters()) - parameters,
        "flops_per_sample": 3.0 * (flops[-1] - flops[0]),
        "flops_rule": FLOPS_RULE,
        "data_info": asdict(data.facts),
        "unit": "tokens" if data.facts.kind == "tokens" else "samples",
        "units_per_sample": units_per_sample(data.facts),
        "blocks": len(find_blocks(model)),
        WRITES: [name for name, weight in before.items() if now.get(name) != weight],
        CHANGES: listed(changed),
        LOSES: listed(lost),
        ONLY_GPU: listed([name for name, part in model.named_modules() if isinstance(part, nn.SyncBatchNorm)]),
        "peaks": {loss: _peaks(payload, model, scoring, data, device) for loss, scoring in scorings.items()},
    }


def race(payload: dict[str, Any]) -> dict[str, Any]:
    """Seconds of forward and backward of one micro-batch in each of `payload["precisions"]`, and of an `update`: norm,
    clipping, optimizer. Medians of a few, precisions in turn, after a warm-up, with the run's own model, micro-batch,
    recomputation, loss, threads, compilation and deterministic kernels, and the optimizer's state in memory. A
    precision that runs out of memory is left out; `{"out_of_memory": 1.0}` when all do. `nondeterministic` names an
    operation without a deterministic kernel; the times are then those of the run without the promise."""
    try:
        return _race_by_exact(payload)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {OUT_OF_MEMORY: 1.0}


def _race_by_exact(payload: dict[str, Any]) -> dict[str, Any]:
    """`_race` with the kernels that `payload["determinism"]` of a recipe asks for; for `auto` on a GPU with and without
    deterministic ones, and what these cost as a part of the time (`deterministic_cost`)."""
    exact = payload.get("determinism", "off")
    free: dict[str, float] = {}
    device = _device(payload)
    if exact == "off" or (exact == "auto" and not (kind_of(device.type).is_gpu and kind_of(device.type).deterministic)):
        return _race(payload, deterministic=False)
    if exact == "auto":
        free = _race(payload, deterministic=False)
        gc.collect()
        torch.accelerator.empty_cache()
    try:
        strict = _race(payload, deterministic=True)
    except RuntimeError as error:
        name = nondeterministic(error)
        if name is None:
            raise
        set_determinism(False)
        return {**(free or _race(payload, deterministic=False)), NONDETERMINISTIC: name}
    precision = payload["precisions"][0]
    if precision not in free or precision not in strict:
        return strict
    cost = strict[precision] / free[precision] - 1.0
    return {**(strict if cost < DETERMINISM_LIMIT else free), DETERMINISTIC_COST: cost}


def _race(payload: dict[str, Any], deterministic: bool) -> dict[str, float]:
    model, task, data = _open(payload)
    device = _device(payload)
    torch.set_num_threads(payload["threads"])
    set_kernels(device, payload["precisions"][0], deterministic)
    batch = to_device(data.train(0, payload["micro"]), device)
    head = None
    if payload.get("chunked_loss", False):
        head = head_of(model, task, data)
    optim = Recipe.model_validate(payload["recipe"]).optimizer
    optimizer = Optimizer(model, optim, offload=payload.get("offload", False))
    scorings = {precision: Scoring(task, precision, device) for precision in payload["precisions"]}
    layers = _casting(payload, model, task, data, device) if head is None else []
    times: dict[str, list[float]] = {**{precision: [] for precision in scorings}, UPDATE: []}
    if deterministic and hasattr(task, "metrics"):  # which a run comes to late
        with evaluating(model), torch.no_grad():
            _loss(scorings[payload["precisions"][0]], model, batch, metrics=True)
    with _recomputing(model, payload.get("recompute", "none")), _compiled(model, payload):
        # The update comes first, so that the timed passes have its state beside them, as those of a run do.
        for _ in range(REPEATS + 1):
            for precision, scoring in list(scorings.items()):
                scoring.head = head
                model.zero_grad(set_to_none=True)
                begun = time.perf_counter()
                try:
                    _loss(scoring, model, batch).backward()
                    for layer in layers:
                        layer.collect()
                except Exception as error:
                    if not is_out_of_memory(error) or len(scorings) == 1:
                        raise
                    del scorings[precision], times[precision]
                    continue
                _wait(device)
                times[precision].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            gradients = [parameter.grad for parameter in optimizer.names if parameter.grad is not None]
            if not gradients:  # of a precision that ran out of memory
                continue
            scale_in_place(gradients, 1.0 / (1.0 + float(nn.utils.get_total_norm(gradients))))
            optimizer.step(0.0)
            _wait(device)
            times[UPDATE].append(time.perf_counter() - begun)
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}


def matmul(payload: dict[str, Any]) -> dict[str, float]:
    """The machine's matmul rate in TFLOP/s by precision, with the threads of one worker."""
    return measure_matmul(payload["device"], payload["threads"])


def fits(payload: dict[str, Any]) -> None:
    """RecipeError unless the recipe's model can be divided as its layout says."""
    recipe = Recipe.model_validate(payload["recipe"])
    assert isinstance(recipe.parallelism, Parallelism)
    model, task, data = _open(payload, load=False)
    choices = Choices(rules=recipe.model.tp_plan, sequence=data.facts.sequence)
    found = outline(model, recipe.parallelism, choices)
    if recipe.parallelism.pipeline > 1:
        batch = to_device(data.train(0, 1), torch.device("cpu"))
        cut_up(model, Scoring(task, "fp32", torch.device("cpu")), batch, recipe.parallelism, found)


def begins(payload: dict[str, Any]) -> None:
    """DataError unless the weights that `init_from` names fit the recipe's model."""
    recipe, folder = Recipe.model_validate(payload["recipe"]), Path(payload["folder"])
    model, _, _ = _open(payload, load=False)
    assert recipe.init_from is not None
    weights.origin(recipe.init_from, folder, model)


def traced(payload: dict[str, Any]) -> dict[str, Any]:
    """A profile of a few steps of a resolved recipe, as plain values."""
    recipe, folder = Recipe.model_validate(payload["recipe"]), Path(payload["folder"])
    place = from_environment({}, recipe.device)
    prepare_torch(recipe, place)
    data = open_data(recipe.data, recipe.evaluation, recipe.seed)
    nowhere = Run(Path(payload["out"]).parent)
    parts, objective = assemble(nowhere, recipe, folder, place, data, ToRun(nowhere, leads=False), StopRequest())
    assert isinstance(objective, Objective)
    return asdict(trace(parts, objective, payload["steps"], 3, Path(payload["out"])))


def importable(payload: dict[str, Any]) -> str:
    """RecipeError unless everything that a recipe names by import path exists, and a Hugging Face directory has what
    its model needs; DataError when `init_from` does not fit that, or has adapters that the recipe has not. Returns a
    hash of
    the source files of model and task and of what they imported from the recipe's folder, and of config.json, by which
    one knows that earlier trials still hold."""
    folder = Path(payload["folder"])
    directory = huggingface_directory(payload["build"], folder)
    if directory is not None:
        model = huggingface.build(directory, payload.get("args") or {})
        weights.files(directory, model)
        if payload.get("init") is not None:
            weights.origin(payload["init"], folder, model, payload["adapter"])
        owner, config = "", (directory / CONFIG).read_bytes()
    else:
        owner, config = import_object(payload["build"], folder, key="model.build").__module__, b""
    task = load_task(payload["task"], folder)
    load_callbacks(payload["callbacks"], folder)
    named = {owner, type(task).__module__}
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    sources = {file for name, file in files.items() if name in named or Path(file).is_relative_to(folder)}
    code = b"".join(Path(it).read_bytes() for it in sorted(sources) if it.endswith(".py"))
    return xxhash.xxh3_64_hexdigest(code + config)


def _open(payload: dict[str, Any], load: bool = True) -> tuple[nn.Module, Task, Data]:
    die_first()
    recipe = Recipe.model_validate(payload["recipe"])
    folder = Path(payload["folder"])
    data = open_data(recipe.data, recipe.evaluation, recipe.seed)
    device = _device(payload) if load else torch.device("cpu")
    if load:
        check_room(recipe.model, data.facts, folder, this_machine().memory_bytes)
    model = build_model(recipe.model, data.facts, folder, recipe.seed, device, recipe.lora, load=load)
    return model.train(), load_task(recipe.task, folder), data


def _scorings(
    payload: dict[str, Any], model: nn.Module, task: Task, data: Data, device: torch.device
) -> dict[str, Scoring]:
    """The losses to follow, by name. Where the model's output layer cannot be left out, the whole loss stands for the
    one in chunks, as it does in the run."""
    precision, losses = payload.get("precision", "fp32"), payload.get("losses", ["whole"])
    found = {loss: Scoring(task, precision, device) for loss in losses}
    if "chunked" in found:
        found["chunked"].head = head_of(model, task, data)
        if found["chunked"].head is None:
            found = {"whole": found["chunked"]}
    return found


def _peaks(
    payload: dict[str, Any], model: nn.Module, scoring: Scoring, data: Data, device: torch.device
) -> dict[str, int | None]:
    """Peak bytes of a sample by way of recomputing."""
    found: dict[str, int | None] = dict.fromkeys(WAYS)
    for way in payload.get("ways", WAYS):
        if way != "none" and not find_blocks(model) and found["none"] is not None:
            found[way] = found["none"]  # nothing would be recomputed
            continue
        with _recomputing(model, way):
            found[way] = _peak(way, model, scoring, data, device)
    return found


def _peak(way: Recompute, model: nn.Module, scoring: Scoring, data: Data, device: torch.device) -> int | None:
    def forward(samples: int) -> Tensor:
        return _loss(scoring, model, to_device(data.train(0, samples), device))

    try:
        return bytes_per_sample(model, forward, device)
    except Exception as error:
        # Selective recomputation refuses models that change in place what it keeps; others take another way then.
        if is_out_of_memory(error) or (way != "none" and isinstance(error, RuntimeError)):
            return None
        if isinstance(error, RecipeError) or broken_gpu(error):
            raise
        raise RecipeError(f"a trial backward of the model failed: {told(error)}") from error


@contextlib.contextmanager
def _untrained(model: nn.Module) -> Iterator[None]:
    """The model with parameters that ask for no gradient, which a count of operations cannot follow without one."""
    asking = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in asking:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)


@contextlib.contextmanager
def _recomputing(model: nn.Module, way: Recompute) -> Iterator[None]:
    """The model's blocks with this way of recomputing, and afterwards as they were."""
    blocks = [model.get_submodule(name) for name in find_blocks(model)]
    before = [vars(block).get("forward") for block in blocks]
    apply_recompute(model, find_blocks(model), way)
    try:
        yield
    finally:
        for block, forward in zip(blocks, before, strict=True):
            vars(block).pop("forward", None)
            if forward is not None:
                vars(block)["forward"] = forward


@contextlib.contextmanager
def _compiled(model: nn.Module, payload: dict[str, Any]) -> Iterator[None]:
    """The model's blocks compiled, where the run will have them so; CUDA graphs are not recorded."""
    if payload.get("compile"):
        compile_blocks(model, [model.get_submodule(name) for name in find_blocks(model)])
    yield


def _casting(
    payload: dict[str, Any], model: nn.Module, task: Task, data: Data, device: torch.device
) -> list[CastLinear]:
    """The layers that cast their weights once a step, where the run will have such. They have done so in what is timed:
    a micro-batch that is not the first of its step, if a worker alone has several."""
    precision, exact = payload["precisions"][0], payload.get("determinism", "off")
    if not casts_once(payload.get("compile", False), precision, device):
        return []
    names = linear_in(model, find_blocks(model))
    if (head := head_of(model, task, data)) is not None:
        names.append(head.name)
    layers = cast_once(model, names, AUTOCAST[precision])
    for layer in layers:
        several = payload["recipe"]["batch"]["global_size"] > payload["micro"]
        layer.add_up(several and exact != "elastic" and payload["alone"])
    return layers


def _loss(scoring: Scoring, model: nn.Module, batch: TensorBatch, metrics: bool = False) -> Tensor:
    """The sum of a micro-batch's losses. RecipeError when model or task fail; running out of memory is passed on, and
    an operation without a deterministic kernel."""
    try:
        (_, total, _), *_ = scoring(model, batch, metrics)
    except Exception as error:
        if isinstance(error, RecipeError) or is_out_of_memory(error) or broken_gpu(error):
            raise
        if isinstance(error, RuntimeError) and nondeterministic(error):
            raise
        raise RecipeError(f"a trial forward of the model and its loss failed: {told(error)}") from error
    return total


def _wait(device: torch.device) -> None:
    if kind_of(device.type).is_gpu:
        torch.accelerator.synchronize()


def _device(payload: dict[str, Any]) -> torch.device:
    """Where the recipe of a trial is to run."""
    return from_environment({}, payload["recipe"].get("device", "auto")).device
