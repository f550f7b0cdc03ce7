"""Convert the tensors of Hugging Face files to those of a transformers model, and back.

Since version 5, transformers renames, merges and splits tensors when it reads a directory and reverts that when it
writes one (its conversion mapping): a mixture's experts are single tensors in files and one in the model.
`open_converted_source` presents files under the model's names and shapes, one tensor at a time, so that readers by name
and range need not know; `revert_conversion` restores the files' tensors. Both call transformers' own operations.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import DataError
from phalanx.train.hf.inputs import is_transformers_model
from phalanx.train.hf.safetensors_reader import WeightReader

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
