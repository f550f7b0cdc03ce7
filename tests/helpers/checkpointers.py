"""A checkpointer of tensors that a test holds, at the steps that it names, without a trainer."""

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from phalanx.recipe.schema import CheckpointConfig
from phalanx.train.checkpoint.checkpointer import Checkpointer, LiveState
from phalanx.train.checkpoint.save import SaveContext
from phalanx.train.distributed.parallel_model import LocalTensor
from phalanx.train.distributed.shard_spec import GlobalBlocks
from phalanx.train.step_metrics import StepFlags
from phalanx.train.train_state import AppState, TrainState


class HeldState(LiveState):
    """Tensors that every replica holds alike."""

    def __init__(self) -> None:
        self.held: Mapping[str, Tensor] = {}
        self.copy_now: Sequence[str] = ()

    def tensors(self) -> dict[str, LocalTensor]:
        return {
            name: LocalTensor(tensor, GlobalBlocks.full_tensor(tensor.shape), ("replicate",))
            for name, tensor in self.held.items()
        }

    def names_to_copy_now(self) -> list[str]:
        return list(self.copy_now)

    def was_restored(self) -> None:
        pass


class StepSaver(Checkpointer):
    """A checkpointer that saves what it is given when it is asked to."""

    def __init__(self, save_context: SaveContext, live_state: AppState | None = None, **config: Any):
        self.held, self.train_state = HeldState(), TrainState()
        super().__init__(
            save_context,
            CheckpointConfig(**{"every": None, "in_memory_every": None, **config}),
            1_000_000,
            self.held if live_state is None else LiveState(live_state),
            self.train_state,
        )

    def own_flags(self) -> StepFlags:
        flags = StepFlags()
        self.raise_flags(flags)
        return flags

    def start(
        self,
        step: int,
        held: Mapping[str, Tensor] | None = None,
        copy_now: Sequence[str] = (),
        best: float | None = None,
    ) -> None:
        """Start a save to disk."""
        self.held.held, self.held.copy_now = held or {}, copy_now
        self.train_state.step, self.train_state.samples_consumed, self.train_state.best_loss = step, 16 * step, best
        self.start_save(is_best=best is not None)

    def copy(self, step: int) -> None:
        """Start an in-memory checkpoint."""
        self.train_state.step = self.train_state.samples_consumed = step
        self.start_copy()


def no_room(path: Path, *_: Any) -> NoReturn:
    """A write to a disk that is full."""
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def leave_like_a_killed_worker(checkpointer: Checkpointer) -> None:
    """End its threads and connections, and save or remove nothing any more."""
    checkpointer.wait_snapshot_copied()
    if checkpointer._copies is not None:
        checkpointer._copies.leave()
    checkpointer._retention.close()
