"""Plan which blocks of logical tensors a worker reads from a checkpoint, and how they are restored."""

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from phalanx.errors import DataError
from phalanx.train.checkpoint.format import CheckpointManifest
from phalanx.train.checkpoint.load import load_blocks
from phalanx.train.distributed.dtensor_utils import to_local
from phalanx.train.distributed.module_state import (
    EXTRA_STATE_PREFIX,
    find_extra_state_modules,
    get_extra_state,
    get_model_tensors,
    load_extra_state,
)
from phalanx.train.distributed.parallel_model import LocalTensor, ParallelModel
from phalanx.train.optim.container import OPTIMIZER_PREFIX, SETTINGS_PREFIX, OptimizerContainer, state_entry_shape
from phalanx.train.precision import GradScaler
from phalanx.train.train_state import AppState

RECIPE_STATE_PREFIXES = ("scaler/", SETTINGS_PREFIX, "grad_sync/", "local_sgd/")
"""Prefixes of the logical names of state that a run has or has not by its recipe."""


def get_state_tensors(model: nn.Module, optimizer: OptimizerContainer, scaler: GradScaler) -> dict[str, Tensor]:
    """Return all tensors that the next step depends on."""
    return {
        **get_model_tensors(model),
        **get_extra_state(model),
        **optimizer.state(),
        **optimizer.group_settings(),
        **scaler.state(),
    }


def get_local_state(state: AppState) -> dict[str, LocalTensor]:
    """Return all tensors that the next step depends on, of those that this worker holds and this stage saves."""
    parallel_model, optimizer, scaler = state.parallel_model, state.optimizer, state.scaler
    parameters = parallel_model.parameters()
    local_tensors = {
        name: parallel_model.local_tensor(name, p) for name, p in parameters.items() if parallel_model.is_owner(name)
    }
    for name, buffer in parallel_model.owned_buffers().items():
        local_tensors[name] = parallel_model.replicated_tensor(buffer.detach())
    for key, value in optimizer.state().items():
        name, _, entry = key.removeprefix(OPTIMIZER_PREFIX).rpartition("/")
        if parallel_model.is_owner(name):
            parameter = parameters[name]
            shape = state_entry_shape(entry, parameter.shape)
            if value.dim() and not parallel_model.is_sharded(name, parameter):
                shape = value.shape  # a user's optimizer may have state of other shapes
            if value.dim():
                local_tensors[key] = parallel_model.local_tensor(name, parameter, value, shape)
            else:
                local_tensors[key] = parallel_model.replicated_tensor(value)
    replicated = dict(optimizer.group_settings())
    for module in parallel_model.modules:
        extra = get_extra_state(module)
        replicated |= {name: extra[name] for name in extra if name not in parallel_model.buffers_owned_elsewhere}
    if parallel_model.mesh.coordinates["pipeline"] == 0:  # equal in all stages
        replicated |= scaler.state()
    local_tensors |= {name: parallel_model.replicated_tensor(value) for name, value in replicated.items()}
    if parallel_model.error_feedback is not None:
        local_tensors |= parallel_model.error_feedback.local_tensors()
    if parallel_model.local_sgd is None:
        return local_tensors
    return parallel_model.local_sgd.add_per_worker_rows(local_tensors)


TensorBlocks = list[tuple[str, tuple[int, ...], Tensor]]
"""Blocks of logical tensors to read: name, offset, and the tensor to fill."""


@dataclass(frozen=True)
class LoadPlan:
    """A worker's part of the state. `live_blocks` are read into tensors in use, which must not change before all
    workers have read theirs; `new_blocks` into new ones. `optimizer_tensors` are those of optimizer and grad scaler
    among these."""

    live_blocks: TensorBlocks
    new_blocks: TensorBlocks
    optimizer_tensors: dict[str, Tensor]
    restore_state: Callable[[], None] = lambda: None
    """Called when everything is read; the first function that may change tensors in use."""
    sequential_blocks: list[TensorBlocks] = field(default_factory=list)
    """Blocks that are read one after another into the same new memory."""
    add_sequential: Callable[[], None] = lambda: None
    """Called after each of these."""

    @property
    def all_blocks(self) -> TensorBlocks:
        """Return all blocks that are read."""
        return [*self.live_blocks, *self.new_blocks, *(block for blocks in self.sequential_blocks for block in blocks)]


def make_load_plan(parallel_model: ParallelModel, path: Path, manifest: CheckpointManifest) -> LoadPlan:
    """Plan what a worker reads of a checkpoint, written under any parallelism. Raises DataError if the model does not
    fit it."""
    parameters = parallel_model.parameters()
    live_blocks: TensorBlocks = []
    new_blocks: TensorBlocks = []

    def add_tensor(name: str, local_tensor: LocalTensor, into: TensorBlocks = live_blocks) -> None:
        record = manifest.tensors.get(name)
        if record is not None and record.shape != local_tensor.global_blocks.global_shape:
            shapes = f"has shape {list(record.shape)}, the model's has {list(local_tensor.global_blocks.global_shape)}"
            raise DataError(f"{path}: {name} {shapes}")
        for block in local_tensor.global_blocks.blocks:
            into.append((name, block.global_offset, block.slice_local(local_tensor.tensor)))

    for name, parameter in parameters.items():
        if name not in manifest.tensors:
            raise DataError(f"{path}: has no tensor {name!r}, which the model needs")
        add_tensor(name, parallel_model.local_tensor(name, parameter))
    for name, buffer in parallel_model.all_buffers():
        add_tensor(name, parallel_model.replicated_tensor(buffer.detach()))
    if parallel_model.mesh.parallelism.pipeline == 1:  # otherwise the other stages hold the rest of the model
        check_nothing_left(manifest.tensors, {*parameters, *dict(parallel_model.all_buffers())}, str(path))
    states: dict[str, Tensor] = {}
    for key, record in manifest.tensors.items():
        name, _, entry = key.removeprefix(OPTIMIZER_PREFIX).rpartition("/")
        if key.startswith(("scaler/", EXTRA_STATE_PREFIX, SETTINGS_PREFIX)):
            states[key] = torch.empty(record.shape, dtype=record.torch_dtype)
            new_blocks.append((key, (0,) * len(record.shape), states[key]))
        elif key.startswith(OPTIMIZER_PREFIX) and name in parameters:
            parameter = parameters[name]
            local_shape, full_shape = (
                state_entry_shape(entry, each.shape) for each in (to_local(parameter), parameter)
            )
            if not record.shape or not parallel_model.is_sharded(name, parameter):
                local_shape = full_shape = torch.Size(record.shape)
            states[key] = torch.zeros(local_shape, dtype=record.torch_dtype)
            if record.shape:
                add_tensor(key, parallel_model.local_tensor(name, parameter, states[key], full_shape), new_blocks)
            else:
                new_blocks.append((key, (), states[key]))
    load_plan = LoadPlan(live_blocks, new_blocks, states)
    if parallel_model.error_feedback is not None:
        read, restore_state = parallel_model.error_feedback.make_load_plan(manifest)
        load_plan = LoadPlan(live_blocks, new_blocks + read, states, restore_state)
    if parallel_model.local_sgd is None:
        return load_plan
    return parallel_model.local_sgd.extend_load_plan(load_plan, manifest)


def check_nothing_left(saved: Iterable[str], known: Container[str], where: str) -> None:
    """Raise DataError for a saved weight or buffer that the model does not have and would silently lose."""
    left = next((name for name in saved if "/" not in name and name not in known), None)
    if left is not None:
        raise DataError(f"{where}: holds {left!r}, which the model does not have: was its code changed since?")


def find_unused_entries(model: nn.Module, saved: Iterable[str]) -> list[str]:
    """Return the saved tensors of parameters, buffers and modules that the whole model does not have. State of keys of
    the recipe, such as the loss scale, is left out: a run resumes with other keys by `--force` only."""
    known = {*get_model_tensors(model), *(EXTRA_STATE_PREFIX + name for name in find_extra_state_modules(model))}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def is_used(key: str) -> bool:
        if key.startswith(OPTIMIZER_PREFIX):
            return key.removeprefix(OPTIMIZER_PREFIX).rpartition("/")[0] in trained
        return key.startswith(RECIPE_STATE_PREFIXES) or key in known

    return [key for key in saved if not is_used(key)]


def execute_load_plan(
    load_plan: LoadPlan, state: AppState, path: Path, manifest: CheckpointManifest, in_place: bool = False
) -> Callable[[], None]:
    """Read the blocks into new memory, except weights that are read `in_place`, and return a function that applies
    them: nothing else in use changes before that is called. Raises CorruptCheckpointError, which names a bad file."""
    staged = load_plan.live_blocks
    if not in_place:
        staged = [
            (name, offset, torch.empty(live.shape, dtype=live.dtype)) for name, offset, live in load_plan.live_blocks
        ]
    load_blocks(path, [*staged, *load_plan.new_blocks], manifest)
    for blocks in load_plan.sequential_blocks:
        load_blocks(path, blocks, manifest)
        load_plan.add_sequential()

    def apply() -> None:
        with torch.no_grad():
            for (_, _, live), (_, _, read) in zip(load_plan.live_blocks, staged, strict=True):
                if read is not live:
                    live.copy_(read)
        load_plan.restore_state()
        for module in state.parallel_model.modules:
            load_extra_state(module, load_plan.optimizer_tensors, str(path))
        tensors = load_plan.optimizer_tensors
        state.optimizer.load(
            {name: tensor for name, tensor in tensors.items() if name.startswith(OPTIMIZER_PREFIX)}, str(path)
        )
        state.optimizer.load_group_settings(tensors, str(path))
        state.scaler.load({name: tensor for name, tensor in tensors.items() if name.startswith("scaler/")})

    return apply


def load_model_tensors(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy weights to the model. Raises DataError for a missing or additional tensor, or another shape."""
    targets = get_model_tensors(model)
    check_nothing_left(tensors, targets, where)
    for name, target in targets.items():
        source = tensors.get(name)
        if source is None:
            raise DataError(f"{where}: has no tensor {name!r}, which the model needs")
        if source.shape != target.shape:
            raise DataError(f"{where}: {name} has shape {list(source.shape)}, the model's has {list(target.shape)}")
        if source.data_ptr() != target.data_ptr():  # otherwise it was read in place
            target.copy_(source)
    load_extra_state(model, tensors, where)
