"""Open the model, task and data of a recipe for a trial, and compute its loss."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.cluster import discover_machine
from phalanx.compat import find_nondeterministic_op
from phalanx.data import RunData, open_data
from phalanx.errors import RecipeError
from phalanx.process_lifetime import prefer_oom_kill
from phalanx.recipe import Recipe, describe_exception
from phalanx.train.distributed.activation_checkpoint import ActivationCheckpointing, apply_activation_checkpointing
from phalanx.train.distributed.environment import dist_env_from_environment
from phalanx.train.distributed.failures import is_gpu_failure, is_out_of_memory
from phalanx.train.loss import LossFn, LossSums
from phalanx.train.model_builder import build_model, check_model_fits_memory
from phalanx.train.ops.blocks import find_blocks
from phalanx.train.optim.container import check_groups
from phalanx.train.tasks import Task, TensorBatch, check_images, check_model_config, open_task


def open_trial(payload: dict[str, Any], load: bool = True) -> tuple[nn.Module, Task, RunData]:
    prefer_oom_kill()
    recipe = Recipe.model_validate(payload["recipe"])
    folder = Path(payload["folder"])
    data = open_data(recipe.data, recipe.evaluation, recipe.seed, recipe.batch.global_size)
    device = select_trial_device(payload) if load else torch.device("cpu")
    if load:
        check_model_fits_memory(recipe.model, data.info, folder, discover_machine().memory_bytes)
    model = build_model(recipe.model, data.info, folder, recipe.seed, device, recipe.adapter, load=load)
    task = open_task(recipe, folder, data.info, device)
    check_model_config(task, model)
    check_images(model, data)
    check_groups(model, recipe.optimizer)
    return model.train(), task, data


def select_trial_device(payload: dict[str, Any]) -> torch.device:
    """Where the recipe of a trial is to run."""
    return dist_env_from_environment({}, payload["recipe"].get("device", "auto")).device


@contextlib.contextmanager
def activation_checkpointing(model: nn.Module, mode: ActivationCheckpointing) -> Iterator[None]:
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


def compute_loss(loss_fn: LossFn, model: nn.Module, batch: TensorBatch, metrics: bool = False) -> LossSums:
    """Compute the loss of a micro-batch, and metrics if asked. RecipeError when model or task fail; running out of
    memory is passed on, and an operation without a deterministic kernel."""
    try:
        return loss_fn(model, batch, metrics)
    except Exception as error:
        if isinstance(error, RecipeError) or is_out_of_memory(error) or is_gpu_failure(error):
            raise
        if isinstance(error, RuntimeError) and find_nondeterministic_op(error):
            raise
        raise RecipeError(f"a trial forward of the model and its loss failed: {describe_exception(error)}") from error
