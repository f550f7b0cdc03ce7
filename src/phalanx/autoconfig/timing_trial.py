"""Time forward, backward and the update in each precision, with and without deterministic kernels."""

import gc
import math
import statistics
import time
from typing import Any

import torch
from torch import nn

from phalanx.autoconfig.trial_model import activation_checkpointing, compute_loss, open_trial, select_trial_device
from phalanx.autoconfig.trial_names import OTHER_LOAD_KEY, OUT_OF_MEMORY_KEY
from phalanx.cluster.system_files import OtherLoad
from phalanx.compat import find_nondeterministic_op, set_deterministic
from phalanx.data import RunData
from phalanx.recipe import Recipe
from phalanx.recipe.devices import device_kind_of
from phalanx.recipe.grad_sync_defaults import (
    DETERMINISTIC_SLOWDOWN_KEY,
    MAX_DETERMINISM_SLOWDOWN,
    NONDETERMINISTIC_OP_KEY,
)
from phalanx.train.builder import make_lm_head, uses_cached_casts
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.failures import is_out_of_memory
from phalanx.train.distributed.mesh import make_single_worker_mesh
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.distributed.parallelize import compile_blocks
from phalanx.train.grad_sync.reducer import LocalReducer
from phalanx.train.loss import LossFn, LossModule, LossSums, eval_mode
from phalanx.train.ops.blocks import find_blocks
from phalanx.train.ops.cached_cast_linear import CachedCastLinear, linear_names_in_blocks, use_cached_casts
from phalanx.train.ops.random_draws import MicroBatchSeeds
from phalanx.train.optim.container import OptimizerContainer
from phalanx.train.precision import AUTOCAST_DTYPES, GradScaler
from phalanx.train.step_timer import HostStepTimer
from phalanx.train.tasks import Task, TensorBatch
from phalanx.train.train_step import GradientAccumulator, TrainStep, to_device
from phalanx.train.worker import configure_kernels

TIMING_REPEATS = 5
TIMING_BUDGET_S = 1.5
"""Seconds after which no further round begins, once two are timed."""
SLOW_TIMING_BUDGET_S = 4.0
"""The same, once one is timed: for micro-batches of seconds that is exact enough."""
SLOW_PRECISION_RATIO = 3.0
"""A precision that takes this many times as long as the fastest is not timed again."""
UPDATE_KEY = "update"


def time_precisions(payload: dict[str, Any]) -> dict[str, Any]:
    """Seconds of forward and backward of one micro-batch in each of `payload["precisions"]`, and of an `update`, by
    `TrainStep`. Medians of a few, precisions in turn, after a warm-up, with the run's own model, micro-batch,
    recomputation, loss, threads, compilation and deterministic kernels, and the optimizer's state in memory. A
    precision that runs out of memory is left out; `{"out_of_memory": 1.0}` when all do. `nondeterministic` names an
    operation without a deterministic kernel; the times are then those of the run without the promise. A round that
    takes longer than `slow_s` is the last."""
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
    if determinism == "off" or (determinism == "auto" and not device_kind_of(device.type).is_gpu):
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
    times = deterministic_times if cost < MAX_DETERMINISM_SLOWDOWN else nondeterministic_times
    return {**times, DETERMINISTIC_SLOWDOWN_KEY: cost}


def _time_once(payload: dict[str, Any], deterministic: bool) -> dict[str, float]:
    model, task, data = open_trial(payload)
    device = select_trial_device(payload)
    torch.set_num_threads(payload["threads"])
    configure_kernels(device, payload["precisions"][0], deterministic)
    batch = to_device(data.read_training(0, payload["micro"]), device)
    head = make_lm_head(model, task, data) if payload.get("chunked_loss", False) else None
    micro_batch_only = {"global_size": payload["micro"], "micro_size": payload["micro"]}
    recipe = Recipe.model_validate({**payload["recipe"], "batch": micro_batch_only})
    optim = recipe.optimizer
    optimizer = OptimizerContainer(model, optim, offload=payload.get("offload", False))
    load = OtherLoad()
    layers: list[CachedCastLinear] = []
    parameters, timer = list(optimizer.parameter_names), HostStepTimer()
    timer.start()
    # Made before the layers: they do not learn that a step begins. Timed is a micro-batch that is not its first.
    reducer, seeds = LocalReducer(parameters, layers), MicroBatchSeeds(0, device)
    parallel_model = ParallelModel(make_single_worker_mesh(), (model,))
    accumulator = GradientAccumulator(
        recipe, DistEnv(device=device), parallel_model, parameters, reducer, GradScaler(), seeds
    )
    if head is None:
        layers += _enable_cached_casts(payload, model, task, data, device)
    losses = {precision: TrialLoss(model, LossFn(task, precision, device)) for precision in payload["precisions"]}
    times: dict[str, list[float]] = {**{precision: [] for precision in losses}, UPDATE_KEY: []}
    if deterministic and hasattr(task, "metrics"):  # which a run comes to late
        with eval_mode(model), torch.no_grad():
            losses[payload["precisions"][0]](batch, metrics=True)
    for loss_module in losses.values():
        loss_module.loss_fn.lm_head = head
    train_steps = {
        precision: TrainStep(accumulator, optimizer, loss_module, lambda batch: batch, optim.max_grad_norm, timer)
        for precision, loss_module in losses.items()
    }
    with activation_checkpointing(model, payload.get("recompute", "none")):
        if payload.get("compile"):
            compile_blocks(model, [model.get_submodule(name) for name in find_blocks(model)])
        # The update comes first, so that the timed passes have optimizer state in memory, as those of a run do.
        begin = time.perf_counter()
        for step in range(1, TIMING_REPEATS + 2):
            num_rounds, elapsed_s = len(times[UPDATE_KEY]), time.perf_counter() - begin
            is_too_slow = num_rounds > 1 and min(times[name][-1] for name in train_steps) > payload.get(
                "slow_s", math.inf
            )
            budget_s = TIMING_BUDGET_S if num_rounds > 2 else SLOW_TIMING_BUDGET_S
            if is_too_slow or (num_rounds > 1 and elapsed_s > budget_s):
                break
            for precision, train_step in list(train_steps.items()):
                start_time = time.perf_counter()
                try:
                    train_step.accumulate(step, [batch])
                except Exception as error:
                    if not is_out_of_memory(error) or len(train_steps) == 1:
                        raise
                    del train_steps[precision], times[precision]
                    continue
                _synchronize(device)
                times[precision].append(time.perf_counter() - start_time)
            # A GPU's first round loads kernels and compiles: only its later rounds can be compared.
            if times[UPDATE_KEY] or device.type == "cpu":
                last_s = {name: times[name][-1] for name in train_steps}
                for precision, seconds in last_s.items():
                    # A CPU without instructions for bf16 takes ten times as long in it.
                    if seconds > SLOW_PRECISION_RATIO * min(last_s.values()):
                        del train_steps[precision]
            if not accumulator.is_complete:  # a precision that ran out of memory
                continue
            start_time = time.perf_counter()
            train_step.apply(train_step.reduce(), 0.0)
            _synchronize(device)
            times[UPDATE_KEY].append(time.perf_counter() - start_time)
    medians = {name: statistics.median(seconds[1:] or seconds) for name, seconds in times.items()}
    return medians | ({OTHER_LOAD_KEY: load.count_cores()} if device.type == "cpu" else {})


class TrialLoss(LossModule):
    """The loss of a micro-batch; an error in the user's model or task becomes a RecipeError."""

    def forward(self, batch: TensorBatch, metrics: bool = False) -> LossSums:
        return compute_loss(self.loss_fn, self.model, batch, metrics)


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
