"""Plan which blocks of logical tensors a worker reads, to resume from a checkpoint or to begin with weights that exist.

The initial weights of a run (safetensors of a Hugging Face directory or of an export, or a checkpoint) fill the parts
of the model that a worker holds block by block, once that was parallelized on the meta device and
`allocate_meta_parameters` has allocated them. No worker ever holds the whole model. To resume a run, see `restore.py`.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from phalanx.errors import DataError
from phalanx.recipe.locations import huggingface_directory, localize_named, name_recipe_key, pin_location
from phalanx.storage.url import is_url, parse_url
from phalanx.train.adapters.quantized_base import quantize
from phalanx.train.adapters.targets import MAGNITUDE_NAME, get_whole_shape, is_adapter_name, is_added_name, scale_name
from phalanx.train.checkpoint.format import CheckpointManifest, list_checkpoints, read_manifest
from phalanx.train.checkpoint.load import load_blocks, load_tensors
from phalanx.train.checkpoint.store_fetch import localize_checkpoint
from phalanx.train.distributed.dtensor_utils import to_local
from phalanx.train.distributed.module_state import (
    EXTRA_STATE_PREFIX,
    find_extra_state_modules,
    get_extra_state,
    get_model_tensors,
    get_persistent_buffers,
    load_extra_state,
)
from phalanx.train.distributed.parallel_model import LocalTensor, ParallelModel
from phalanx.train.hf.model import find_new_head, make_tie_mismatch_error, match_tensor_names, open_source
from phalanx.train.hf.safetensors_reader import WeightReader
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
            local_shape = state_entry_shape(entry, to_local(parameter).shape)
            full_shape = state_entry_shape(entry, parameter.shape)
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
        staged = [(name, offset, torch.empty(live.shape, dtype=live.dtype)) for name, offset, live in staged]
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
        of_parameters = {name: tensor for name, tensor in tensors.items() if name.startswith(OPTIMIZER_PREFIX)}
        state.optimizer.load(of_parameters, str(path))
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


@dataclass(frozen=True)
class SafetensorsWeights:
    """Safetensors files, which were checked against the model when they were opened. `names` maps each parameter or
    buffer to its tensors in the files (`match_tensor_names`)."""

    source: WeightReader
    names: Mapping[str, Sequence[str]]
    has_adapters = False

    @torch.no_grad()
    def fill_parameters(self, parallel_model: ParallelModel) -> None:
        """Read this worker's parts of the model's parameters and persistent buffers, except new adapters. Raises
        DataError if tensors that the model ties differ in this worker's part."""
        local_tensors = list_local_tensors(parallel_model)
        for name, local_tensor in local_tensors.items():
            if name not in self.names:
                continue
            first, *others = self.names[name]
            scale = local_tensors.get(scale_name(name))
            for block in local_tensor.global_blocks.blocks:
                read: Callable[[str], Tensor] = self.source.read  # of a quantized base each worker has all
                if scale is None:
                    read = partial(self.source.read_grown, offset=block.global_offset, extent=block.extent)
                part = read(first)
                for other in others:
                    if not torch.equal(part, read(other)):
                        raise make_tie_mismatch_error(self.source, first, other)
                _store(part, block.slice_local(local_tensor.tensor), scale)


@dataclass(frozen=True)
class CheckpointWeights:
    """A checkpoint, written under any parallelism."""

    path: Path
    manifest: CheckpointManifest

    @property
    def has_adapters(self) -> bool:
        """Whether it also holds the values of adapters."""
        return any(map(is_adapter_name, self.manifest.tensors))

    @torch.no_grad()
    def fill_parameters(self, parallel_model: ParallelModel) -> None:
        """Do the same. Raises CorruptCheckpointError, which names the bad file."""
        requested: list[tuple[str, Sequence[int], Tensor]] = []
        converted: list[tuple[Tensor, Tensor, LocalTensor | None]] = []
        local_tensors = list_local_tensors(parallel_model)
        for name, local_tensor in local_tensors.items():
            if (record := self.manifest.tensors.get(name)) is None:  # a new adapter
                continue
            for block in local_tensor.global_blocks.blocks:
                target = part = block.slice_local(local_tensor.tensor)
                if part.dtype != record.torch_dtype:
                    scale = local_tensors.get(scale_name(name))
                    shape = block.extent if scale is None else record.shape
                    part = torch.empty(shape, dtype=record.torch_dtype)
                    converted.append((part, target, scale))
                requested.append((name, block.global_offset, part))
        extra = [name for name in self.manifest.tensors if name.startswith(EXTRA_STATE_PREFIX)]
        load_blocks(self.path, requested, self.manifest)
        for part, target, scale in converted:
            _store(part, target, scale)
        extra_state = load_tensors(self.path, extra, manifest=self.manifest)
        for module in parallel_model.modules:
            load_extra_state(module, extra_state, str(self.path))


InitialWeights = SafetensorsWeights | CheckpointWeights


def open_initial_weights(
    where: str, folder: Path, model: nn.Module, adapter_added_later: bool = False
) -> InitialWeights:
    """Open the weights that `init_from` names (`hf:PATH`, a checkpoint, or a run: its newest checkpoint; each may be a
    URL) for a whole model, the parameters of which may be on the meta device. Only headers are read. Raises DataError
    for tensors that are missing, differ in shape or have no place in the model, and for adapters that the model
    lacks, unless `adapter_added_later`."""
    if (directory := huggingface_directory(where, folder, "init_from")) is not None:
        return open_hf_weights(directory, model)
    location = pin_location(where, "init_from")
    if is_url(location):
        with name_recipe_key("init_from"):
            path = localize_checkpoint(parse_url(location))
    else:
        path = find_newest_checkpoint(localize_named(location, folder, "init_from"))
    manifest = read_manifest(path)
    tensors, new_head = dict(model.named_parameters()) | get_persistent_buffers(model), find_new_head(model)
    adapter_names = [name for name in manifest.tensors if is_added_name(name) and name not in tensors]
    if adapter_names and not adapter_added_later:
        raise DataError(
            f"init_from: {path} was trained with adapters ({adapter_names[0]}), which this recipe does not have; "
            "give the same `adapter`, or merge them with `phalanx checkpoint export` and give init_from: hf:OUT"
        )
    if any(map(is_adapter_name, manifest.tensors)):
        for name in tensors:
            if name.endswith(MAGNITUDE_NAME) and name not in manifest.tensors:
                raise DataError(
                    f"init_from: {path} has adapters without magnitudes, and adapter.kind is dora; give the kind that "
                    "it was trained with, or merge them with `phalanx checkpoint export` and give init_from: hf:OUT"
                )
    for name, tensor in tensors.items():
        record = manifest.tensors.get(name)
        if record is None and not is_added_name(name) and name not in (new_head or ()):
            raise DataError(f"{path}: has no tensor {name!r}, which the model needs")
        if record is not None and record.shape not in (get_whole_shape(name, tensors), tuple(tensor.shape)):
            raise DataError(f"{path}: {name} has shape {list(record.shape)}, the model's has {list(tensor.shape)}")
    model_names = [name for name in manifest.tensors if not name.startswith(OPTIMIZER_PREFIX)]
    left = [name for name in find_unused_entries(model, model_names) if name not in adapter_names]
    if left and new_head is None:
        raise DataError(
            f"init_from: {path} holds {len(left)} tensors that the model does not have, such as {left[0]}; build the "
            "model that was trained there (model.args)"
        )
    return CheckpointWeights(path, manifest)


def open_hf_weights(directory: Path, model: nn.Module) -> SafetensorsWeights:
    """Open the weights of a Hugging Face directory for a whole model. Raises the errors of `match_tensor_names`."""
    source = open_source(model, directory)
    return SafetensorsWeights(source, match_tensor_names(model, source))


def find_newest_checkpoint(where: Path) -> Path:
    """Return the newest checkpoint of a run or of a directory of checkpoints; `where` itself if it is a checkpoint."""
    return next(iter(list_checkpoints(where / "checkpoints") or list_checkpoints(where)), where)


def _store(value: Tensor, target: Tensor, scale: LocalTensor | None) -> None:
    """Copy a value that was read into a parameter, quantized if that is."""
    if scale is not None and value.is_floating_point():
        value, scales = quantize(value, target.dtype)
        scale.tensor.copy_(scales)
    target.copy_(value)


def list_local_tensors(parallel_model: ParallelModel) -> dict[str, LocalTensor]:
    """Return this worker's parts of all parameters and persistent buffers."""
    parameters, buffers = parallel_model.parameters(), parallel_model.owned_buffers()
    tensors = {name: parallel_model.local_tensor(name, parameter) for name, parameter in parameters.items()}
    return tensors | {name: parallel_model.replicated_tensor(buffer.detach()) for name, buffer in buffers.items()}
