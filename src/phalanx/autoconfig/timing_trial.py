"""Time forward, backward and the update in each precision, with and without deterministic kernels."""

import contextlib
import gc
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from phalanx.autoconfig.trial_model import activation_checkpointing, compute_loss, open_trial, select_trial_device
from phalanx.autoconfig.trial_names import OTHER_LOAD_KEY, OUT_OF_MEMORY_KEY
from phalanx.cluster.calibration.background_load import OtherLoad
from phalanx.compat import find_nondeterministic_op, scale_in_place, set_deterministic
from phalanx.data import RunData
from phalanx.recipe import Recipe
from phalanx.recipe.devices import device_kind_of
from phalanx.recipe.grad_sync_defaults import (
    DETERMINISTIC_SLOWDOWN_KEY,
    MAX_DETERMINISM_SLOWDOWN,
    NONDETERMINISTIC_OP_KEY,
)
from phalanx.train.builder import make_lm_head, uses_cached_casts
from phalanx.train.distributed.compile import compile_blocks
from phalanx.train.distributed.oom import is_out_of_memory
from phalanx.train.lm_head import eval_mode
from phalanx.train.loss import LossFn
from phalanx.train.ops.blocks import find_blocks
from phalanx.train.ops.cached_cast_linear import CachedCastLinear, linear_names_in_blocks, use_cached_casts
from phalanx.train.optim import OptimizerContainer
from phalanx.train.precision import AUTOCAST_DTYPES
from phalanx.train.tasks import Task
from phalanx.train.train_step import to_device
from phalanx.train.worker import configure_kernels

TIMING_REPEATS = 5
TIMING_BUDGET_S = 4.0
"""Seconds after which no further round begins: a median of 2 rounds is exact enough for micro-batches of seconds."""
SLOW_PRECISION_RATIO = 3.0
"""A precision that takes this many times as long as the fastest is not timed again."""
UPDATE_KEY = "update"


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
    device = select_trial_device(payload)
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
    model, task, data = open_trial(payload)
    device = select_trial_device(payload)
    torch.set_num_threads(payload["threads"])
    configure_kernels(device, payload["precisions"][0], deterministic)
    batch = to_device(data.read_training(0, payload["micro"]), device)
    head = None
    if payload.get("chunked_loss", False):
        head = make_lm_head(model, task, data)
    optim = Recipe.model_validate(payload["recipe"]).optimizer
    optimizer = OptimizerContainer(model, optim, offload=payload.get("offload", False))
    load = OtherLoad()
    loss_fns = {precision: LossFn(task, precision, device) for precision in payload["precisions"]}
    layers = _enable_cached_casts(payload, model, task, data, device) if head is None else []
    times: dict[str, list[float]] = {**{precision: [] for precision in loss_fns}, UPDATE_KEY: []}
    if deterministic and hasattr(task, "metrics"):  # which a run comes to late
        with eval_mode(model), torch.no_grad():
            compute_loss(loss_fns[payload["precisions"][0]], model, batch, metrics=True)
    with activation_checkpointing(model, payload.get("recompute", "none")), _compile_model_blocks(model, payload):
        # The update comes first, so that the timed passes have optimizer state in memory, as those of a run do.
        begin = time.perf_counter()
        for _ in range(TIMING_REPEATS + 1):
            if time.perf_counter() - begin > TIMING_BUDGET_S and len(times[UPDATE_KEY]) > 1:
                break
            for precision, loss_fn in list(loss_fns.items()):
                loss_fn.lm_head = head
                model.zero_grad(set_to_none=True)
                start_time = time.perf_counter()
                try:
                    compute_loss(loss_fn, model, batch).backward()
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
    medians = {name: statistics.median(seconds[1:] or seconds) for name, seconds in times.items()}
    return medians | ({OTHER_LOAD_KEY: load.count_cores()} if device.type == "cpu" else {})


def _find_slow_precisions(last_s: Mapping[str, float]) -> list[str]:
    """Return the precisions that are too slow to be worth another round: a CPU without instructions for bf16 takes ten
    times as long in it."""
    return [name for name, seconds in last_s.items() if seconds > SLOW_PRECISION_RATIO * min(last_s.values())]


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


def _synchronize(device: torch.device) -> None:
    if device_kind_of(device.type).is_gpu:
        torch.accelerator.synchronize()
