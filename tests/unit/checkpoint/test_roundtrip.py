"""What is saved comes back, bit for bit, under any layout."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from checkpoints import random_tensor, same_bits, save, save_by_ranks, state
from phalanx.errors import DataError, UsageError
from phalanx.train.checkpoint.durable import DurableDirectory
from phalanx.train.checkpoint.format import read_manifest
from phalanx.train.checkpoint.load import load_blocks, load_tensors, verify_checkpoint
from phalanx.train.checkpoint.save import CheckpointSaver
from phalanx.train.checkpoint.shard_file import TensorShard


def test_every_dtype_scalar_empty_and_strided_tensor_comes_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = state()
    loaded = load_tensors(save(tmp_path, 60, tensors))
    assert loaded.keys() == tensors.keys()
    assert [name for name in tensors if not same_bits(tensors[name], loaded[name])] == []


def test_a_rank_file_is_readable_by_the_safetensors_library(tmp_path: Path) -> None:
    tensors = state()
    path = save(tmp_path, 60, tensors)
    assert sorted(file.name for file in path.iterdir()) == ["MANIFEST.json", "MANIFEST.xxh3", "rank-00000.safetensors"]
    with safe_open(path / "rank-00000.safetensors", "pt") as file:
        assert set(file.keys()) == set(tensors)
        assert all(same_bits(file.get_tensor(name), tensors[name]) for name in tensors)


def test_the_manifest_keeps_meta_and_logical_shapes(tmp_path: Path) -> None:
    manifest = read_manifest(save(tmp_path, 60, state(), {"fingerprint": "f00d", "recipe": {"a": [1, None]}}))
    assert manifest.meta == {"step": 60, "samples_consumed": 960, "fingerprint": "f00d", "recipe": {"a": [1, None]}}
    assert manifest.tensors["transposed"].shape == (30, 40)


def test_loading_into_given_tensors_overwrites_them_in_place_even_strided_ones(tmp_path: Path) -> None:
    tensors = state()
    path = save(tmp_path, 60, tensors)
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    strided = torch.zeros(3, 300_000).T
    into["blocks.0.weight"] = strided
    load_blocks(path, [(name, (0,) * tensor.dim(), tensor) for name, tensor in into.items()], read_manifest(path))
    assert same_bits(strided, tensors["blocks.0.weight"])
    assert all(same_bits(into[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (("unknown", (0,), torch.zeros(1)), "holds no tensor 'unknown'"),
        (("scalar", (), torch.zeros(2)), r"tensor 'scalar' has shape \[\], \[2\] from \[\] asked"),
        (("scalar", (), torch.zeros((), dtype=torch.float16)), r"tensor 'scalar' is F32 there, F16 here"),
        (("transposed", (29, 0), torch.zeros(2, 40)), r"'transposed' has shape \[30, 40\], \[2, 40\] from \[29, 0\]"),
    ],
)
def test_a_tensor_that_does_not_fit_is_an_error_that_names_it(
    tmp_path: Path, block: tuple[str, tuple[int, ...], torch.Tensor], message: str
) -> None:
    path = save(tmp_path, 60, state(big=10))
    with pytest.raises(DataError, match=message):
        load_blocks(path, [block], read_manifest(path))


def test_a_dtype_that_safetensors_does_not_know_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    shards = [TensorShard.full_tensor("w", torch.zeros(2, dtype=torch.complex128))]
    with pytest.raises(UsageError, match=r"tensor w: a checkpoint cannot hold torch\.complex128"):
        CheckpointSaver(DurableDirectory(tmp_path, 0, 1)).start(1, shards, {})


def _cut(name: str, tensor: torch.Tensor, dim: int, parts: int) -> list[TensorShard]:
    pieces, at = [], 0
    for part in tensor.tensor_split(parts, dim):
        offset = [0] * tensor.dim()
        offset[dim], at = at, at + part.shape[dim]
        pieces.append(TensorShard(name, part, tuple(tensor.shape), tuple(offset)))
    return pieces


def test_pieces_of_several_ranks_cut_along_any_dimension_make_one_tensor(tmp_path: Path) -> None:
    rows, columns = random_tensor(torch.bfloat16, (101, 67), 1), random_tensor(torch.float32, (53, 90, 3), 2)
    both = random_tensor(torch.float32, (64, 64), 3)
    ranks: list[list[TensorShard]] = [
        [a, b] for a, b in zip(_cut("rows", rows, 0, 3), _cut("columns", columns, 1, 3), strict=True)
    ]
    for i, top in enumerate(_cut("both", both, 0, 2)):  # two dimensions at once; rank 0 holds two blocks
        for j, block in enumerate(_cut("both", top.tensor, 1, 2)):
            ranks[(i + j) % 3].append(TensorShard("both", block.tensor, (64, 64), (top.offset[0], block.offset[1])))
    path = save_by_ranks(tmp_path, 60, ranks)
    loaded = load_tensors(path)
    assert same_bits(loaded["rows"], rows)
    assert same_bits(loaded["columns"], columns)
    assert same_bits(loaded["both"], both)
    assert len(verify_checkpoint(path).files) == 3


@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize("want", [0, 1])
def test_any_block_can_be_read_whatever_way_the_tensor_was_cut(tmp_path: Path, cut: int, want: int) -> None:
    whole = random_tensor(torch.float32, (700, 1500), 4)
    path = save_by_ranks(tmp_path, 60, [[piece] for piece in _cut("w", whole, cut, 3)])
    for part in _cut("w", whole, want, 4):
        block = torch.empty_like(part.tensor)
        load_blocks(path, [("w", part.offset, block)], read_manifest(path))
        assert same_bits(block, part.tensor)


def test_an_inner_block_of_three_dimensions_can_be_read(tmp_path: Path) -> None:
    whole = random_tensor(torch.int16, (20, 30, 40), 5)
    path = save_by_ranks(tmp_path, 60, [[piece] for piece in _cut("w", whole, 1, 4)])
    block = torch.empty(11, 13, 17, dtype=torch.int16)
    load_blocks(path, [("w", (3, 5, 7), block)], read_manifest(path))
    assert same_bits(block, whole[3:14, 5:18, 7:24])
