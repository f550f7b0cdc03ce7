"""Read weights in safetensors files by name and range, so that no process has to hold a whole model.

Tensors have their names in the files; `model.py` maps them to a model. `checkpoint/load.py` reads and verifies our own
checkpoints.

Since version 5, transformers renames, merges and splits tensors when it reads a directory and reverts that when it
writes one (its conversion mapping): a mixture's experts are single tensors in files and one in the model.
`open_converted_source` presents files under the model's names and shapes, one tensor at a time, so that readers by name
and range need not know; `revert_conversion` restores the files' tensors. Both call transformers' own operations.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from phalanx.data.file_format import check_file_format
from phalanx.errors import DataError
from phalanx.safe_files import read_json
from phalanx.train.hf.inputs import is_transformers_model

SINGLE_FILE_NAME, INDEX_FILE_NAME = "model.safetensors", "model.safetensors.index.json"
MAX_INDEX_BYTES = 1 << 28
"""Maximum bytes of an index; those of the largest models take about 10 million."""
FLOAT_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Names of torch's dtypes by those in safetensors files."""
WRAPPER_NAME_PARTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Name components that torch's wrappers add for compiled, checkpointed and sharded modules."""


@dataclass(frozen=True)
class WeightReader:
    """The tensors of a directory. `files` maps a tensor's name to its file."""

    path: Path
    files: Mapping[str, Path]
    grown: set[str] = field(default_factory=set, kw_only=True)
    """Tensors of which the model has more rows, for new tokens."""

    def read_grown(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> Tensor:
        """`read` of a block that may have rows beyond the file's: they are the mean of all rows, as transformers'
        `resize_token_embeddings` has it but for noise. It does not depend on how the tensor is divided."""
        if name not in self.grown:
            return self.read(name, offset, extent)
        num_rows = self.shape(name)[0]
        start = min(offset[0], num_rows)
        old = self.read(name, (start, *offset[1:]), (min(extent[0], num_rows - start), *extent[1:]))
        mean = self.read(name).double().mean(0, keepdim=True).to(old.dtype)
        new = mean[tuple(slice(a, a + n) for a, n in zip((0, *offset[1:]), (1, *extent[1:]), strict=True))]
        return torch.cat([old, new.expand(extent[0] - len(old), *extent[1:])])

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        return frozenset(self.files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor. Raises DataError if it does not exist, or its file cannot be read."""
        with _open_safetensors(self._file_of(name)) as file:
            return tuple(file.get_slice(name).get_shape())

    def read_dtypes(self) -> dict[str, str]:
        """Return the dtype of each tensor of floating-point numbers in the files: the last part of torch's name."""
        found: dict[str, str] = {}
        for path in sorted(set(self.files.values())):
            with _open_safetensors(path) as file:
                dtypes = {name: file.get_slice(name).get_dtype() for name, its in self.files.items() if its == path}
            found |= {name: FLOAT_DTYPES[dtype] for name, dtype in dtypes.items() if dtype in FLOAT_DTYPES}
        return found

    def find_main_dtype(self) -> str:
        """Return the dtype that most tensors of floating-point numbers have; float32 if there are none."""
        return next((dtype for dtype, _ in Counter(self.read_dtypes().values()).most_common(1)), "float32")

    def read(self, name: str, offset: Sequence[int] | None = None, extent: Sequence[int] | None = None) -> Tensor:
        """Read the block of `extent` elements from `offset` in each dimension, as a new CPU tensor in the file's dtype;
        by default the whole tensor. Only the bytes of the block are read.

        Raises DataError if there is no such tensor, the block is not within it, or the file cannot be read.
        """
        with _open_safetensors(self._file_of(name)) as file:
            if offset is None or extent is None:
                full_size: Tensor = file.get_tensor(name)
                return full_size
            part = file.get_slice(name)
            shape = part.get_shape()
            fits = len(offset) == len(extent) == len(shape)
            if not fits or any(
                a < 0 or n < 0 or a + n > full_size for a, n, full_size in zip(offset, extent, shape, strict=True)
            ):
                raise DataError(f"{self.path}: {name} has shape {shape}; {list(extent)} from {list(offset)} was asked")
            if not shape or not math.prod(extent):
                # safetensors cannot slice scalars and empty blocks
                full_size = file.get_tensor(name)
                return full_size[tuple(slice(a, a + n) for a, n in zip(offset, extent, strict=True))].clone()
            block: Tensor = part[tuple(slice(a, a + n) for a, n in zip(offset, extent, strict=True))]
            return block.contiguous()

    def _file_of(self, name: str) -> Path:
        if name not in self.files:
            raise DataError(f"{self.path}: holds no tensor {name!r}")
        return self.files[name]


def open_weight_reader(path: Path) -> WeightReader:
    """Open the weights of a directory: `model.safetensors`, the files in `model.safetensors.index.json`, or its only
    *.safetensors file. Only headers are read.

    Raises DataError if there are no such files, one is missing or damaged, or lacks a tensor that the index lists.
    """
    if (path / INDEX_FILE_NAME).is_file():
        return WeightReader(path, _read_index(path))
    single = path / SINGLE_FILE_NAME
    if not single.is_file():
        found = sorted(path.glob("*.safetensors"))
        if len(found) != 1:
            file_names = ", ".join(file.name for file in found[:5]) or "no *.safetensors file"
            raise DataError(f"{path}: expected {SINGLE_FILE_NAME} or {INDEX_FILE_NAME}; found {file_names}")
        single = found[0]
    return WeightReader(path, dict.fromkeys(_read_tensor_names(single), single))


def _read_index(path: Path) -> dict[str, Path]:
    """Return the file of each tensor according to the index, after checking that the files have these tensors."""
    listed = read_json(path / INDEX_FILE_NAME, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(listed, dict):
        raise DataError(f"{path / INDEX_FILE_NAME}: expected JSON with a mapping `weight_map` of tensors to files")
    for name, file in listed.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise DataError(f"{path / INDEX_FILE_NAME}: expected a file of this folder for {name}, found {file!r}")
    files = {name: path / file for name, file in listed.items()}
    for file in sorted(set(files.values())):
        names_in_file = _read_tensor_names(file)
        for name in sorted(name for name, named_file in files.items() if named_file == file):
            if name not in names_in_file:
                raise DataError(f"{file}: holds no tensor {name!r}, though {INDEX_FILE_NAME} says so")
    return files


def _read_tensor_names(file: Path) -> frozenset[str]:
    with _open_safetensors(file) as opened:
        return frozenset(opened.keys())


def _open_safetensors(file: Path) -> Any:
    """Open a file, mapped into memory; close it (`with`) after use."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except FileNotFoundError:
        raise DataError(f"{file}: there is no such file") from None
    except (SafetensorError, OSError) as error:
        check_file_format(file, "safetensors")
        raise DataError(f"{file}: not a whole safetensors file ({error})") from None


def strip_wrapper_parts(name: str) -> str:
    """Return a tensor's name without the components that torch's wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_NAME_PARTS)


def find_tied_names(model: nn.Module) -> dict[str, str]:
    """Return, for tied parameters, each name but the first, mapped to the first."""
    first: dict[int, str] = {}
    everything = model.named_parameters(remove_duplicate=False)
    owners = {name: first.setdefault(id(parameter), name) for name, parameter in everything}
    return {name: owner for name, owner in owners.items() if name != owner}


def copy_tensor_into(target: Tensor, source: WeightReader, name: str) -> None:
    """Overwrite `target` with a whole tensor, converted to its dtype. Raises DataError if the shapes differ."""
    shape = source.shape(name)
    if shape != tuple(target.shape) and name not in source.grown:
        raise DataError(f"{source.files[name]}: {name} has shape {list(shape)}, the model's has {list(target.shape)}")
    with torch.no_grad():
        is_grown = name in source.grown
        target.copy_(source.read_grown(name, (0,) * target.dim(), target.shape) if is_grown else source.read(name))


ReadTensorFn = Callable[[str], Tensor]


@dataclass(frozen=True)
class WeightConversion:
    """Tensors of files that become one or more of the model: each with the matching pattern of transformers' converter,
    in order."""

    converter: Any
    first: str
    """The first tensor that it makes, by its name in the model."""
    sources: tuple[tuple[str, str], ...]
    model: nn.Module

    def convert(self, read: ReadTensorFn, selected: Iterable[tuple[str, str]] | None = None) -> dict[str, Tensor]:
        """Convert the files' tensors that `read` returns (those `selected`, if given) to the model's."""
        converter = deepcopy(self.converter)
        for pattern, name in self.sources if selected is None else selected:
            converter.add_tensor(self.first, name, pattern, read(name))
        found = converter.convert(self.first, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}

    @cached_property
    def stacks_first_dim(self) -> bool:
        """Whether it only stacks tensors along the first dimension, and concatenates along others: a range of the first
        dimension then needs only a range of the tensors."""
        first, *others = [(type(each).__name__, getattr(each, "dim", None)) for each in self.converter.operations]
        return first == ("MergeModulelist", 0) and all(name == "Concatenate" and dim != 0 for name, dim in others)

    def select_sources(self, begin: int, count: int) -> list[tuple[str, str]]:
        """Return the tensors needed for `count` elements of the first dimension from `begin`."""
        by_pattern: dict[str, list[tuple[str, str]]] = {}
        for each in self.sources:
            by_pattern.setdefault(each[0], []).append(each)
        return [each for those in by_pattern.values() for each in those[begin : begin + count]]


@dataclass(frozen=True)
class ConvertedWeightSource(WeightReader):
    """A directory's tensors under the model's names. `renamed_from` maps names to those in the files, for tensors that
    are only renamed."""

    raw: WeightReader
    renamed_from: Mapping[str, str]
    conversions: Mapping[str, WeightConversion]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of converted tensors."""

    def original_name(self, name: str) -> str:
        """Return the name in the files of a tensor that is only renamed."""
        return self.renamed_from.get(name, name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Same as in WeightReader."""
        return self.shapes[name] if name in self.shapes else self.raw.shape(self.original_name(name))

    def read(self, name: str, offset: Sequence[int] | None = None, extent: Sequence[int] | None = None) -> Tensor:
        """Same as in WeightReader. For a converted tensor its source tensors are read; if it is a stack, only those
        that the block needs."""
        conversion = self.conversions.get(name)
        if conversion is None:
            return self.raw.read(self.original_name(name), offset, extent)
        if offset is None or extent is None:
            return conversion.convert(self.raw.read)[name]
        begin, wanted = list(offset), None
        if conversion.stacks_first_dim and extent[0]:
            wanted, begin[0] = conversion.select_sources(offset[0], extent[0]), 0
        whole = conversion.convert(self.raw.read, wanted)[name]
        return whole[tuple(slice(a, a + n) for a, n in zip(begin, extent, strict=True))].contiguous()

    def conversion_groups(self) -> list[dict[str, list[str]]]:
        """Return the information for `revert_conversion`: the model's tensors that are made together, and the files'
        tensors they are made from."""
        names_by_conversion: dict[int, list[str]] = {}
        for name, conversion in self.conversions.items():
            names_by_conversion.setdefault(id(conversion), []).append(name)
        by_id = {id(each): each for each in self.conversions.values()}
        return [
            {"tensors": names, "held": [name for _, name in by_id[key].sources]}
            for key, names in sorted(names_by_conversion.items())
        ]


def open_converted_source(model: nn.Module, source: WeightReader) -> WeightReader:
    """Open the tensors of a directory under the names of a model (its parameters may be on meta). They are unchanged if
    the model is not one of transformers, or its version converts nothing. Only headers are read. Raises DataError if
    tensors cannot be converted."""
    library, mapping = _conversion_mapping(model)
    if library is None:
        return source
    renamings = [each for each in mapping if isinstance(each, library.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, library.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    names, prefix = model.state_dict(keep_vars=True), model.base_model_prefix
    files, renamed_from = {}, {}
    sources_by_converter: dict[tuple[int, str], list[tuple[str, str]]] = {}
    for name in sorted(source.files, key=library.dot_natural_key):
        model_name, pattern = library.rename_source_key(name, renamings, converters, prefix, names)
        if model_name not in names or (pattern is None and model_name == name):
            files[name] = source.files[name]  # unknown to the model, or not renamed
        elif pattern is None:
            files[model_name], renamed_from[model_name] = source.files[name], name
        else:
            sources_by_converter.setdefault((id(by_pattern[pattern]), model_name), []).append((pattern, name))
    conversions, shapes = {}, {}
    for (_, first), tensors in sources_by_converter.items():
        conversion = WeightConversion(by_pattern[tensors[0][0]], first, tuple(tensors), model)
        try:
            made = conversion.convert(lambda name: torch.empty(source.shape(name), device="meta"))
        except Exception as error:  # noqa: BLE001 - transformers' operations may raise anything for wrong tensors
            listed = ", ".join(name for _, name in tensors[:3])
            raise DataError(
                f"{source.path}: {listed} and others cannot be made {first} of {type(model).__name__}: "
                f"{type(error).__name__}: {error}"
            ) from None
        for name, tensor in made.items():
            conversions[name], shapes[name] = conversion, tuple(tensor.shape)
            files[name] = source.files[tensors[0][1]]
    return ConvertedWeightSource(source.path, files, source, renamed_from, conversions, shapes)


def revert_conversion(model: nn.Module, tensors: Mapping[str, Tensor], file_names: Sequence[str]) -> dict[str, Tensor]:
    """Return the tensors of files named `file_names` from the model's tensors that were made from them. Raises
    DataError if this version of transformers cannot do this, or gives them other names."""
    library, _ = _conversion_mapping(model)
    kind, named = type(model).__name__, f"{', '.join(list(tensors)[:3])}"
    if library is None:
        raise DataError(f"{kind}: {named} cannot be written as they were read: that needs transformers 5 or later")
    found = library.revert_weight_conversion(model, dict(tensors))
    unmatched, result = set(file_names), {}
    for name, tensor in found.items():
        # transformers does not know whether the files had the prefix of the base model.
        fits = [each for each in unmatched if each == name or each.endswith(f".{name}") or name.endswith(f".{each}")]
        if len(fits) != 1:
            raise DataError(f"{kind}: {named} became {name}, which is none of the tensors that were read")
        unmatched.remove(fits[0])
        result[fits[0]] = tensor.contiguous()
    if unmatched:
        raise DataError(f"{kind}: of {named} no {min(unmatched)} could be made, which was read")
    return result


def preload_conversions() -> None:
    """Make transformers' table of conversions of all its models, which takes 0.4 s, once for all workers."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:  # version 4, or none
        return
    get_checkpoint_conversion_mapping("")


def _conversion_mapping(model: Any) -> tuple[Any, list[Any]]:
    """Return transformers' conversion module and a model's conversions; (None, []) if it has none."""
    if not is_transformers_model(model):
        return None, []
    try:
        from transformers import core_model_loading
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # version 4
        return None, []
    return core_model_loading, get_model_conversion_mapping(model)
