"""Load the initial weights of a run into the parts of the model that a worker holds.

A model that was built on the meta device is parallelized first. `allocate_meta_parameters` then allocates this worker's
parameters, and an `InitialWeights` (safetensors of a Hugging Face directory or of an export, or a checkpoint) fills
them block by block. No worker ever holds the whole model. To resume a run, see `restore.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from phalanx.train.checkpoint.load_plan import find_unused_entries
from phalanx.train.checkpoint.store_fetch import localize_checkpoint
from phalanx.train.distributed.module_state import EXTRA_STATE_PREFIX, get_persistent_buffers, load_extra_state
from phalanx.train.distributed.parallel_model import LocalTensor, ParallelModel
from phalanx.train.hf.model import find_new_head, make_tie_mismatch_error, match_tensor_names, open_source
from phalanx.train.hf.safetensors_reader import WeightReader
from phalanx.train.optim.container import OPTIMIZER_PREFIX


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
    tensors = {
        name: parallel_model.local_tensor(name, parameter) for name, parameter in parallel_model.parameters().items()
    }
    return tensors | {
        name: parallel_model.replicated_tensor(buffer.detach())
        for name, buffer in parallel_model.owned_buffers().items()
    }
