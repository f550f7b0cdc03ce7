"""Trials before a run: what a recipe's model weighs, how many FLOPs a sample takes, how fast a precision really is.

Each function runs in a short process of its own (it may fail or fill memory without harm) and returns plain numbers,
from which `plan` chooses.
"""

import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from phalanx.autoconfig.activation_memory import measure_bytes_per_sample
from phalanx.autoconfig.causality_check import check_causal, check_document_masking, check_split
from phalanx.cluster import discover_machine, measure_matmul
from phalanx.compat import (
    fake_tensor_mode,
    find_nondeterministic_op,
    prefer_oom_kill,
    scale_in_place,
    set_deterministic,
)
from phalanx.data import RunData, open_data
from phalanx.errors import RecipeError
from phalanx.recipe import Recipe, ResolvedRecipe, describe_exception, huggingface_directory, import_object
from phalanx.recipe.builder_arguments import check_known_arguments
from phalanx.recipe.devices import device_kind_of
from phalanx.recipe.grad_sync_defaults import (
    CHANGED_PARAMETERS_KEY,
    CHANGED_STATE_KEY,
    DETERMINISTIC_SLOWDOWN_KEY,
    GPU_ONLY_MODULES_KEY,
    MAX_DETERMINISM_SLOWDOWN,
    NONDETERMINISTIC_OP_KEY,
    UNSAVED_STATE_KEY,
)
from phalanx.recipe.imports import HF_CONFIG_FILE
from phalanx.recipe.schema import Parallelism
from phalanx.run import Run
from phalanx.train.builder import build_context, count_units_per_sample, make_lm_head, uses_cached_casts
from phalanx.train.callbacks import load_callbacks
from phalanx.train.checkpoint import init_weights
from phalanx.train.distributed.activation_checkpoint import ActivationCheckpointing, apply_activation_checkpointing
from phalanx.train.distributed.blocks import find_blocks
from phalanx.train.distributed.buffer_sync import find_forward_changes, format_names, snapshot_weight_versions
from phalanx.train.distributed.compile import compile_blocks
from phalanx.train.distributed.environment import dist_env_from_environment
from phalanx.train.distributed.failures import is_gpu_failure
from phalanx.train.distributed.meta_device import allocate_meta_parameters
from phalanx.train.distributed.module_state import get_persistent_buffers
from phalanx.train.distributed.oom import is_out_of_memory
from phalanx.train.distributed.parallelize import ParallelConfig, plan_model
from phalanx.train.distributed.pipeline.build import partition_model
from phalanx.train.distributed.same_model import new_buffer, other_parameter
from phalanx.train.hf import model as hf_model
from phalanx.train.lm_head import eval_mode
from phalanx.train.loss import LossFn, LossModule
from phalanx.train.model_builder import build_model, check_model_fits_memory, seed_everything
from phalanx.train.ops.cached_cast_linear import CachedCastLinear, linear_names_in_blocks, use_cached_casts
from phalanx.train.optim import OptimizerContainer, trainable_parameters
from phalanx.train.precision import AUTOCAST_DTYPES, autocast_context
from phalanx.train.profiler import profile_steps
from phalanx.train.reporter import RunReporter
from phalanx.train.tasks import LanguageModeling, Task, TensorBatch, load_task
from phalanx.train.train_context import WorkerProcess
from phalanx.train.train_step import to_device
from phalanx.train.worker import configure_kernels, configure_torch

FLOPS_RULE = (
    "matmuls, convolutions and attention (full, not causal-half) of one forward pass, x 3 for forward and backward; "
    "recomputation not counted"
)
TIMING_REPEATS = 5
SLOW_PRECISION_RATIO = 3.0
"""A precision that takes this many times as long as the fastest is not timed again."""
UPDATE_KEY = "update"
OUT_OF_MEMORY_KEY = "out_of_memory"
"""Key of what a trial returns that ran out of memory."""
CHECKPOINTING_MODES: tuple[ActivationCheckpointing, ...] = ("none", "selective", "full")


def profile_model(payload: dict[str, Any]) -> dict[str, Any]:
    """Measure what a sample of `recipe` (sources prepared) needs: parameters, FLOPs, and the peak bytes of forward and
    backward, for each of the `losses` and each mode of activation checkpointing in `ways`; None where a mode ran out of
    memory or does not work with the model. `{"out_of_memory": 1.0}` when forward alone runs out of memory. Computes
    with `threads` threads."""
    try:
        return _profile_opened(payload)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {OUT_OF_MEMORY_KEY: 1.0}


def profile_model_meta(payload: dict[str, Any]) -> dict[str, Any]:
    """`profile_model` with tensors that have neither memory nor values, for a model that no worker holds whole: no
    weight is
    read and nothing is computed. Memory is counted as on a CPU, and whether the model looks ahead is not checked. Empty
    where the model cannot be followed so, because what it does depends on values."""
    try:
        with fake_tensor_mode(symbols=False):
            return _profile_opened(payload, with_values=False)
    except Exception:  # noqa: BLE001 any model may fail here in its own way; `profile_model` raises the actual error
        return {}


def _profile_opened(payload: dict[str, Any], with_values: bool = True) -> dict[str, Any]:
    torch.set_num_threads(payload["threads"])  # with more threads than free cores they would wait for each other
    model, task, data = _open_trial(payload, with_values)
    built, buffers = dict(model.named_parameters()), get_persistent_buffers(model)
    device = _select_trial_device(payload) if with_values else torch.device("cpu")
    if not with_values:
        allocate_meta_parameters([model], device)
    # FLOPs do not depend on the precision, but in fp32 a GPU has no kernel for grouped heads that keeps no scores.
    precision = payload.get("precision", "fp32") if device_kind_of(device.type).is_gpu else "fp32"
    if with_values and isinstance(task, LanguageModeling):
        check_document_masking(model, task, to_device(data.read_training(0, 1), device))
    flops, before = [], snapshot_weight_versions(model, with_values)

    def count(samples: int) -> None:
        counter, batch = FlopCounterMode(display=False), to_device(data.read_training(0, samples), device)
        seed_everything(0, device)
        with _without_gradients(model), counter, torch.no_grad():
            _compute_loss(LossFn(task, precision, device), model, batch)
        flops.append(counter.get_total_flops())

    changed, unsaved = find_forward_changes(model, lambda: count(1)) if with_values else ([], [])
    if not with_values:
        count(1)
    count(2)
    if with_values and (
        what := other_parameter(built, dict(model.named_parameters()))
        or new_buffer(buffers, get_persistent_buffers(model))
    ):
        raise RecipeError(f"a trial forward of the model: {what}")
    now = snapshot_weight_versions(model, with_values)
    if with_values and isinstance(task, LanguageModeling):  # a failing forward has already raised
        with autocast_context(precision, device):
            check_causal(model, task, to_device(data.read_training(0, 1), device))
            if payload.get("context", 1) > 1:
                check_split(model, task, to_device(data.read_training(0, 1), device))
    parameters = sum(p.numel() for p in trainable_parameters(model).values())
    loss_fns = _make_loss_fns(payload, model, task, data, device)
    return {
        "trainable_parameters": parameters,
        "frozen_parameters": sum(p.numel() for p in model.parameters()) - parameters,
        "flops_per_sample": 3.0 * (flops[-1] - flops[0]),
        "flops_rule": FLOPS_RULE,
        "data_info": asdict(data.info),
        "unit": "tokens" if data.info.kind == "tokens" else "samples",
        "units_per_sample": count_units_per_sample(data.info),
        "blocks": len(find_blocks(model)),
        CHANGED_PARAMETERS_KEY: [name for name, weight in before.items() if now.get(name) != weight],
        CHANGED_STATE_KEY: format_names(changed),
        UNSAVED_STATE_KEY: format_names(unsaved),
        GPU_ONLY_MODULES_KEY: format_names(
            [name for name, part in model.named_modules() if isinstance(part, nn.SyncBatchNorm)]
        ),
        "peaks": {loss: _measure_peaks(payload, model, loss_fn, data, device) for loss, loss_fn in loss_fns.items()},
    }


def time_precisions(payload: dict[str, Any]) -> dict[str, Any]:
    """Seconds of forward and backward of one micro-batch in each of `payload["precisions"]`, and of an `update`: norm,
    clipping, optimizer. Medians of a few, precisions in turn, after a warm-up, with the run's own model, micro-batch,
    recomputation, loss, threads, compilation and deterministic kernels, and the optimizer's state in memory. A
    precision that runs out of memory is left out; `{"out_of_memory": 1.0}` when all do. `nondeterministic` names an
    operation without a deterministic kernel; the times are then those of the run without the promise."""
    try:
        return _time_by_determinism(payload)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {OUT_OF_MEMORY_KEY: 1.0}


def _time_by_determinism(payload: dict[str, Any]) -> dict[str, Any]:
    """`_time_once` with the kernels that `payload["determinism"]` of a recipe asks for; for `auto` on a GPU with and
    without deterministic ones, and what these cost as a part of the time (`deterministic_cost`)."""
    determinism = payload.get("determinism", "off")
    nondeterministic_times: dict[str, float] = {}
    device = _select_trial_device(payload)
    if determinism == "off" or (
        determinism == "auto"
        and not (device_kind_of(device.type).is_gpu and device_kind_of(device.type).names_nondeterministic_ops)
    ):
        return _time_once(payload, deterministic=False)
    if determinism == "auto":
        nondeterministic_times = _time_once(payload, deterministic=False)
        gc.collect()
        torch.accelerator.empty_cache()
    try:
        deterministic_times = _time_once(payload, deterministic=True)
    except RuntimeError as error:
        name = find_nondeterministic_op(error)
        if name is None:
            raise
        set_deterministic(False)
        return {**(nondeterministic_times or _time_once(payload, deterministic=False)), NONDETERMINISTIC_OP_KEY: name}
    precision = payload["precisions"][0]
    if precision not in nondeterministic_times or precision not in deterministic_times:
        return deterministic_times
    cost = deterministic_times[precision] / nondeterministic_times[precision] - 1.0
    return {
        **(deterministic_times if cost < MAX_DETERMINISM_SLOWDOWN else nondeterministic_times),
        DETERMINISTIC_SLOWDOWN_KEY: cost,
    }


def _time_once(payload: dict[str, Any], deterministic: bool) -> dict[str, float]:
    model, task, data = _open_trial(payload)
    device = _select_trial_device(payload)
    torch.set_num_threads(payload["threads"])
    configure_kernels(device, payload["precisions"][0], deterministic)
    batch = to_device(data.read_training(0, payload["micro"]), device)
    head = None
    if payload.get("chunked_loss", False):
        head = make_lm_head(model, task, data)
    optim = Recipe.model_validate(payload["recipe"]).optimizer
    optimizer = OptimizerContainer(model, optim, offload=payload.get("offload", False))
    loss_fns = {precision: LossFn(task, precision, device) for precision in payload["precisions"]}
    layers = _enable_cached_casts(payload, model, task, data, device) if head is None else []
    times: dict[str, list[float]] = {**{precision: [] for precision in loss_fns}, UPDATE_KEY: []}
    if deterministic and hasattr(task, "metrics"):  # which a run comes to late
        with eval_mode(model), torch.no_grad():
            _compute_loss(loss_fns[payload["precisions"][0]], model, batch, metrics=True)
    with _activation_checkpointing(model, payload.get("recompute", "none")), _compile_model_blocks(model, payload):
        # The update comes first, so that the timed passes have optimizer state in memory, as those of a run do.
        for _ in range(TIMING_REPEATS + 1):
            for precision, loss_fn in list(loss_fns.items()):
                loss_fn.lm_head = head
                model.zero_grad(set_to_none=True)
                start_time = time.perf_counter()
                try:
                    _compute_loss(loss_fn, model, batch).backward()
                    for layer in layers:
                        layer.move_grad_sum_to_grad()
                except Exception as error:
                    if not is_out_of_memory(error) or len(loss_fns) == 1:
                        raise
                    del loss_fns[precision], times[precision]
                    continue
                _synchronize(device)
                times[precision].append(time.perf_counter() - start_time)
            # A GPU's first round loads kernels and compiles: only its later rounds can be compared.
            if times[UPDATE_KEY] or device.type == "cpu":
                for precision in _find_slow_precisions({name: times[name][-1] for name in loss_fns}):
                    del loss_fns[precision]
            start_time = time.perf_counter()
            gradients = [parameter.grad for parameter in optimizer.parameter_names if parameter.grad is not None]
            if not gradients:  # of a precision that ran out of memory
                continue
            scale_in_place(gradients, 1.0 / (1.0 + float(nn.utils.get_total_norm(gradients))))
            optimizer.step(0.0)
            _synchronize(device)
            times[UPDATE_KEY].append(time.perf_counter() - start_time)
    return {name: statistics.median(seconds[1:] or seconds) for name, seconds in times.items()}


def _find_slow_precisions(last_s: Mapping[str, float]) -> list[str]:
    """Return the precisions that are too slow to be worth another round: a CPU without instructions for bf16 takes ten
    times as long in it."""
    return [name for name, seconds in last_s.items() if seconds > SLOW_PRECISION_RATIO * min(last_s.values())]


def measure_matmul_rate(payload: dict[str, Any]) -> dict[str, float]:
    """The machine's matmul rate in TFLOP/s by precision, with the threads of one worker."""
    return measure_matmul(payload["device"], payload["threads"])


def check_parallelism(payload: dict[str, Any]) -> None:
    """RecipeError unless the recipe's model can be divided as its layout says."""
    recipe, parallelism = Recipe.model_validate(payload["recipe"]), Parallelism(**payload["recipe"]["parallelism"])
    model, task, data = _open_trial(payload, load=False)
    config = ParallelConfig(tp_plan=recipe.model.tp_plan, seq_len=data.info.seq_len)
    model_plan = plan_model(model, parallelism, config)
    if parallelism.pipeline > 1:
        batch = to_device(data.read_training(0, 1), torch.device("cpu"))
        partition_model(model, LossFn(task, "fp32", torch.device("cpu")), batch, parallelism, model_plan)


def begins(payload: dict[str, Any]) -> None:
    """DataError unless the weights that `init_from` names fit the recipe's model."""
    recipe, folder = Recipe.model_validate(payload["recipe"]), Path(payload["folder"])
    model, _, _ = _open_trial(payload, load=False)
    assert recipe.init_from is not None
    init_weights.open_initial_weights(recipe.init_from, folder, model)


def profile_recipe_steps(payload: dict[str, Any]) -> dict[str, Any]:
    """A profile of a few steps of a resolved recipe, as plain values."""
    recipe, folder = ResolvedRecipe.model_validate(payload["recipe"]), Path(payload["folder"])
    dist_env = dist_env_from_environment({}, recipe.device)
    configure_torch(recipe, dist_env)
    data = open_data(recipe.data, recipe.evaluation, recipe.seed)
    scratch_run = Run(Path(payload["out"]).parent)
    process = WorkerProcess(scratch_run, folder, dist_env, RunReporter(scratch_run, is_rank_zero=False))
    context = build_context(process, recipe, data)
    assert isinstance(context.loss_module, LossModule)
    return asdict(profile_steps(context, context.loss_module, payload["steps"], 3, Path(payload["out"])))


def check_imports(payload: dict[str, Any]) -> str:
    """Check what needs no data. Return a hash of the source files of model and task, of what they imported from the
    recipe's folder, and of config.json: trials with the same hash still hold.

    RecipeError unless everything that a recipe names by import path exists, the builder takes `model.args`, and a
    Hugging Face directory has what its model needs. DataError when `init_from` does not fit that, or has adapters that
    the recipe has not."""
    folder = Path(payload["folder"])
    directory = huggingface_directory(payload["build"], folder)
    if directory is not None:
        model = hf_model.build_on_meta(directory, payload.get("args") or {})
        init_weights.open_hf_weights(directory, model)
        if payload.get("init") is not None:
            init_weights.open_initial_weights(payload["init"], folder, model, payload["adapter"])
        owner, config = "", (directory / HF_CONFIG_FILE).read_bytes()
    else:
        builder = import_object(payload["build"], folder, key="model.build")
        check_known_arguments(builder, payload.get("args") or {})
        owner, config = builder.__module__, b""
    task = load_task(payload["task"], folder)
    load_callbacks(payload["callbacks"], folder)
    named = {owner, type(task).__module__}
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    sources = {file for name, file in files.items() if name in named or Path(file).is_relative_to(folder)}
    code = b"".join(Path(it).read_bytes() for it in sorted(sources) if it.endswith(".py"))
    return xxhash.xxh3_64_hexdigest(code + config)


def _open_trial(payload: dict[str, Any], load: bool = True) -> tuple[nn.Module, Task, RunData]:
    prefer_oom_kill()
    recipe = Recipe.model_validate(payload["recipe"])
    folder = Path(payload["folder"])
    data = open_data(recipe.data, recipe.evaluation, recipe.seed)
    device = _select_trial_device(payload) if load else torch.device("cpu")
    if load:
        check_model_fits_memory(recipe.model, data.info, folder, discover_machine().memory_bytes)
    model = build_model(recipe.model, data.info, folder, recipe.seed, device, recipe.lora, load=load)
    return model.train(), load_task(recipe.task, folder), data


def _make_loss_fns(
    payload: dict[str, Any], model: nn.Module, task: Task, data: RunData, device: torch.device
) -> dict[str, LossFn]:
    """The losses to follow, by name. Where the model's output layer cannot be left out, the whole loss stands for the
    one in chunks, as it does in the run."""
    precision, losses = payload.get("precision", "fp32"), payload.get("losses", ["whole"])
    found = {loss: LossFn(task, precision, device) for loss in losses}
    if "chunked" in found:
        found["chunked"].lm_head = make_lm_head(model, task, data)
        if found["chunked"].lm_head is None:
            found = {"whole": found["chunked"]}
    return found


def _measure_peaks(
    payload: dict[str, Any], model: nn.Module, loss_fn: LossFn, data: RunData, device: torch.device
) -> dict[str, int | None]:
    """Peak bytes of a sample by way of recomputing."""
    found: dict[str, int | None] = dict.fromkeys(CHECKPOINTING_MODES)
    for mode in payload.get("ways", CHECKPOINTING_MODES):
        if mode != "none" and not find_blocks(model) and found["none"] is not None:
            found[mode] = found["none"]  # nothing would be recomputed
            continue
        with _activation_checkpointing(model, mode):
            found[mode] = _measure_peak(mode, model, loss_fn, data, device)
    return found


def _measure_peak(
    mode: ActivationCheckpointing, model: nn.Module, loss_fn: LossFn, data: RunData, device: torch.device
) -> int | None:
    def forward(samples: int) -> Tensor:
        return _compute_loss(loss_fn, model, to_device(data.read_training(0, samples), device))

    try:
        return measure_bytes_per_sample(model, forward, device)
    except Exception as error:
        # Selective recomputation refuses models that change in place what it keeps; others take another way then.
        if is_out_of_memory(error) or (mode != "none" and isinstance(error, RuntimeError)):
            return None
        if isinstance(error, RecipeError) or is_gpu_failure(error):
            raise
        raise RecipeError(f"a trial backward of the model failed: {describe_exception(error)}") from error


@contextlib.contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
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
def _activation_checkpointing(model: nn.Module, mode: ActivationCheckpointing) -> Iterator[None]:
    """The model's blocks with this way of recomputing, and afterwards as they were."""
    blocks = [model.get_submodule(name) for name in find_blocks(model)]
    before = [vars(block).get("forward") for block in blocks]
    apply_activation_checkpointing(model, find_blocks(model), mode)
    try:
        yield
    finally:
        for block, forward in zip(blocks, before, strict=True):
            vars(block).pop("forward", None)
            if forward is not None:
                vars(block)["forward"] = forward


@contextlib.contextmanager
def _compile_model_blocks(model: nn.Module, payload: dict[str, Any]) -> Iterator[None]:
    """The model's blocks compiled, where the run will have them so; CUDA graphs are not recorded."""
    if payload.get("compile"):
        compile_blocks(model, [model.get_submodule(name) for name in find_blocks(model)])
    yield


def _enable_cached_casts(
    payload: dict[str, Any], model: nn.Module, task: Task, data: RunData, device: torch.device
) -> list[CachedCastLinear]:
    """The layers that cast their weights once a step, where the run will have such. They have done so in what is timed:
    a micro-batch that is not the first of its step, if a worker alone has several."""
    precision, determinism = payload["precisions"][0], payload.get("determinism", "off")
    if not uses_cached_casts(payload.get("compile", False), precision, device):
        return []
    names = linear_names_in_blocks(model, find_blocks(model))
    if (head := make_lm_head(model, task, data)) is not None:
        names.append(head.name)
    layers = use_cached_casts(model, names, AUTOCAST_DTYPES[precision])
    for layer in layers:
        accumulates = payload["recipe"]["batch"]["global_size"] > payload["micro"]
        layer.set_accumulate_in_matmul(accumulates and determinism != "elastic" and payload["alone"])
    return layers


def _compute_loss(loss_fn: LossFn, model: nn.Module, batch: TensorBatch, metrics: bool = False) -> Tensor:
    """The sum of a micro-batch's losses. RecipeError when model or task fail; running out of memory is passed on, and
    an operation without a deterministic kernel."""
    try:
        (_, total, _), *_ = loss_fn(model, batch, metrics)
    except Exception as error:
        if isinstance(error, RecipeError) or is_out_of_memory(error) or is_gpu_failure(error):
            raise
        if isinstance(error, RuntimeError) and find_nondeterministic_op(error):
            raise
        raise RecipeError(f"a trial forward of the model and its loss failed: {describe_exception(error)}") from error
    return total


def _synchronize(device: torch.device) -> None:
    if device_kind_of(device.type).is_gpu:
        torch.accelerator.synchronize()


def _select_trial_device(payload: dict[str, Any]) -> torch.device:
    """Where the recipe of a trial is to run."""
    return dist_env_from_environment({}, payload["recipe"].get("device", "auto")).device
