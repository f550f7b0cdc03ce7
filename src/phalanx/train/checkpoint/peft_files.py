"""Read and write adapters in the format of PEFT: a directory with adapter_config.json and adapter_model.safetensors.

A tensor there is a parameter of ours with its dimensions in another order and another shape (`PeftTensor`).
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from phalanx.errors import DataError
from phalanx.recipe.imports import HF_CONFIG_FILE, huggingface_location
from phalanx.recipe.locations import localize_named
from phalanx.recipe.schema import AdapterConfig
from phalanx.safe_files import read_json
from phalanx.storage.url import is_url
from phalanx.train.adapters.lora import add_adapters
from phalanx.train.adapters.targets import (
    CONVOLUTION_TYPES,
    AdapterTarget,
    adapter_names,
    find_adapter_targets,
    select_whole_modules,
)
from phalanx.train.checkpoint.format import CheckpointManifest
from phalanx.train.checkpoint.load import load_tensors
from phalanx.train.checkpoint.load_plan import list_local_tensors
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.hf import model as hf_model
from phalanx.train.hf.safetensors_reader import WeightReader, open_weight_reader
from phalanx.train.ops.blocks import is_conv1d

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
INIT_KEY = "adapter.init_from"
_NAME_PREFIX = "base_model.model."
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` with which PEFT changes the weights of the base model."""


@dataclass(frozen=True)
class PeftTensor:
    """A tensor of a PEFT file: its name and shape there, the `parameter` of the model that holds it, and the order of
    that one's dimensions in the file."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    dims: tuple[int, ...]

    def to_file(self, value: Tensor) -> Tensor:
        """Return a parameter's value as it is in the file."""
        return value.permute(self.dims).reshape(self.shape).contiguous()

    def from_file(self, value: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a tensor of the file as the value of a parameter of this shape."""
        inverse = [self.dims.index(dim) for dim in range(len(self.dims))]
        return value.reshape([shape[dim] for dim in self.dims]).permute(inverse)


@dataclass(frozen=True)
class PeftAdapter:
    """An opened adapter that was checked against the model: its tensors by parameter name."""

    source: WeightReader
    tensors: Mapping[str, PeftTensor]

    @torch.no_grad()
    def fill_parameters(self, parallel_model: ParallelModel) -> None:
        """Read this worker's parts of the adapters, and of the modules that were trained in full."""
        for name, local_tensor in list_local_tensors(parallel_model).items():
            if (entry := self.tensors.get(name)) is None:
                continue
            value = entry.from_file(self.source.read(entry.name), local_tensor.global_blocks.global_shape)
            for block in local_tensor.global_blocks.blocks:
                ends = zip(block.global_offset, block.extent, strict=True)
                part = value[tuple(slice(start, start + length) for start, length in ends)]
                block.slice_local(local_tensor.tensor).copy_(part)


@dataclass
class _PeftLayout:
    """What the files of an adapter say of a model: the tensors, and which layers, parameters and modules have one."""

    tensors: list[PeftTensor] = field(default_factory=list)
    target_modules: list[str] = field(default_factory=list)
    target_parameters: list[str] = field(default_factory=list)
    whole_modules: list[str] = field(default_factory=list)
    has_conv1d: bool = False


def open_peft_adapter(where: str, folder: Path, model: nn.Module, spec: AdapterConfig) -> PeftAdapter:
    """Open the adapter that `adapter.init_from` names, a directory or URL, for a whole model with adapters. Only
    headers are read. Raises DataError unless it is of the recipe's kind, rank, alpha and layers, and of such a base
    model."""
    directory = localize_named(where, folder, INIT_KEY, (CONFIG_FILE, WEIGHTS_FILE))
    if not (directory / CONFIG_FILE).is_file():
        raise DataError(
            f"{INIT_KEY}: {directory} has no {CONFIG_FILE}, so it is not an adapter in PEFT's format; "
            "`phalanx checkpoint export --form peft` and save_pretrained of PEFT write one"
        )
    _check_config(directory, read_json(directory / CONFIG_FILE), spec)
    if not (directory / WEIGHTS_FILE).is_file():
        raise DataError(f"{INIT_KEY}: {directory} has no {WEIGHTS_FILE}; save the adapter as safetensors")
    source = open_weight_reader(directory)
    expected = {entry.name: entry for entry in _describe_layout(model, spec).tensors}
    # PEFT also saves the embeddings of the base model if they have an adapter.
    extra = {name for name in source.names - expected.keys() if not name.endswith(".base_layer.weight")}
    for names, problem in ((expected.keys() - source.names, "lacks"), (extra, "has in addition")):
        if names:
            raise DataError(
                f"{INIT_KEY}: {directory} {problem} {min(names)} ({len(names)} such tensors); give "
                "adapter.target_modules and modules_to_save that the adapter was trained with"
            )
    for name, entry in expected.items():
        if source.shape(name) != entry.shape:
            raise DataError(
                f"{INIT_KEY}: {directory} is an adapter of another base model: {name} has shape "
                f"{list(source.shape(name))}, expected {list(entry.shape)}"
            )
    return PeftAdapter(source, {entry.parameter: entry for entry in expected.values()})


def _check_config(directory: Path, config: Mapping[str, Any], spec: AdapterConfig) -> None:
    """Raise DataError unless adapter_config.json says what the recipe says."""
    if config.get("peft_type") != "LORA":
        raise DataError(f"{INIT_KEY}: {directory} is of PEFT's type {config.get('peft_type')!r}; expected LORA")
    kind = "dora" if config.get("use_dora") else "rslora" if config.get("use_rslora") else "lora"
    for key, value in {"kind": kind, "rank": config.get("r"), "alpha": config.get("lora_alpha")}.items():
        if value != getattr(spec, key):
            raise DataError(
                f"{INIT_KEY}: {directory} has {key} {value}, and the recipe {getattr(spec, key)}; give "
                f"adapter.{key}={value}"
            )
    unsupported = [key for key in ("rank_pattern", "alpha_pattern", "lora_bias") if config.get(key)]
    unsupported += ["use_rslora with use_dora"] if config.get("use_dora") and config.get("use_rslora") else []
    unsupported += ["bias"] if config.get("bias", "none") != "none" else []
    if unsupported:
        raise DataError(f"{INIT_KEY}: {directory} uses {unsupported[0]} of PEFT, which Phalanx does not have")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.startswith(_CHANGED_BASES):
        raise DataError(
            f"{INIT_KEY}: {directory} was initialized with {init}, which changes the base model; save it with "
            "path_initial_model_for_weight_conversion of PEFT"
        )


def write_peft_adapter(checkpoint: Path, manifest: CheckpointManifest, folder: Path) -> None:
    """Write the adapter of a checkpoint into a directory, in PEFT's format. Raises DataError for a checkpoint without
    adapters, and for one that PEFT has no format for: of a model that is not from a Hugging Face directory, with
    adapters of projections of nn.MultiheadAttention or some convolutions, or initialized by `pissa`."""
    origin = manifest.meta.get("model", {}).get("huggingface")
    if manifest.meta.get("recipe", {}).get("adapter") is None:
        raise DataError(f"{checkpoint}: was trained without `adapter`; export it with --form safetensors")
    if not origin:
        raise DataError(
            f"{checkpoint}: PEFT loads adapters into models of transformers, and this model was not built from "
            "hf:PATH; export it with --form safetensors"
        )
    spec = AdapterConfig(**manifest.meta["recipe"]["adapter"])
    if spec.init == "pissa":
        raise DataError(
            f"{checkpoint}: pissa changed the base model, so its adapter alone means nothing; export merged weights "
            "with --form safetensors"
        )
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / HF_CONFIG_FILE).write_text(json.dumps(origin["config"]), encoding="utf-8")
        model = hf_model.build_on_meta(Path(scratch), {})
    add_adapters(model, spec)
    layout = _describe_layout(model, spec)
    values = load_tensors(checkpoint, list({entry.parameter for entry in layout.tensors}), manifest=manifest)
    tensors = {entry.name: entry.to_file(values[entry.parameter]).clone() for entry in layout.tensors}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / WEIGHTS_FILE).chmod(folder.stat().st_mode & 0o666)
    config = _make_config(spec, layout, manifest.meta["model"]["build"], origin)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _make_config(spec: AdapterConfig, layout: _PeftLayout, build: str, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Return adapter_config.json."""
    location = huggingface_location(build) or ""
    name = location if is_url(location) else origin["directory"]
    is_causal = any(name.endswith("ForCausalLM") for name in origin["config"].get("architectures") or ())
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if is_causal else None,
        "base_model_name_or_path": name.removeprefix("hf://").partition("@")[0] if name.startswith("hf://") else name,
        "inference_mode": True,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": spec.dropout,
        "use_rslora": spec.kind == "rslora",
        "use_dora": spec.kind == "dora",
        "bias": "none",
        "fan_in_fan_out": layout.has_conv1d,
        "target_modules": layout.target_modules,
        "target_parameters": layout.target_parameters or None,
        "modules_to_save": layout.whole_modules or None,
    }


def _describe_layout(model: nn.Module, spec: AdapterConfig) -> _PeftLayout:
    """Return how PEFT saves the adapters of a whole model. Raises DataError for an adapter that PEFT does not have."""
    layout = _PeftLayout()
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    for name, target in find_adapter_targets(model).items():
        if getattr(target.module, target.names[0], None) is None:
            continue
        own_names = [names[id(p)] for key in target.names if (p := getattr(target.module, key, None)) is not None]
        for (suffix, shape, dims), parameter in zip(_list_layer_tensors(name, target), own_names, strict=False):
            layout.tensors.append(PeftTensor(f"{_NAME_PREFIX}{suffix}", shape, parameter, dims))
        (layout.target_parameters if target.is_stack else layout.target_modules).append(name)
        layout.has_conv1d |= is_conv1d(target.module)
    trained = {id(p) for module in select_whole_modules(model, spec).values() for p in module.parameters()}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if any(id(parameter) in trained for parameter in own.values()):  # also what shares a weight with one of these
            layout.whole_modules.append(name)
            layout.tensors += [
                PeftTensor(f"{_NAME_PREFIX}{name}.{key}", tuple(p.shape), names[id(p)], tuple(range(p.dim())))
                for key, p in own.items()
            ]
    return layout


_TensorLayout = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name in the file after the prefix, shape there, and order of our dimensions there."""


def _list_layer_tensors(name: str, target: AdapterTarget) -> Iterator[_TensorLayout]:
    """Return the tensors of an adapter in the file: A, B and the magnitudes."""
    module, weight = target.module, target.weight
    rank = min(getattr(module, target.names[0]).shape[-2:])
    if target.is_stack:
        yield from _list_stack_tensors(name, target, rank)
    elif target.attribute != "weight" or isinstance(target.user, nn.MultiheadAttention):
        raise DataError(f"{name}: PEFT has no adapter of its own for a projection of nn.MultiheadAttention")
    elif isinstance(module, nn.Embedding):
        yield f"{name}.lora_embedding_A", (rank, weight.shape[0]), (1, 0)
        yield f"{name}.lora_embedding_B", (weight.shape[1], rank), (1, 0)
        yield f"{name}.lora_magnitude_vector", (weight.shape[1],), (0,)
    elif isinstance(module, CONVOLUTION_TYPES):
        if target.user is not None or any(step != 1 for step in module.dilation):
            raise DataError(f"{name}: PEFT has no adapter of a convolution with groups, dilation or padding_mode")
        ones = (1,) * (weight.dim() - 2)
        yield f"{name}.lora_A.weight", (rank, *weight.shape[1:]), (0, 1)
        yield f"{name}.lora_B.weight", (weight.shape[0], rank, *ones), (0, 1)
        yield f"{name}.lora_magnitude_vector", (1, weight.shape[0], *ones), (0,)
    else:
        outputs, inputs = target.matrix_shape[::-1] if target.is_transposed else target.matrix_shape
        dims = (1, 0) if target.is_transposed else (0, 1)
        yield f"{name}.lora_A.weight", (rank, inputs), dims
        yield f"{name}.lora_B.weight", (outputs, rank), dims
        yield f"{name}.lora_magnitude_vector", (outputs,), (0,)


def _list_stack_tensors(name: str, target: AdapterTarget, rank: int) -> Iterator[_TensorLayout]:
    """Return the tensors of a stack. PEFT wraps the module once for each parameter, the last one outermost, and has A
    as [experts x rank, inputs] and B as [outputs, rank x experts]."""
    path, _, attribute = name.rpartition(".")
    keys = [key for key, _ in target.module.named_parameters(recurse=False)]
    adapted = [key for key in keys if adapter_names(key)[0] in keys]
    path += ".base_layer" * (len(adapted) - 1 - adapted.index(attribute))
    experts, rows, columns = target.weight.shape
    # Ours are A [experts, rank, columns] and B [experts, rows, rank], whichever of rows and columns are inputs.
    if getattr(target.module, "is_transposed", False):
        yield f"{path}.lora_B.weight", (columns, rank * experts), (2, 1, 0)
        yield f"{path}.lora_A.weight", (experts * rank, rows), (0, 2, 1)
    else:
        yield f"{path}.lora_A.weight", (experts * rank, columns), (0, 1, 2)
        yield f"{path}.lora_B.weight", (rows, rank * experts), (1, 2, 0)
