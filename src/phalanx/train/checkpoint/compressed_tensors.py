"""Quantized weights in the format compressed-tensors, which vLLM and transformers load: which layers are quantized,
what config.json says about them, how they are read back, and the forms that there are.

Linear layers in the blocks are quantized. Embeddings, the output layer and all else keep the dtype of the export.

- FP8: weights of 8 bits as floating-point numbers (E4M3) with a scale for each output. Servers round the inputs of
  these layers, too, with a scale for each token, and multiply in FP8: FP8_DYNAMIC of vLLM and llm-compressor.
- INT4: weights of 4 bits, packed into int32, with a scale for each 128 inputs of an output: W4A16 of vLLM. Values are
  -8 to 7 times the scale. Of scales that clip the largest values more or less, the one with the least squared error is
  taken, so no calibration data are needed.

Quantization-aware training: linear layers compute with the weights that an INT4 export of the model would hold.
Gradients pass the rounding unchanged (straight-through, Bengio et al. 2013), and what is trained and saved is the
weight before it. The layers, scales and rounding are those of the export, so that it computes what was trained.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.errors import UsageError
from phalanx.train.distributed.meta_device import allocate_meta_parameters
from phalanx.train.hf.config import QUANTIZATION_KEY
from phalanx.train.hf.model import build_on_meta, load_weights, match_tensor_names
from phalanx.train.hf.safetensors_reader import WeightReader, open_converted_source, open_weight_reader
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


MAX_E4M3 = torch.finfo(torch.float8_e4m3fn).max


def quantize_fp8(weight: Tensor, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """weight [out, in] -> `weight` in E4M3 and `weight_scale` [out, 1]."""
    scale = _find_scale(weight, scale_dtype)
    return {"weight": _round_to_e4m3(weight, scale.float()), SCALE_SUFFIX: scale}


def dequantize_fp8(tensors: Mapping[str, Tensor]) -> Tensor:
    """`weight` and `weight_scale` -> weight [out, in] in fp32."""
    return tensors["weight"].float() * tensors[SCALE_SUFFIX].float()


def round_inputs(inputs: Tensor) -> Tensor:
    """Round inputs [..., in] to E4M3 and back, with a scale for each token."""
    scale = _find_scale(inputs, inputs.dtype)
    return _round_to_e4m3(inputs, scale).to(inputs.dtype) * scale


def _find_scale(values: Tensor, dtype: torch.dtype) -> Tensor:
    return (values.abs().amax(-1, keepdim=True) / MAX_E4M3).clamp_(min=torch.finfo(dtype).tiny).to(dtype)


def _round_to_e4m3(values: Tensor, scale: Tensor) -> Tensor:
    return (values / scale).clamp_(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn)  # larger ones would become NaN


FP8_FORM = QuantizedForm(
    format="float-quantized",
    suffixes=("weight", SCALE_SUFFIX),
    weights={"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
    quantize=quantize_fp8,
    dequantize=dequantize_fp8,
    max_loss_increase=0.005,
    input_activations={"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True},
    round_inputs=round_inputs,
)


GROUP_SIZE = 128
MIN_CODE, MAX_CODE = -8, 7
PACKED_SUFFIX, SHAPE_SUFFIX = "weight_packed", "weight_shape"
CLIP_RATIOS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)
"""Largest value that a scale represents, as a share of the group's largest."""
_CODE_SHIFTS = torch.arange(0, 32, 4, dtype=torch.int32)


def quantize_int4(weight: Tensor, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """weight [out, in] -> `weight_packed` int32 [out, in / 8], `weight_scale` [out, in / 128], `weight_shape` [2]."""
    groups = weight.unflatten(1, (-1, GROUP_SIZE))
    scale = choose_scales(groups, scale_dtype)
    codes = _round_to_codes(groups, scale.float()).to(torch.int32).flatten(1)
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    return {PACKED_SUFFIX: pack_codes(codes), SCALE_SUFFIX: scale.squeeze(-1), SHAPE_SUFFIX: shape}


def round_weight(weight: Tensor, scale_dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] that is read back once it is quantized, in its own dtype."""
    groups = weight.float().unflatten(1, (-1, GROUP_SIZE))
    scale = choose_scales(groups, scale_dtype).float()
    return _round_to_codes(groups, scale).mul_(scale).flatten(1).to(weight.dtype)


def choose_scales(groups: Tensor, dtype: torch.dtype) -> Tensor:
    """Choose the scale of each group of weights [out, groups, 128] with the least squared error: [out, groups, 1]."""
    largest = groups.abs().amax(-1, keepdim=True) / MAX_CODE
    scales = [(largest * ratio).clamp_(min=torch.finfo(dtype).tiny).to(dtype) for ratio in CLIP_RATIOS]
    rounded = (_round_to_codes(groups, scale.float()).mul_(scale.float()) for scale in scales)
    errors = torch.stack([values.sub_(groups).square_().sum(-1, keepdim=True) for values in rounded])
    return torch.stack(scales).gather(0, errors.argmin(0, keepdim=True))[0]


def _round_to_codes(groups: Tensor, scale: Tensor) -> Tensor:
    return (groups / scale).round_().clamp_(MIN_CODE, MAX_CODE)


def pack_codes(codes: Tensor) -> Tensor:
    """codes -8..7 [out, in] -> int32 [out, in / 8], the first code in the lowest 4 bits."""
    return torch.sum((codes - MIN_CODE).unflatten(1, (-1, 8)) << _CODE_SHIFTS, -1, dtype=torch.int32)


def unpack_codes(packed: Tensor) -> Tensor:
    """Invert `pack_codes`."""
    return ((packed.unsqueeze(-1) >> _CODE_SHIFTS) & 15).flatten(1) + MIN_CODE


def dequantize_int4(tensors: Mapping[str, Tensor]) -> Tensor:
    """`weight_packed` and `weight_scale` -> weight [out, in] in fp32."""
    codes = unpack_codes(tensors[PACKED_SUFFIX]).unflatten(1, (-1, GROUP_SIZE))
    return torch.flatten(codes * tensors[SCALE_SUFFIX].float().unsqueeze(-1), 1)


INT4_FORM = QuantizedForm(
    format="pack-quantized",
    suffixes=(PACKED_SUFFIX, SCALE_SUFFIX, SHAPE_SUFFIX),
    weights={"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP_SIZE},
    quantize=quantize_int4,
    dequantize=dequantize_int4,
    max_loss_increase=0.046,
    group_size=GROUP_SIZE,
)


class Int4AwareLinear(nn.Linear):
    """A linear layer that rounds its weight in each forward. Parameters, names and dtypes are those of nn.Linear."""

    scale_dtype = torch.float32
    rounds_weight = True

    def forward(self, x: Tensor) -> Tensor:
        weight = _RoundWeight.apply(self.weight, self.scale_dtype) if self.rounds_weight else self.weight
        return F.linear(x, weight, self.bias)


class _RoundWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale_dtype: torch.dtype) -> Tensor:
        return round_weight(weight, scale_dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def make_int4_aware(model: nn.Module, scale_dtype: torch.dtype) -> None:
    """Convert, in place, the layers that an INT4 export quantizes. `scale_dtype`: that of the export. Raises UsageError
    if there are none."""
    for name in choose_layers(INT4_FORM, model)[0]:
        layer: Any = model.get_submodule(name)
        layer.__class__ = Int4AwareLinear
        layer.scale_dtype = scale_dtype


QUANTIZED_FORMS = {"fp8": FP8_FORM, "int4": INT4_FORM}
"""Forms by the name that users give."""
