"""Compile warm-up: run torch.compile before the first step, so that its time is reported separately.

torch.compile compiles a function when it is called first. The warm-up runs the first micro-batches of this worker
forward and backward once. It then drops the gradients and restores buffers (running statistics, router counts) and
random states. Evaluation compiles other code, when it first runs. So does a custom loop, because its loss is not known
here.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from phalanx.compat import count_graph_breaks, is_compiled
from phalanx.recipe.devices import device_kind_of
from phalanx.run.event_types import Compiled
from phalanx.train.distributed.module_state import get_extra_state, load_extra_state
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.distributed.pipeline.build import PipelineRunner
from phalanx.train.loss import LossModule
from phalanx.train.train_context import TrainContext
from phalanx.train.train_state import TrainState

RUNS_BY_COMPILE_MODE = {"cuda-graphs": 3}
"""By `compile`: runs until nothing is left to do. The first compiles, a CUDA graph is recorded by the second."""


def warm_up_compile(
    context: TrainContext,
    train_state: TrainState,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Compile what a step needs, and report how long it took. All workers must call it: sharded models communicate."""
    loss_module = context.loss_module
    assert loss_module is not None
    start_time, breaks = clock(), count_graph_breaks()
    batches = _next_step_batches(context, train_state)
    with _restoring_state(context.parallel_model, context.dist_env.device):
        for _ in range(RUNS_BY_COMPILE_MODE.get(str(context.recipe.compile), 1)):
            context.accumulator.zero_grad(train_state.step + 1)
            if isinstance(loss_module, PipelineRunner):
                loss_module.step(batches)
            else:
                context.accumulator.seed_micro_batch()
                _run_forward_backward(loss_module, batches[0], context.parallel_model)
        if device_kind_of(context.dist_env.device.type).is_gpu:
            torch.accelerator.synchronize(context.dist_env.device)
    context.accumulator.zero_grad(train_state.step + 1)  # drops what gradients there are
    if context.dist_env.is_rank_zero:
        compiled = sum(is_compiled(part) for module in context.parallel_model.modules for part in module.modules())
        seconds, breaks = clock() - start_time, count_graph_breaks() - breaks
        context.reporter.report_event(Compiled(duration_s=seconds, num_blocks=compiled, num_graph_breaks=breaks))


def _next_step_batches(context: TrainContext, train_state: TrainState) -> list[Any]:
    """This worker's micro-batches of the next step."""
    recipe, mesh = context.recipe, context.parallel_model.mesh
    micro_size = recipe.batch.micro_size
    own = mesh.own_micro_batches(recipe.batch.global_size // micro_size)
    return [
        context.prepare_batch(context.data.read_training(train_state.samples_consumed + index * micro_size, micro_size))
        for index in own
    ]


def _run_forward_backward(loss_module: LossModule, batch: Any, parallel_model: ParallelModel) -> None:
    ((_, loss, _),) = loss_module(batch)
    if parallel_model.mesh.fsdp_mesh is not None:  # it works through the hooks of an ordinary backward
        loss.backward()
    else:  # past the hooks of an exchange, which expects a whole step
        torch.autograd.grad(loss, list(parallel_model.trainable_parameters().values()), allow_unused=True)


@contextmanager
def _restoring_state(parallel_model: ParallelModel, device: torch.device) -> Iterator[None]:
    """Put buffers, extra state and random numbers back."""
    before = [
        (part, name, buffer, buffer.clone())
        for module in parallel_model.modules
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]
    extra = [(module, get_extra_state(module)) for module in parallel_model.modules]
    with torch.random.fork_rng([device] if device_kind_of(device.type).is_gpu else [], device_type=device.type):
        yield
    with torch.no_grad():
        for part, name, buffer, value in before:
            buffer.copy_(value)
            setattr(part, name, buffer)  # the forward may have replaced it
    for module, saved_extra_state in extra:
        load_extra_state(module, saved_extra_state, "memory")
