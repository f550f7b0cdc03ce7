"""Check that a model can be trained and saved, right after it is built, and pack the state that is not tensors.

A module may have extra state (`get_extra_state`), and an optimizer has values in its param groups. Such a value is
saved as one uint8 tensor: a safetensors file with its tensors, and everything else as JSON in the header.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from phalanx.errors import DataError, PhalanxError, RecipeError
from phalanx.recipe import describe_exception
from phalanx.train.distributed.failures import is_out_of_memory

EXTRA_STATE_PREFIX = "extra/"
"""Prefix of the logical names of extra state; the name of the module follows."""
# Names of the safetensors format.
TORCH_DTYPES = {
    "C64": torch.complex64,
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def check_model_can_be_saved(model: nn.Module) -> None:
    """Raise RecipeError, naming the first parameter, buffer or module that cannot be trained or saved."""
    has_values = not all(parameter.is_meta for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        if has_values and parameter.is_meta:
            raise RecipeError(
                f"model.build: parameter {name!r} has no values (it is on the meta device); give it some in the builder"
            )
        if is_lazy(parameter):
            raise RecipeError(
                f"model.build: parameter {name!r} has no shape yet (a Lazy module); run one forward in the builder, or "
                "use the module with its size given"
            )
        _check_tensor("parameter", name, parameter)
        if parameter.requires_grad and not (parameter.is_floating_point() and parameter.dtype.itemsize > 1):
            kind = str(parameter.dtype).removeprefix("torch.")
            raise RecipeError(
                f"model.build: parameter {name!r} is {kind}, which cannot be trained here; use a floating-point dtype "
                "of 16 bits or more (for a complex one torch.view_as_real in the model), or requires_grad_(False)"
            )
    buffers = get_persistent_buffers(model)
    buffers_have_values = has_values or not all(buffer.is_meta for buffer in buffers.values())
    for name, buffer in buffers.items():
        if is_lazy(buffer):
            raise RecipeError(f"model.build: buffer {name!r} has no shape yet; run one forward in the builder")
        if buffers_have_values and buffer.is_meta:
            raise RecipeError(
                f"model.build: buffer {name!r} has no values (it is on the meta device); give it some in the builder"
            )
        _check_tensor("buffer", name, buffer)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise RecipeError(
                f"model.build: {name or type(module).__name__!r} makes sparse gradients, which cannot be summed over "
                "workers; build it with sparse=False"
            )
    get_extra_state(model)


def _check_tensor(what: str, name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise RecipeError(
            f"model.build: {what} {name!r} is a tensor of layout {kind}, which a checkpoint cannot hold; "
            "keep its dense parts, or a buffer with persistent=False"
        )
    is_expanded = any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if is_expanded or tensor.is_conj() or tensor.is_neg():
        raise RecipeError(
            f"model.build: {what} {name!r} is a view (expand, conj), which cannot be written to; give it memory of its "
            "own by resolve_conj() and clone()"
        )
    if tensor.dtype not in DTYPE_NAMES:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise RecipeError(
            f"model.build: {what} {name!r} is {kind}, which a checkpoint cannot hold; use another dtype, or a buffer "
            "with persistent=False"
        )


def get_persistent_buffers(model: nn.Module, *, recurse: bool = True) -> dict[str, Tensor]:
    """Return persistent buffers by name, without `recurse` only those of the module itself. Raises RecipeError if the
    model's own `state_dict` fails."""
    try:
        persistent = model.state_dict(keep_vars=True)
        return {name: buffer for name, buffer in model.named_buffers(recurse=recurse) if name in persistent}
    except Exception as error:
        if isinstance(error, PhalanxError) or is_out_of_memory(error):
            raise
        raise RecipeError(f"model.build: state_dict() of the model failed: {describe_exception(error)}") from error


def find_extra_state_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return modules with their own `get_extra_state`, by name."""
    default = nn.Module.get_extra_state
    return {name: module for name, module in model.named_modules() if type(module).get_extra_state is not default}


def get_extra_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the extra state of modules by logical name. Raises RecipeError for values that cannot be saved."""
    what = "model.build: get_extra_state of"
    return {
        EXTRA_STATE_PREFIX + name: pack_value(module.get_extra_state(), f"{what} {_display_name(name, module)}")
        for name, module in find_extra_state_modules(model).items()
    }


def load_extra_state(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Restore the extra state of modules. Raises DataError if `tensors` lack one."""
    for name, module in find_extra_state_modules(model).items():
        if EXTRA_STATE_PREFIX + name not in tensors:
            raise DataError(f"{where}: has no extra state of {_display_name(name, module)}, which the model needs")
        module.set_extra_state(unpack_value(tensors[EXTRA_STATE_PREFIX + name], where))


def _display_name(name: str, module: nn.Module) -> str:
    return repr(name) if name else type(module).__name__


def pack_value(value: Any, what: str) -> Tensor:
    """Pack a value into a uint8 tensor. Raises RecipeError, starting with `what`, unless it consists of tensors,
    numbers, strings, lists, tuples and dicts with string keys."""
    tensors: dict[str, Tensor] = {}

    def to_json(part: Any) -> Any:
        if isinstance(part, Tensor) and part.layout == torch.strided and part.dtype in DTYPE_NAMES:
            plain = part.detach().resolve_conj().resolve_neg()
            tensors[str(len(tensors))] = plain.clone(memory_format=torch.contiguous_format).cpu()
            return {"tensor": str(len(tensors) - 1)}
        if type(part) is dict and all(type(key) is str for key in part):
            return {"dict": {key: to_json(each) for key, each in part.items()}}
        if type(part) in (list, tuple):
            return {type(part).__name__: [to_json(each) for each in part]}
        if part is None or type(part) in (bool, int, float, str):
            return {"value": part}
        kind = f"a tensor of {part.dtype}" if isinstance(part, Tensor) else type(part).__name__
        raise RecipeError(
            f"{what} holds {kind}, which is not saved; it may hold tensors, numbers, texts, lists, tuples and dicts"
        )

    text = json.dumps(to_json(value))
    return torch.frombuffer(bytearray(save(tensors, metadata={"value": text})), dtype=torch.uint8)


def unpack_value(content: Tensor, where: str) -> Any:
    """Unpack a value packed by `pack_value`. Raises DataError for anything else."""
    data = content.cpu().numpy().tobytes()
    try:
        tensors = load(data)
        head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])

        def value(part: Any) -> Any:
            ((kind, payload),) = part.items()
            if kind == "tensor":
                return tensors[payload]
            if kind == "dict":
                return {key: value(each) for key, each in payload.items()}
            if kind in ("list", "tuple"):
                return {"list": list, "tuple": tuple}[kind](value(each) for each in payload)
            return payload

        return value(json.loads(head["__metadata__"]["value"]))
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{where}: extra state that is not what was saved: {error}") from None


def get_model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, tied ones once; the live tensors."""
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **get_persistent_buffers(model)}
    return {name: tensor.detach() for name, tensor in tensors.items()}
