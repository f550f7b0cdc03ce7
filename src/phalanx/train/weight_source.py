"""Weights in safetensors files, read by name and range, so that no process ever has to hold a whole model.

It knows files and tensors by the names that they have there; what they mean to a model is told in `huggingface.py`.
Checkpoints of our own are read by `checkpoint/load.py`, which verifies them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from phalanx.bounded import read_json
from phalanx.data.packing import check_kind
from phalanx.errors import DataError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST_INDEX = 1 << 28
"""Bytes of an index; those of the largest models have some ten million."""
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Parts of names that torch's wrappers put there: of a compiled, a recomputed and a sharded module."""


@dataclass(frozen=True)
class WeightSource:
    """The tensors of a directory. `files` tells which file holds a tensor, by the tensor's name."""

    path: Path
    files: Mapping[str, Path]

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self.files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor. DataError when there is none of this name, or its file cannot be read."""
        with _opened(self._file(name)) as file:
            return tuple(file.get_slice(name).get_shape())

    def read(self, name: str, offset: Sequence[int] | None = None, extent: Sequence[int] | None = None) -> Tensor:
        """The block of `extent` elements from `offset` on, in each dimension, as a new CPU tensor in the file's dtype;
        by default the whole tensor. Only the bytes of the block are read.

        DataError when there is no such tensor, the block is not within it, or the file cannot be read.
        """
        with _opened(self._file(name)) as file:
            if offset is None or extent is None:
                whole: Tensor = file.get_tensor(name)
                return whole
            part = file.get_slice(name)
            shape = part.get_shape()
            fits = len(offset) == len(extent) == len(shape)
            if not fits or any(
                a < 0 or n < 0 or a + n > whole for a, n, whole in zip(offset, extent, shape, strict=True)
            ):
                raise DataError(f"{self.path}: {name} has shape {shape}; {list(extent)} from {list(offset)} was asked")
            if not shape or not math.prod(extent):
                # safetensors cuts neither scalars nor nothing
                whole = file.get_tensor(name)
                return whole[tuple(slice(a, a + n) for a, n in zip(offset, extent, strict=True))].clone()
            block: Tensor = part[tuple(slice(a, a + n) for a, n in zip(offset, extent, strict=True))]
            return block.contiguous()

    def _file(self, name: str) -> Path:
        if name not in self.files:
            raise DataError(f"{self.path}: holds no tensor {name!r}")
        return self.files[name]


def weight_source(path: Path) -> WeightSource:
    """The weights of a directory: of `model.safetensors`, of the files that `model.safetensors.index.json` lists, or
    of its only *.safetensors file. Reads headers only.

    DataError when there are no such files, one is missing or damaged, or lacks a tensor that the index promises.
    """
    if (path / INDEX).is_file():
        return WeightSource(path, _indexed(path))
    single = path / SINGLE
    if not single.is_file():
        found = sorted(path.glob("*.safetensors"))
        if len(found) != 1:
            held = ", ".join(file.name for file in found[:5]) or "no *.safetensors file"
            raise DataError(f"{path}: expected {SINGLE} or {INDEX}; found {held}")
        single = found[0]
    return WeightSource(path, dict.fromkeys(_names(single), single))


def _indexed(path: Path) -> dict[str, Path]:
    """Tensor -> file, as the index says, and found to be so."""
    listed = read_json(path / INDEX, LARGEST_INDEX).get("weight_map")
    if not isinstance(listed, dict):
        raise DataError(f"{path / INDEX}: expected JSON with a mapping `weight_map` of tensors to files")
    for name, file in listed.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise DataError(f"{path / INDEX}: expected a file of this folder for {name}, found {file!r}")
    files = {name: path / file for name, file in listed.items()}
    for file in sorted(set(files.values())):
        held = _names(file)
        for name in sorted(name for name, there in files.items() if there == file):
            if name not in held:
                raise DataError(f"{file}: holds no tensor {name!r}, though {INDEX} says so")
    return files


def _names(file: Path) -> frozenset[str]:
    with _opened(file) as opened:
        return frozenset(opened.keys())


def _opened(file: Path) -> Any:
    """The file, mapped into memory; close it (`with`) after use."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except FileNotFoundError:
        raise DataError(f"{file}: there is no such file") from None
    except (SafetensorError, OSError) as error:
        check_kind(file, "safetensors")
        raise DataError(f"{file}: not a whole safetensors file ({error})") from None


def plain_name(name: str) -> str:
    """A tensor's name without the parts that torch's wrappers put there."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def aliases(model: nn.Module) -> dict[str, str]:
    """Of parameters that are tied, each name but the first, and the first."""
    first: dict[int, str] = {}
    everything = model.named_parameters(remove_duplicate=False)
    owners = {name: first.setdefault(id(parameter), name) for name, parameter in everything}
    return {name: owner for name, owner in owners.items() if name != owner}


def copy_into(target: Tensor, source: WeightSource, name: str) -> None:
    """Overwrite `target` by a whole tensor, converted to its dtype. DataError when the shapes differ."""
    shape = source.shape(name)
    if shape != tuple(target.shape):
        raise DataError(f"{source.files[name]}: {name} has shape {list(shape)}, the model's has {list(target.shape)}")
    with torch.no_grad():
        target.copy_(source.read(name))
