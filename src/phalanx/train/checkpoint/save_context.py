"""What all savers of one worker share."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.run import Run
from phalanx.run.events import ReportEventFn
from phalanx.train.checkpoint.staging import SharedStaging, TensorShard
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.mesh import Mesh
from phalanx.train.distributed.parallel_model import LocalTensor


@dataclass(frozen=True)
class SaveContext:
    """Where one worker saves its part of the state, and how it reports.

    Args:
        common_meta: entries of the meta that are equal in all checkpoints of a run.
        report_event: receives events on every worker; RunWarning on rank 0 only.
        flush: sends the events reported so far. A run that dies resumes from the last commit, so the events of the
            steps before the commit must have been sent.
        staging: host memory that the snapshots of all savers are copied to.
    """

    run: Run
    dist_env: DistEnv
    mesh: Mesh
    common_meta: dict[str, Any]
    report_event: ReportEventFn
    flush: Callable[[], None] = lambda: None
    staging: SharedStaging = field(default_factory=SharedStaging)


def measure_sizes(state: Mapping[str, LocalTensor]) -> dict[str, int]:
    """Return the bytes of each tensor that this worker holds."""
    return {name: each.tensor.numel() * each.tensor.element_size() for name, each in state.items()}


def make_shards(state: Mapping[str, LocalTensor], names: Iterable[str]) -> list[TensorShard]:
    """Return the blocks of the named tensors that this worker holds, in the order of the names."""
    return [
        TensorShard(
            name, block.slice_local(state[name].tensor), state[name].global_blocks.global_shape, block.global_offset
        )
        for name in sorted(names)
        for block in state[name].global_blocks.blocks
    ]
