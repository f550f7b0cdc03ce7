"""What a worker's saves to all destinations share."""

import os
from collections.abc import Callable, Mapping
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
        check_membership: called while a save is waited for; raises if a worker of the world is gone.
        environment: names the folder of in-memory checkpoints, the node, and the network for replicas.
        staging: host memory that the snapshots of all saves are copied to.
    """

    run: Run
    dist_env: DistEnv
    mesh: Mesh
    common_meta: dict[str, Any]
    report_event: ReportEventFn
    flush: Callable[[], None] = lambda: None
    check_membership: Callable[[], None] = lambda: None
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    staging: SharedStaging = field(default_factory=SharedStaging)
