"""Safetensors files read by name and range."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from phalanx.errors import DataError
from phalanx.train.hf.safetensors_reader import INDEX_FILE_NAME, SINGLE_FILE_NAME, open_weight_reader

TENSORS = {"a": torch.arange(24.0).reshape(4, 6), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.tensor(5.0)}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / SINGLE_FILE_NAME)
    return tmp_path


def split(folder: Path) -> Path:
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, folder / f"model-{name}.safetensors")
    listed = {name: f"model-{name}.safetensors" for name in TENSORS}
    (folder / INDEX_FILE_NAME).write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    return folder


def test_files_behind_an_index_read_like_one(tmp_path: Path) -> None:
    source = open_weight_reader(split(tmp_path))
    assert all(torch.equal(source.read(name), tensor) for name, tensor in TENSORS.items())


def test_a_range_is_that_block_of_the_tensor(single: Path) -> None:
    block = open_weight_reader(single).read("a", (1, 2), (2, 3))
    assert torch.equal(block, TENSORS["a"][1:3, 2:5])
    assert block.is_contiguous()


@pytest.mark.parametrize(("name", "offset", "extent"), [("c", (), ()), ("a", (4, 0), (0, 6)), ("b", (1,), (0,))])
def test_scalars_and_empty_ranges_can_be_read(
    single: Path, name: str, offset: tuple[int, ...], extent: tuple[int, ...]
) -> None:
    assert open_weight_reader(single).read(name, offset, extent).shape == torch.Size(extent)


@pytest.mark.parametrize(("offset", "extent"), [((3, 0), (2, 6)), ((0,), (4,)), ((-1, 0), (1, 6))])
def test_a_range_beyond_the_tensor_is_refused(single: Path, offset: tuple[int, ...], extent: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"a has shape \[4, 6\]"):
        open_weight_reader(single).read("a", offset, extent)


def test_a_tensor_that_is_not_there_is_named(single: Path) -> None:
    with pytest.raises(DataError, match="holds no tensor 'z'"):
        open_weight_reader(single).read("z")


def tear(folder: Path) -> None:
    save_file(TENSORS, folder / SINGLE_FILE_NAME)
    (folder / SINGLE_FILE_NAME).write_bytes((folder / SINGLE_FILE_NAME).read_bytes()[:-5])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: (folder / "x.bin").touch(), r"expected model.safetensors or .*; found no \*.safetensors file"),
        (tear, rf"{SINGLE_FILE_NAME}: not a whole safetensors file"),
        (lambda folder: (split(folder) / "model-b.safetensors").unlink(), "model-b.safetensors: there is no such file"),
        (
            lambda folder: save_file({"z": TENSORS["b"]}, split(folder) / "model-b.safetensors"),
            "model-b.safetensors: holds no tensor 'b', though",
        ),
    ],
    ids=["no weights", "torn", "a file of the index is missing", "a tensor of the index is missing"],
)
def test_files_that_are_missing_or_damaged_are_named(
    tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    make(tmp_path)
    with pytest.raises(DataError, match=message):
        open_weight_reader(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "expected a JSON object, found list"),
        ("{}", "expected JSON with a mapping `weight_map`"),
        ("[" * 5000, "not valid JSON"),
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / INDEX_FILE_NAME).write_text(text)
    with pytest.raises(DataError, match=said):
        open_weight_reader(tmp_path)
