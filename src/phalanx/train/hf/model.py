"""Hugging Face directories: build the architecture of config.json without memory for its weights, and map its
parameters to the tensors of the files.

`safetensors_reader.py` reads these by name and range, and `train/checkpoint/load_plan.py` fills the parts of the
model that a worker holds; `load_weights` fills the whole model in one process. Nothing here writes files.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.data import DataInfo
from phalanx.errors import DataError, PhalanxError, RecipeError
from phalanx.recipe.imports import HF_CONFIG_FILE, describe_exception
from phalanx.train.adapters.targets import get_whole_shape, has_adapter, is_added_name
from phalanx.train.distributed.meta_device import allocate_meta_parameters, parameters_on_meta
from phalanx.train.distributed.module_state import get_model_tensors
from phalanx.train.hf.config import check_data_fits, format_args, load_architecture, name_classes
from phalanx.train.hf.inputs import install_input_adapter, is_transformers_model
from phalanx.train.hf.safetensors_reader import (
    ConvertedWeightSource,
    WeightReader,
    copy_tensor_into,
    find_tied_names,
    open_converted_source,
    open_weight_reader,
    preload_conversions,
    strip_wrapper_parts,
)

_NEW_HEAD_ATTRIBUTE = "_phalanx_new_head"
MAX_LISTED_TENSORS = 5
"""Maximum number of tensors that an error lists."""
OBSOLETE_TENSOR_PATTERNS = (r"(^|\.)(rotary_emb\.inv_freq|attn\.(masked_)?bias|(position|token_type)_ids)$",)
"""Tensors of older files that current models compute themselves."""
TENSORFLOW_SUFFIXES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""Suffixes of parameters in files that were converted from TensorFlow."""


def build_on_meta(directory: Path, args: Mapping[str, Any], facts: DataInfo | None = None) -> nn.Module:
    """Build the model of a directory, with `args` overriding values of its config.json. Parameters are on the meta
    device (fp32), buffers are real and on the CPU, and the model accepts the inputs of our tasks. With `facts`, check
    that the data fit it.

    Raises RecipeError if transformers is not installed, config.json has an unknown architecture, `args` do not fit it,
    or the data have more tokens or longer samples than it supports.
    """
    architecture = load_architecture(directory, args)
    kind = architecture.kind
    if facts is not None:
        check_data_fits(architecture, facts)
    try:
        with parameters_on_meta():
            model: nn.Module = kind(architecture.config)
    except Exception as error:
        where = format_args(directory / HF_CONFIG_FILE, args)
        raise RecipeError(f"{where}: {kind.__name__} cannot be built: {describe_exception(error)}") from error
    install_input_adapter(model)
    if architecture.is_auto:
        setattr(model, _NEW_HEAD_ATTRIBUTE, frozenset(_list_head(model)))
    return model


def _list_head(model: Any) -> dict[str, nn.Module]:
    """Return the modules behind the blocks that the files of another head lack, by the names of their parameters."""
    base = "" if model.base_model is model else f"{model.base_model_prefix}."
    return {
        f"{path}.{name}": module
        for path, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
        if path.split(".")[-2:-1] == ["pooler"] or not path.startswith(base)
    }


def init_new_head(model: Any, seed: int) -> None:
    """Give what is `find_new_head` of a model on the meta device random values by `seed`, on the CPU."""
    head = _list_head(model) if find_new_head(model) else {}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for module in dict.fromkeys(head.values()):
            module.to_empty(device="cpu", recurse=False)
            model._init_weights(module)


def find_new_head(model: nn.Module) -> frozenset[str] | None:
    """Return the names of the parameters that weights to start from may lack; these may also hold what the model does
    not use, such as another head. None for a model that its files must fit."""
    names: frozenset[str] | None = getattr(model, _NEW_HEAD_ATTRIBUTE, None)
    return names


def build_with_weights(
    directory: Path, args: Mapping[str, Any], facts: DataInfo | None, device: torch.device, seed: int = 0
) -> nn.Module:
    """Build the whole model of a directory, with its weights, on a device. Raises the errors of `build_on_meta` and
    `match_tensor_names`."""
    model = build_on_meta(directory, args, facts)
    init_new_head(model, seed)
    source = open_source(model, directory)
    names = match_tensor_names(model, source)
    allocate_meta_parameters([model], device)
    load_weights(model, source, names)
    return model


def open_source(model: nn.Module, directory: Path) -> WeightReader:
    """Open the tensors of a directory under the model's names. Raises the errors of `open_weight_reader` and
    `open_converted_source`."""
    return open_converted_source(model, open_weight_reader(directory))


def match_tensor_names(model: nn.Module, source: WeightReader) -> dict[str, list[str]]:
    """Map each parameter and persistent buffer to tensors of the files: one, or several that must be equal, if the
    model ties what the files hold twice. Models of a base and a head find their tensors with and without the base's
    prefix (`model.`, `transformer.`). Adapters, and scales of quantized weights, are left out. Only headers are
    read, and the model's memory is not used.

    Raises DataError naming tensors that the files lack, have in addition, or have in another shape.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    found: dict[str, list[str]] = {}
    parameters = dict(model.named_parameters())
    for name, alias_names in _group_alias_names(model).items():
        if is_added_name(name):
            continue
        candidates = (file_name for alias in alias_names for file_name in _candidate_names(alias, prefix))
        found[name] = [file_name for file_name in dict.fromkeys(candidates) if file_name in source.files]
    optional, new_head = _read_patterns(model, "_keys_to_ignore_on_load_missing"), find_new_head(model)
    # Only tensors that the model computes may be missing: buffers, which have values once the model is built.
    missing = [
        name
        for name, file_name in found.items()
        if not file_name and name not in (new_head or ()) and (name in parameters or not _matches_any(optional, name))
    ]
    used = {file_name for names in found.values() for file_name in names}
    computed = {name for name, _ in model.named_buffers()} - found.keys()
    needless = [*OBSOLETE_TENSOR_PATTERNS, *_read_patterns(model, "_keys_to_ignore_on_load_unexpected")]
    extra = [
        name
        for name in sorted(source.names - used)
        if not _matches_any(needless, name)
        and not any(candidate in computed for candidate in _candidate_names(name, prefix))
    ]
    kind = type(model).__name__
    if missing:
        raise DataError(
            f"{source.path}: {kind} needs {_format_tensor_names(missing)}, which the files "
            f"lack{_suggest_fix(missing, extra)}"
        )
    if extra and new_head is None:
        raise DataError(
            f"{source.path}: {kind} has no place for {_format_tensor_names(extra)}{_suggest_fix(missing, extra)}"
        )
    tensors = get_model_tensors(model)
    for name, names in found.items():
        for file_name in names:
            shape, expected = source.shape(file_name), get_whole_shape(name, tensors)
            if shape == expected:
                continue
            vocabulary = _find_vocabulary_tensors(model)
            if name in vocabulary and shape[1:] == expected[1:] and shape[0] < expected[0]:
                if not vocabulary[name]:
                    raise RecipeError(
                        f"model.args.vocab_size: adds {expected[0] - shape[0]} rows to {name}, which the adapter "
                        f"leaves frozen; name its module in adapter.modules_to_save: [{name.split('.')[-2]}]"
                    )
                source.grown.add(file_name)
            else:
                shapes = f"{list(shape)}, {kind} by its {HF_CONFIG_FILE} {list(expected)}"
                raise DataError(f"{source.files[file_name]}: {file_name} has shape {shapes}")
    return {name: names for name, names in found.items() if names}


def _find_vocabulary_tensors(model: nn.Module) -> dict[str, bool]:
    """Return the names of tensors with a row for each token, and whether training changes them."""
    if not is_transformers_model(model):
        return {}
    layers = {id(layer): layer for layer in (model.get_input_embeddings(), model.get_output_embeddings())}  # type: ignore[operator]
    return {
        f"{prefix}.{name}": parameter.requires_grad or has_adapter(module)
        for prefix, module in model.named_modules()
        if id(module) in layers
        for name, parameter in module.named_parameters(recurse=False)
    }


def load_weights(model: nn.Module, source: WeightReader, names: Mapping[str, list[str]]) -> None:
    """Read all weights into the model, converted to its dtype, one tensor at a time. Raises DataError if tensors that
    the model ties differ."""
    tensors = get_model_tensors(model)
    for name, (first, *others) in names.items():
        copy_tensor_into(tensors[name], source, first)
        for other in others:
            if not torch.equal(source.read(first), source.read(other)):
                raise make_tie_mismatch_error(source, first, other)


def make_tie_mismatch_error(source: WeightReader, first: str, other: str) -> DataError:
    """Make the error for two tensors of the files that differ but that the model ties."""
    return DataError(
        f"{source.path}: {first} and {other} differ, but {HF_CONFIG_FILE} ties them; "
        "model.args.tie_word_embeddings=false keeps both"
    )


def describe_for_export(directory: Path, args: Mapping[str, Any], facts: DataInfo | None = None) -> dict[str, Any]:
    """Return what an export needs to write such a directory: its path, config.json with `args` applied and the data's
    classes named, the file names of tensors that the model names differently, conversion groups, tied parameters, the
    tensors that the model does not use, and dtypes and sizes of the files (`_describe_files`)."""
    architecture = load_architecture(directory, args)
    model = build_on_meta(directory, args)
    source = open_source(model, directory)
    matches = match_tensor_names(model, source)
    names = {name: file_names[0] for name, file_names in matches.items()}
    used = {file_name for file_names in matches.values() for file_name in file_names}
    obsolete = [*OBSOLETE_TENSOR_PATTERNS, *(rf"(^|\.){re.escape(name)}$" for name, _ in model.named_buffers())]
    conversion_groups: list[dict[str, list[str]]] = []
    if isinstance(source, ConvertedWeightSource):
        conversion_groups = source.conversion_groups()
        plain = (name for name in names if name not in source.conversions)
        names = {name: source.original_name(names[name]) for name in plain}
    return {
        "directory": str(directory.absolute()),
        "config": {**architecture.values, **name_classes(architecture, facts)},
        "names": {name: file_names for name, file_names in names.items() if file_names != name},
        "converted": conversion_groups,
        "tied": find_tied_names(model),
        "unused": sorted(source.names - used - {name for name in source.names if _matches_any(obsolete, name)}),
        **_describe_files(model, source.raw if isinstance(source, ConvertedWeightSource) else source),
    }


def _describe_files(model: nn.Module, source: WeightReader) -> dict[str, Any]:
    """Return the `dtype` that most of the files' tensors have, the `dtypes` of others, the tensors that the model keeps
    in fp32 whatever the dtype, and the size of the largest file if there are several."""
    dtypes, dtype = source.read_dtypes(), source.find_main_dtype()
    patterns = [*_read_patterns(model, "_keep_in_fp32_modules"), *_read_patterns(model, "_keep_in_fp32_modules_strict")]
    kept = [name for name in dtypes if any(re.search(rf"(^|\.){re.escape(part)}(\.|$)", name) for part in patterns)]
    paths = set(source.files.values())
    return {
        "dtype": dtype,
        "dtypes": {name: other for name, other in dtypes.items() if other != dtype},
        "kept_in_fp32": sorted(kept),
        "file_bytes": max(path.stat().st_size for path in paths) if len(paths) > 1 else None,
    }


def preload_architecture(directory: str) -> None:
    """Import the modules that a model of this directory needs, in a process that forks workers, so that they need not.
    Errors in the directory are ignored here, because building the model reports them."""
    with suppress(PhalanxError):
        load_architecture(Path(directory), {})
    preload_conversions()


def _group_alias_names(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each tensor to load, by its first name."""
    tensors = get_model_tensors(model)
    everything: list[tuple[str, Tensor]] = [*model.named_parameters(remove_duplicate=False)]
    everything += model.named_buffers(remove_duplicate=False)
    first: dict[int, str] = {}
    names_by_tensor: dict[str, list[str]] = {}
    for name, tensor in everything:
        owner = first.setdefault(id(tensor), name)
        if owner in tensors:
            names_by_tensor.setdefault(owner, []).append(name)
    return names_by_tensor


def _candidate_names(name: str, prefix: str) -> list[str]:
    """Return names that a tensor may have in a file."""
    plain = strip_wrapper_parts(name)
    names = list(dict.fromkeys([name, plain, plain.removeprefix("module.")]))
    if len(prefix) > 1:
        names += [name.removeprefix(prefix) if name.startswith(prefix) else prefix + name]
    pairs = ((one, ending) for one in names for ending in TENSORFLOW_SUFFIXES if one.endswith(ending))
    return names + [one.removesuffix(ending) + TENSORFLOW_SUFFIXES[ending] for one, ending in pairs]


def _read_patterns(model: nn.Module, attribute: str) -> list[str]:
    """Return regular expressions of names that a transformers model declares."""
    return list(getattr(model, attribute, None) or [])


def _matches_any(patterns: list[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _format_tensor_names(names: list[str]) -> str:
    rest = len(names) - MAX_LISTED_TENSORS
    listed = ", ".join(names[:MAX_LISTED_TENSORS])
    count = f"{len(names)} tensor{'s' if len(names) > 1 else ''}"
    return f"{count} ({listed}{f' and {rest} more' if rest > 0 else ''})"


def _suggest_fix(missing: list[str], extra: list[str]) -> str:
    """Suggest a fix for missing or extra tensors."""
    if missing and extra:
        return (
            f"; they hold {_format_tensor_names(extra)} instead: model.args.architectures must name what was saved here"
        )
    if missing:
        return "; save the whole model again with save_pretrained, or name what was saved in model.args.architectures"
    return "; name an architecture that has them in model.args.architectures, or save the model again"
