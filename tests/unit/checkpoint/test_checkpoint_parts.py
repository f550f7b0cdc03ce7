"""Parts of a hot copy: whole or not there, and together a copy if they hold every tensor."""

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.train.checkpoint import CorruptError, Piece, load_tensors
from phalanx.train.checkpoint.parts import (
    TENSORS,
    Part,
    PartSaver,
    copy_name,
    decode_part,
    encode_part,
    list_copies,
    list_parts,
    merge_parts,
    rank_of,
    read_part,
)
from phalanx.train.checkpoint.save import Phase

WHOLE = torch.arange(12.0).reshape(4, 3)
BIAS = torch.tensor([5.0])


def piece(rows: slice) -> Piece:
    block = WHOLE[rows].clone()
    return Piece("weight", block, (4, 3), (rows.start, 0))


def save(folder: Path, rank: int, pieces: list[Piece], step: int = 7, token: str = "a") -> Part:
    saver = PartSaver(folder, rank, token, lambda step: None)
    saver.start(step, pieces, {"step": step, "saved": 0})
    saver.wait_copied()
    assert saver.wait().phase is Phase.WRITTEN
    saver.keep()
    saver.abandon()
    return read_part(folder / copy_name(step, token) / f"rank-{rank:05d}.json")


def test_a_part_that_is_kept_outlives_its_saver_and_is_read_with_its_progress(tmp_path: Path) -> None:
    part = save(tmp_path, 3, [piece(slice(0, 4))])
    assert (part.step, part.token, part.rank, part.meta) == (7, "a", 3, {"step": 7, "saved": 0})
    assert list_copies(tmp_path) == [(7, "a")]
    (record,) = list_parts(tmp_path / "step-000000007-a")
    assert rank_of(record) == 3


def test_a_part_that_is_abandoned_is_gone(tmp_path: Path) -> None:
    saver = PartSaver(tmp_path, 0, "a", lambda step: None)
    saver.start(7, [piece(slice(0, 4))], {})
    saver.abandon()
    assert list_copies(tmp_path) == []


def test_a_part_whose_second_copy_fails_has_failed(tmp_path: Path) -> None:
    def broken(part: Part, image: Any) -> None:
        raise ConnectionResetError("the other end closed the connection")

    saver = PartSaver(tmp_path, 0, "a", lambda step: None, broken)
    saver.start(7, [piece(slice(0, 4))], {})
    state = saver.wait()
    assert state.phase is Phase.FAILED
    assert "the other end closed the connection" in state.reason
    assert list_copies(tmp_path) == []


def test_parts_make_a_copy_that_reads_like_a_checkpoint(tmp_path: Path) -> None:
    parts = [
        save(tmp_path, 0, [piece(slice(0, 1)), Piece.whole("bias", BIAS)]),
        save(tmp_path, 1, [piece(slice(1, 4))]),
    ]
    manifest = merge_parts(parts)
    loaded = load_tensors(tmp_path / "step-000000007-a", manifest=manifest)
    assert loaded["weight"].equal(WHOLE)
    assert loaded["bias"].equal(BIAS)
    assert manifest.meta["step"] == 7


def test_a_block_that_several_nodes_hold_is_taken_once_and_from_here(tmp_path: Path) -> None:
    parts = [save(tmp_path, rank, [piece(slice(0, 4)), Piece.whole("bias", BIAS)]) for rank in (0, 1)]
    assert set(merge_parts(parts).files) == {"rank-00000.safetensors"}
    manifest = merge_parts(parts, here=[1])
    assert set(manifest.files) == {"rank-00001.safetensors"}
    assert {each.file for tensor in manifest.tensors.values() for each in tensor.pieces} == set(manifest.files)


def test_parts_that_lack_a_block_are_no_copy(tmp_path: Path) -> None:
    part = save(tmp_path, 0, [piece(slice(0, 3))])
    with pytest.raises(ValueError, match="do not hold each element exactly once"):
        merge_parts([part])
    with pytest.raises(ValueError, match="there is no part"):
        merge_parts([])


@pytest.mark.parametrize("place", [0, 40, -1])
def test_a_flipped_bit_in_a_record_is_found(tmp_path: Path, place: int) -> None:
    content = bytearray(encode_part(save(tmp_path, 0, [piece(slice(0, 4))])))
    content[place] ^= 1
    with pytest.raises(CorruptError, match=r"rank-00000\.json: damaged"):
        decode_part(bytes(content), tmp_path / "rank-00000.json")


def test_a_flipped_bit_in_a_parts_file_is_found(tmp_path: Path) -> None:
    save(tmp_path, 0, [piece(slice(0, 4))])
    copy = tmp_path / "step-000000007-a"
    content = bytearray((copy / "rank-00000.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "rank-00000.safetensors").write_bytes(content)
    with pytest.raises(CorruptError, match="checksum differs"):
        read_part(copy / "rank-00000.json")


def test_two_histories_never_share_a_copy(tmp_path: Path) -> None:
    save(tmp_path, 0, [piece(slice(0, 4))], token="a")
    save(tmp_path, 0, [piece(slice(0, 4))], token="b")
    assert list_copies(tmp_path) == [(7, "b"), (7, "a")]


def test_parts_that_lack_a_tensor_are_no_copy(tmp_path: Path) -> None:
    """A worker took along what only it had, and no other part tells of it."""
    part = save(tmp_path, 0, [piece(slice(0, 4))])
    of_two = part.model_copy(update={"meta": {**part.meta, TENSORS: 2}})
    with pytest.raises(ValueError, match="1 of 2 tensors are there"):
        merge_parts([of_two])
