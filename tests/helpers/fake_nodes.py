"""A backend of nodes in memory, and what an agent writes of a node."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.jobs.backends.base import BackendNode, NodeService
from phalanx.jobs.spec import JobStatus
from phalanx.run import Run
from phalanx.run.telemetry_minutes import NodeMinute, Rollups, ValueRollup


class FakeNodeBackend:
    """Nodes n1, n2, ..., all idle. `may_drain`: whether the user may; `jobs`: what `list_jobs` returns."""

    name = "slurm"

    def __init__(self, count: int = 3) -> None:
        self.nodes = {
            f"n{number}": BackendNode(f"n{number}", "idle", NodeService.OPEN) for number in range(1, count + 1)
        }
        self.jobs: list[JobStatus] = []
        self.may_drain = True

    def list_nodes(self) -> list[BackendNode]:
        return list(self.nodes.values())

    def list_jobs(self, array: str | None = None) -> Sequence[JobStatus]:
        return self.jobs

    def drain_node(self, node: str, reason: str, actor: str) -> None:
        if not self.may_drain:
            raise UsageError(f"{node}: Slurm refuses it to your user")
        self.nodes[node] = replace(self.nodes[node], service=NodeService.DRAINED, reason=reason, state="drained")

    def undrain_node(self, node: str) -> None:
        if not self.may_drain:
            raise UsageError(f"{node}: Slurm refuses it to your user")
        self.nodes[node] = replace(self.nodes[node], service=NodeService.OPEN, reason=None, state="idle")


def add_minute(folder: Path, node: str, time: float, watts: float, xids: tuple[int, ...] = ()) -> None:
    """A minute of a node in a run."""
    run = Run(folder)
    if not run.path.exists():
        run.create()
        run.resolved.touch()
        run.telemetry.mkdir()
    host = Rollups({"cpu_power_w": ValueRollup(watts, watts, watts, 60)})
    devices = {"GPU-a": Rollups(xids=xids)} if xids else {}
    with open(run.telemetry / f"{node}.jsonl", "ab") as file:
        file.write(NodeMinute(time, 60.0, 60, node, host, devices).to_line())
