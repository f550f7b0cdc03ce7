"""The fake fleet with liquid: devices warm up by their draw and what coolant is left, jobs that save, and a
building that reports. `phalanx thermal rehearse` and the tests run the same guard on it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.fleet.power.fake_fleet import FakeClock, FakeNode
from phalanx.fleet.telemetry.sample import RackSample
from phalanx.fleet.thermal.flow_loss import HeatCapacity
from phalanx.fleet.thermal.response import NodeJob, Problems

COOLANT_C = 32.0
SLOW_C = 87.0
"""From which a device slows down."""
STEP_S = 0.1
USUAL_FLOW_L_PER_MIN = 180.0


@dataclass
class FakeSavingJob:
    """A job that saves `save_s` after it is asked to, once."""

    id: str
    nodes: tuple[str, ...]
    save_s: float
    asked_at: float | None = None
    saved_at: float | None = None


@dataclass
class FakeCooledFleet:
    """Nodes by name in racks.

    `heat_j_per_k` is of a device; `flow_share` by rack, what is left of its flow. Power is off `off_s` after it is
    asked for. Faults: a rack in `leaks` leaks, one in `silent` is not reported, an action in `failing` is refused.
    """

    nodes: Mapping[str, FakeNode]
    racks: Mapping[str, str]
    clock: FakeClock
    heat_j_per_k: float = 300.0
    rise_k: float = 28.0
    limit_c: float = 90.0
    off_s: float = 1.0
    jobs: list[FakeSavingJob] = field(default_factory=list)
    flow_share: dict[str, float] = field(default_factory=dict)
    leaks: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)
    temperatures_c: dict[str, float] = field(default_factory=dict)
    peaks_c: dict[str, float] = field(default_factory=dict)
    off_at: dict[str, float] = field(default_factory=dict)
    drained: dict[str, str] = field(default_factory=dict)
    isolated: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in self.nodes:
            self.temperatures_c[name] = self.peaks_c[name] = COOLANT_C + self.rise_k

    def run_until(self, time_s: float) -> None:
        """Let time pass."""
        for step in range(round(self.clock.now / STEP_S) + 1, round(time_s / STEP_S) + 1):
            self.clock.now = step * STEP_S
            for name, node in self.nodes.items():
                self._warm(name, node)
            for job in self.jobs:
                is_on = all(self.off_at.get(node, float("inf")) > self.clock.now for node in job.nodes)
                if job.asked_at is not None and job.saved_at is None and is_on:
                    job.saved_at = self.clock.now if self.clock.now - job.asked_at >= job.save_s else None

    def read_racks(self) -> list[RackSample]:
        """Return what the building reports."""
        return [
            RackSample(
                id=rack,
                flow_l_per_min=None if rack in self.silent else USUAL_FLOW_L_PER_MIN * self.flow_share.get(rack, 1.0),
                has_leak=None if rack in self.silent else rack in self.leaks,
                age_s=0.0,
            )
            for rack in dict.fromkeys(self.racks.values())
        ]

    def read_margins(self) -> dict[str, float | None]:
        """Return kelvins up to the temperature from which devices slow down."""
        return {name: max(0.0, SLOW_C - temperature_c) for name, temperature_c in self.temperatures_c.items()}

    def find_device(self, node: str) -> HeatCapacity:
        """Return the hottest device of a node."""
        device = max(self.nodes[node].devices, key=lambda each: each.draw_at(self.clock.now))
        draw_w = max(device.draw_at(self.clock.now), 1.0)
        return HeatCapacity(self.heat_j_per_k, draw_w, self.temperatures_c[node], self.limit_c, self.rise_k)

    def stop_scheduling(self, nodes: Sequence[str], reason: str) -> Problems:
        """Drain nodes."""
        return self._act("stop_scheduling", nodes, lambda node: self.drained.setdefault(node, reason))

    def request_isolation(self, place: str) -> Problems:
        """Ask for isolation; this building grants none."""
        return self._act("request_isolation", [place], self.isolated.append)

    def list_jobs(self, node: str) -> Sequence[NodeJob]:
        """Return the jobs of a node."""
        return [NodeJob(job.id, job.save_s) for job in self.jobs if node in job.nodes]

    def request_save(self, jobs: Sequence[str]) -> Problems:
        """Have jobs save."""
        return self._act("request_save", jobs, self._begin_save)

    def is_saved(self, job_id: str) -> bool:
        """Whether a job has saved."""
        return self._find_job(job_id).saved_at is not None

    def power_off(self, nodes: Sequence[str]) -> Problems:
        """Take the power away, which takes `off_s`."""
        return self._act("power_off", nodes, lambda node: self.off_at.setdefault(node, self.clock.now + self.off_s))

    def _begin_save(self, job_id: str) -> None:
        self._find_job(job_id).asked_at = self.clock.now

    def _act(self, action: str, targets: Sequence[str], act: Callable[[str], object]) -> Problems:
        if action in self.failing:
            return dict.fromkeys(targets, f"{action} is refused")
        for target in targets:
            act(target)
        return {}

    def _warm(self, name: str, node: FakeNode) -> None:
        now = self.clock.now
        if self.off_at.get(name, float("inf")) <= now:
            node.crash()
            return
        full_w = max(device.draw_at(now) for device in node.devices)
        share = self.flow_share.get(self.racks[name], 1.0)
        removed_w = share * full_w * (self.temperatures_c[name] - COOLANT_C) / self.rise_k
        self.temperatures_c[name] += (full_w - removed_w) * STEP_S / self.heat_j_per_k
        self.peaks_c[name] = max(self.peaks_c[name], self.temperatures_c[name])

    def _find_job(self, job_id: str) -> FakeSavingJob:
        return next(job for job in self.jobs if job.id == job_id)
