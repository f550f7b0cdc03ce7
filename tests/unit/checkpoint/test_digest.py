"""The digest tells whether two runs are the same run: nothing else changes it, and anything of the state does."""

import struct
from pathlib import Path

import pytest
import torch
import xxhash

from checkpoints import random_tensor, save, save_by_ranks, state
from phalanx.train.checkpoint.digest import compute_digest, digest_checkpoint
from phalanx.train.checkpoint.format import CorruptCheckpointError
from phalanx.train.checkpoint.shard_file import TensorShard
from store_saves import flip_byte


def base() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(6.0).reshape(2, 3), "optimizer/a/step": torch.tensor(3.0), "scaler/scale": torch.ones(1)}


def test_the_digest_is_the_documented_bytes() -> None:
    content = b""
    for name, shape, values in [("a", (2, 3), range(6)), ("optimizer/a/step", (), [3])]:
        content += struct.pack("<I", len(name)) + name.encode() + b"\x03F32"
        content += struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", n) for n in shape)
        content += b"".join(struct.pack("<f", value) for value in values)
    content += struct.pack("<IQ", 0, 48)
    tensors = base()
    del tensors["scaler/scale"]
    assert compute_digest(tensors.items(), 48) == xxhash.xxh3_128_hexdigest(content)


def test_order_strides_and_laziness_of_the_records_do_not_matter() -> None:
    tensors = state(big=1000)
    value = compute_digest(tensors.items(), 7)
    assert compute_digest(iter(reversed(tensors.items())), 7) == value
    strided = {name: tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor for name, tensor in tensors.items()}
    assert not strided["blocks.1.weight"].is_contiguous()
    assert compute_digest(strided.items(), 7) == value


def changed(what: str) -> tuple[dict[str, torch.Tensor], int]:
    tensors, samples = base(), 48
    if what == "samples":
        samples += 1
    elif what == "one bit":
        tensors["a"].view(torch.int32)[1, 2] ^= 1
    elif what == "optimizer":
        tensors["optimizer/a/step"] += 1
    elif what == "name":
        tensors["b"] = tensors.pop("a")
    elif what == "shape":
        tensors["a"] = tensors["a"].reshape(3, 2)
    elif what == "dtype":
        tensors["a"] = tensors["a"].view(torch.int32)
    elif what == "missing":
        del tensors["scaler/scale"]
    elif what == "empty tensor more":
        tensors["c"] = torch.empty(0)
    return tensors, samples


@pytest.mark.parametrize(
    "what", ["samples", "one bit", "optimizer", "name", "shape", "dtype", "missing", "empty tensor more"]
)
def test_any_change_of_the_state_changes_the_digest(what: str) -> None:
    tensors, samples = changed(what)
    assert compute_digest(tensors.items(), samples) != compute_digest(base().items(), 48)


def test_the_digest_from_disk_is_that_of_the_tensors(tmp_path: Path) -> None:
    tensors = state()
    path = save(tmp_path, 60, tensors)
    value = compute_digest(tensors.items(), 960)
    assert digest_checkpoint(path) == value
    assert digest_checkpoint(path, max_bytes=1000) == value


def test_the_digest_does_not_depend_on_how_ranks_and_files_hold_the_tensors(tmp_path: Path) -> None:
    w, b = random_tensor(torch.bfloat16, (90, 50), 1), random_tensor(torch.float32, (7,), 2)
    ranks = [
        [TensorShard("w", w[:, :20], (90, 50), (0, 0)), TensorShard.full_tensor("b", b)],
        [TensorShard("w", w[:33, 20:], (90, 50), (0, 20)), TensorShard("w", w[33:, 20:], (90, 50), (33, 20))],
    ]
    path = save_by_ranks(tmp_path, 1, ranks)
    assert digest_checkpoint(path) == compute_digest({"w": w, "b": b}.items(), 16)


def test_damage_is_found_while_digesting(tmp_path: Path) -> None:
    path = save(tmp_path, 60, state())
    flip_byte(path / "rank-00000.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000\.safetensors: damaged"):
        digest_checkpoint(path)
