"""Parts of a hot copy: whole or not there, and together a copy if they hold every tensor."""

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.train.checkpoint.format import CorruptCheckpointError
from phalanx.train.checkpoint.in_memory.format import (
    NUM_TENSORS_KEY,
    format_copy_name,
    list_copies,
    list_shard_records,
    merge_copy,
    parse_rank,
    read_shard,
)
from phalanx.train.checkpoint.in_memory.node_copies import NodeFolder
from phalanx.train.checkpoint.load import load_tensors
from phalanx.train.checkpoint.save import CheckpointSaver, SavePhase
from phalanx.train.checkpoint.shard_file import RankRecord, TensorShard, decode_record, encode_record
from store_saves import flip_byte

WHOLE = torch.arange(12.0).reshape(4, 3)
BIAS = torch.tensor([5.0])


def piece(rows: slice) -> TensorShard:
    block = WHOLE[rows].clone()
    return TensorShard("weight", block, (4, 3), (rows.start, 0))


def saver_of(*destination: Any) -> CheckpointSaver:
    return CheckpointSaver(NodeFolder(*destination))


def save(folder: Path, rank: int, pieces: list[TensorShard], step: int = 7, token: str = "a") -> RankRecord:
    saver = saver_of(folder, rank, token, lambda step: None)
    saver.start(step, pieces, {"step": step, "saved": 0})
    saver.wait_snapshot_copied()
    assert saver.poll_when_idle().phase is SavePhase.WRITTEN
    assert saver.commit().path == folder / format_copy_name(step, token)
    saver.cancel()
    return read_shard(folder / format_copy_name(step, token) / f"rank-{rank:05d}.json")


def test_a_part_that_is_kept_outlives_its_saver_and_is_read_with_its_progress(tmp_path: Path) -> None:
    part = save(tmp_path, 3, [piece(slice(0, 4))])
    assert (part.step, part.token, part.rank, part.meta) == (7, "a", 3, {"step": 7, "saved": 0})
    assert list_copies(tmp_path) == [(7, "a")]
    (record,) = list_shard_records(tmp_path / "step-000000007-a")
    assert parse_rank(record) == 3


def test_a_part_that_is_abandoned_is_gone(tmp_path: Path) -> None:
    saver = saver_of(tmp_path, 0, "a", lambda step: None)
    saver.start(7, [piece(slice(0, 4))], {})
    saver.cancel()
    assert list_copies(tmp_path) == []


def test_a_part_whose_second_copy_fails_has_failed(tmp_path: Path) -> None:
    def broken(part: RankRecord, image: Any, cancelled: Any) -> None:
        raise ConnectionResetError("the other end closed the connection")

    saver = saver_of(tmp_path, 0, "a", lambda step: None, broken)
    saver.start(7, [piece(slice(0, 4))], {})
    state = saver.poll_when_idle()
    assert state.phase is SavePhase.FAILED
    assert "the other end closed the connection" in state.reason
    assert list_copies(tmp_path) == []


def test_parts_make_a_copy_that_reads_like_a_checkpoint(tmp_path: Path) -> None:
    parts = [
        save(tmp_path, 0, [piece(slice(0, 1)), TensorShard.full_tensor("bias", BIAS)]),
        save(tmp_path, 1, [piece(slice(1, 4))]),
    ]
    manifest = merge_copy(parts)
    loaded = load_tensors(tmp_path / "step-000000007-a", manifest=manifest)
    assert loaded["weight"].equal(WHOLE)
    assert loaded["bias"].equal(BIAS)
    assert manifest.meta["step"] == 7


def test_a_block_that_several_nodes_hold_is_taken_once_and_from_here(tmp_path: Path) -> None:
    parts = [save(tmp_path, rank, [piece(slice(0, 4)), TensorShard.full_tensor("bias", BIAS)]) for rank in (0, 1)]
    assert set(merge_copy(parts).files) == {"rank-00000.safetensors"}
    manifest = merge_copy(parts, preferred_ranks=[1])
    assert set(manifest.files) == {"rank-00001.safetensors"}
    assert {each.file for tensor in manifest.tensors.values() for each in tensor.pieces} == set(manifest.files)


def test_parts_that_lack_a_block_are_no_copy(tmp_path: Path) -> None:
    part = save(tmp_path, 0, [piece(slice(0, 3))])
    with pytest.raises(ValueError, match="do not hold each element exactly once"):
        merge_copy([part])
    with pytest.raises(ValueError, match="there is no part"):
        merge_copy([])


@pytest.mark.parametrize("place", [0, 40, -1])
def test_a_flipped_bit_in_a_record_is_found(tmp_path: Path, place: int) -> None:
    content = bytearray(encode_record(save(tmp_path, 0, [piece(slice(0, 4))])))
    content[place] ^= 1
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000\.json: damaged"):
        decode_record(bytes(content), tmp_path / "rank-00000.json", RankRecord)


def test_a_flipped_bit_in_a_parts_file_is_found(tmp_path: Path) -> None:
    save(tmp_path, 0, [piece(slice(0, 4))])
    copy = tmp_path / "step-000000007-a"
    flip_byte(copy / "rank-00000.safetensors")
    with pytest.raises(CorruptCheckpointError, match="checksum differs"):
        read_shard(copy / "rank-00000.json")


def test_parts_that_lack_a_tensor_are_no_copy(tmp_path: Path) -> None:
    """A worker took along what only it had, and no other part tells of it."""
    part = save(tmp_path, 0, [piece(slice(0, 4))])
    of_two = part.model_copy(update={"meta": {**part.meta, NUM_TENSORS_KEY: 2}})
    with pytest.raises(ValueError, match="1 of 2 tensors are there"):
        merge_copy([of_two])
