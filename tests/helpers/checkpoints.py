"""Small checkpoints for the tests: every dtype, every awkward shape, seeded."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from phalanx.run import Run
from phalanx.train.checkpoint.durable import DurableDirectory
from phalanx.train.checkpoint.format import list_checkpoints, parse_step
from phalanx.train.checkpoint.load import verify_checkpoint
from phalanx.train.checkpoint.save import CheckpointSaver
from phalanx.train.checkpoint.shard_file import TensorShard
from phalanx.train.distributed.module_state import TORCH_DTYPES


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bits, so also NaNs with payloads and negative zeros: a checkpoint keeps bits, not values."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def state(seed: int = 0, big: int = 300_000) -> dict[str, torch.Tensor]:
    """About 5 MB: several chunks, with pieces that begin and end within one."""
    tensors = {
        f"of.{name}": random_tensor(dtype, (3, 5, 7), seed + i) for i, (name, dtype) in enumerate(TORCH_DTYPES.items())
    }
    tensors |= {
        "scalar": random_tensor(torch.float32, (), seed + 100),
        "empty": torch.empty(0, 4),
        "blocks.0.weight": random_tensor(torch.float32, (big, 3), seed + 101),
        "blocks.1.weight": random_tensor(torch.bfloat16, (1000, 700), seed + 102),
        "transposed": random_tensor(torch.float16, (40, 30), seed + 103).T,
        "optimizer/blocks.0.weight/step": torch.tensor(float(seed)),
        "scaler/scale": torch.tensor(65536.0),
    }
    return tensors


def save(
    directory: Path, step: int, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any] | None = None
) -> Path:
    """A checkpoint written by one rank, the ordinary way."""
    return save_by_ranks(directory, step, [[TensorShard.full_tensor(*item) for item in tensors.items()]], meta)


def save_by_ranks(
    directory: Path, step: int, ranks: Sequence[Sequence[TensorShard]], meta: Mapping[str, Any] | None = None
) -> Path:
    """A checkpoint of which each rank writes its part."""
    savers = [CheckpointSaver(DurableDirectory(directory, rank, len(ranks))) for rank in range(len(ranks))]
    for saver, shards in zip(savers, ranks, strict=True):
        saver.start(step, shards, {"step": step, "samples_consumed": step * 16, **(meta or {})})
    for saver in savers:
        saver.wait_snapshot_copied()
        saver.poll_when_idle()
    committed = savers[0].commit()
    assert committed.path is not None, committed.reason
    return committed.path


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return a.contiguous().reshape(-1).view(torch.uint8).equal(b.contiguous().reshape(-1).view(torch.uint8))


def kept(run: Run) -> list[int]:
    """Steps of the checkpoints, each verified; nothing else lies beside them."""
    checkpoints = list_checkpoints(run.checkpoints)
    for checkpoint in checkpoints:
        verify_checkpoint(checkpoint)
    assert {path.name for path in run.checkpoints.iterdir()} - {"best.json"} == {path.name for path in checkpoints}
    return [parse_step(checkpoint) for checkpoint in checkpoints]
