"""What all savers of one worker share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phalanx.run import Run
from phalanx.run.events import ReportEventFn
from phalanx.train.checkpoint.staging import SharedStaging
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.mesh import Mesh


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
