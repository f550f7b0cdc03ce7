"""Saves to a directory that is used as a store, and what they leave in it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from phalanx.train.checkpoint.checkpoint_store import CheckpointStore, StoreDestination
from phalanx.train.checkpoint.save import CheckpointSaver, SaveStatus
from phalanx.train.checkpoint.shard_file import TensorShard

SMALL_BLOCK_BYTES = 64 << 10


def open_checkpoints(directory: Path, block_bytes: int = SMALL_BLOCK_BYTES) -> CheckpointStore:
    return CheckpointStore(f"file://{directory}", block_bytes)


def make_saver(checkpoints: CheckpointStore, keep: int = 3, attempt: int = 0) -> CheckpointSaver:
    return CheckpointSaver(StoreDestination(checkpoints, 0, 1, attempt, keep))


def save_to_store(saver: CheckpointSaver, step: int, tensors: Mapping[str, Tensor], **meta: Any) -> SaveStatus:
    """A save of one rank; its last status."""
    shards = [TensorShard.full_tensor(*item) for item in tensors.items()]
    saver.start(step, shards, {"step": step, "samples_consumed": step * 16, **meta})
    saver.wait_snapshot_copied()
    status = saver.poll_when_idle()
    if status.phase != "written":
        saver.cancel()
        return status
    status = saver.commit()
    saver.complete() if status.phase == "committed" else saver.cancel()
    return status


def whole_steps(directory: Path) -> list[int]:
    return list(open_checkpoints(directory).whole_steps())


def block_names(directory: Path) -> set[str]:
    return {path.name for path in (directory / "blocks").iterdir()}


def named_blocks(checkpoints: CheckpointStore, *steps: int) -> set[str]:
    return {block.name for step in steps for block in checkpoints.read(step).blocks}


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
