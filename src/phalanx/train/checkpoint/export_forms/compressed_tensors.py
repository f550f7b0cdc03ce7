"""Quantized weights in the format compressed-tensors, which vLLM and transformers load: which layers are quantized,
what config.json says about them, and how they are read back.

Linear layers in the blocks are quantized. Embeddings, the output layer and all else keep the dtype of the export.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import UsageError
from phalanx.train.distributed.meta_device import allocate_meta_parameters
from phalanx.train.hf.config import QUANTIZATION_KEY
from phalanx.train.hf.model import build_on_meta, load_weights, match_tensor_names
from phalanx.train.hf.safetensors_reader import WeightReader, open_weight_reader
from phalanx.train.hf.weight_conversion import open_converted_source
from phalanx.train.ops.blocks import find_expert_stacks, find_router_names

SCALE_SUFFIX = "weight_scale"


@dataclass(frozen=True)
class QuantizedForm:
    """A way to store the weights [out, in] of linear layers. `format`, `weights` and `input_activations` are what
    compressed-tensors calls it; `max_loss_increase` is relative."""

    format: str
    suffixes: tuple[str, ...]
    """Last parts of the names of a layer's tensors."""
    weights: Mapping[str, Any]
    quantize: Callable[[Tensor, torch.dtype], dict[str, Tensor]]
    """(weight, dtype of the scales) -> tensors by suffix."""
    dequantize: Callable[[Mapping[str, Tensor]], Tensor]
    """Tensors by suffix -> weight in fp32."""
    max_loss_increase: float
    group_size: int = 1
    """Inputs that share a scale. A layer is not quantized if it does not divide its inputs."""
    input_activations: Mapping[str, Any] | None = None
    round_inputs: Callable[[Tensor], Tensor] | None = None
    """Rounds the inputs of a layer as servers do."""

    def describe(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Return the `quantization_config` of config.json for a model with these linear layers left as they are."""
        group = {"targets": ["Linear"], "weights": self.weights, "input_activations": self.input_activations}
        shared = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "format": self.format}
        return {**shared, "config_groups": {"group_0": group}, "ignore": ignored}


def choose_layers(form: QuantizedForm, model: nn.Module) -> tuple[list[str], list[str]]:
    """Return the names of the linear layers of a model, which may be on the meta device, that are quantized, and of the
    others. Raises UsageError if the form fits none, or if experts are fused."""
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    lists = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    fitting = (name for name, layer in linear.items() if not layer.in_features % form.group_size)
    chosen = {name for name in fitting if name.startswith(lists)} - find_router_names(model)
    experts = next(iter(find_expert_stacks(model)), None)
    if experts or not chosen:
        multiple = f" with a multiple of {form.group_size} inputs" if form.group_size > 1 else ""
        why = f"fused experts ({experts})" if experts else f"no nn.Linear{multiple} in its blocks"
        fix = "use --form safetensors, and model.quantization_aware: null"
        raise UsageError(f"{type(model).__name__} has {why}, so it cannot be quantized; {fix}")
    return [name for name in linear if name in chosen], [name for name in linear if name not in chosen]


@dataclass(frozen=True)
class DequantizedReader(WeightReader):
    """The tensors of an export, with its quantized layers as whole weights in fp32."""

    raw: WeightReader
    form: QuantizedForm

    def shape(self, name: str) -> tuple[int, ...]:
        """Same as in WeightReader."""
        return tuple(self.read(name).shape)

    def read(self, name: str, offset: Sequence[int] | None = None, extent: Sequence[int] | None = None) -> Tensor:
        """Same as in WeightReader; blocks of quantized layers are not read."""
        if f"{name}_scale" not in self.raw.files:
            return self.raw.read(name, offset, extent)
        assert offset is None
        stem = name.removesuffix("weight")
        return self.form.dequantize({suffix: self.raw.read(stem + suffix) for suffix in self.form.suffixes})


def load_export(directory: Path, form: QuantizedForm | None) -> nn.Module:
    """Build the model of an export with our own reader, on the CPU in fp32 and in evaluation mode; layers that are
    quantized round their inputs as their form does. Raises DataError if tensors are missing or left."""
    reader = open_weight_reader(directory)
    model = build_on_meta(directory, {} if form is None else {QUANTIZATION_KEY: None})
    if form is not None:
        stems = [name.removesuffix(SCALE_SUFFIX) for name in reader.files if name.endswith(f".{SCALE_SUFFIX}")]
        parts = {stem + suffix for stem in stems for suffix in form.suffixes}
        files = {name: file for name, file in reader.files.items() if name not in parts}
        files |= {f"{stem}weight": reader.files[stem + SCALE_SUFFIX] for stem in stems}
        reader = DequantizedReader(directory, files, reader, form)
    source = open_converted_source(model, reader)
    names = match_tensor_names(model, source)
    allocate_meta_parameters([model], torch.device("cpu"))
    load_weights(model, source, names)
    if form is not None and (round_inputs := form.round_inputs) is not None:
        for name in choose_layers(form, model)[0]:
            model.get_submodule(name).register_forward_pre_hook(lambda module, args: (round_inputs(args[0]), *args[1:]))
    return model.eval()
