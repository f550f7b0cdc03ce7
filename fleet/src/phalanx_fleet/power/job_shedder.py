"""Pause jobs that a load target leaves no power for, and resume them one after the other. The choice of jobs is pure;
jobs are reached through `JobControl`.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from phalanx.errors import PhalanxError
from phalanx_fleet.power.allocation import NodeLimit, PoweredJob, allocate_caps
from phalanx_fleet.power.load_targets import LoadTarget
from phalanx_fleet.power_settings import PowerSettings
from phalanx_fleet.power_tree import NO_PARENT, NodePower, PowerTree

RESUME_AFTER_S = 10.0
"""Seconds for which there has to be power for a paused job: a target that is replaced by another one pauses once."""
ASK_AGAIN_S = 300.0
"""Seconds after which a job that still runs is asked again: it may have been started just when it was asked."""
POLL_INTERVAL_S = 2.0
"""Seconds between two questions about a job."""


class PausableState(StrEnum):
    """A job as a backend sees it."""

    RUNNING = "running"
    WAITING = "waiting"
    PAUSED = "paused"
    HELD = "held"  # for a reason of someone else
    ENDED = "ended"


class JobControl(Protocol):
    """Reaches the jobs of backends. `handle`: such as local:7. Errors are of PhalanxError."""

    def read_state(self, handle: str) -> PausableState:
        """Return the state of a job."""

    def pause(self, handle: str) -> None:
        """Ask a job to save and stop."""

    def resume(self, handle: str) -> None:
        """Let a job start that `pause` has paused."""


@dataclass
class _Shed:
    """A job that is paused, or about to be. `fits_since`: since when there is power for it."""

    asked_at: float = float("-inf")
    is_paused: bool = False
    fits_since: float | None = None
    resume_at: float | None = None


@dataclass(frozen=True)
class ShedInput:
    """A step of the guard."""

    limits: Sequence[NodeLimit]
    budgets_w: Sequence[float | None]
    targets: dict[str, LoadTarget]
    now: float
    """Seconds of a monotonic clock."""


@dataclass
class JobShedder:
    """Pauses and resumes jobs. `handles`: of the jobs that can be paused, by name. One thread may call `update`, in
    which a backend may take long to answer, while another one lists jobs."""

    tree: PowerTree
    settings: PowerSettings
    jobs: Sequence[PoweredJob]
    handles: Mapping[str, str]
    control: JobControl
    tell: Callable[[str], None]
    """Takes a notice."""
    _shed: dict[str, _Shed] = field(default_factory=dict)
    _free_at: dict[str, float] = field(default_factory=dict)
    """When the next job of a site may start."""
    _key: object = None
    _wanted: frozenset[str] = frozenset()
    _ended: set[str] = field(default_factory=set)
    _next_poll: float = float("-inf")
    _now: float = 0.0

    def adopt_paused_jobs(self) -> None:
        """Take over the jobs that a guard before this one has paused, and jobs that wait behind a lost feed."""
        for name, handle in self.handles.items():
            if self._read_state(name, handle) is PausableState.PAUSED:
                self._shed[name] = _Shed(is_paused=True)
                self.tell(f"{name} ({handle}) is paused by a guard before this one")

    def list_running(self) -> list[PoweredJob]:
        """Return the jobs that need power: all but the paused ones. One that is still saving does."""
        return [job for job in self.jobs if not self._is_paused(job)]

    def _is_paused(self, job: PoweredJob) -> bool:
        shed = self._shed.get(job.name)
        return shed is not None and shed.is_paused

    def update(self, found: ShedInput) -> None:
        """Pause and resume what a step needs. A job that is resumed counts as running before it is started."""
        self._now = found.now
        self._choose(found)
        is_due = found.now >= self._next_poll
        if is_due:
            self._next_poll = found.now + POLL_INTERVAL_S
        silent = {index for index, limit in enumerate(found.limits) if limit is None}
        for job in self.jobs:
            handle = self.handles.get(job.name)
            if handle is None:
                continue
            shed = self._shed.get(job.name)
            if shed is None and job.name in self._wanted:
                self._pause(job.name, handle, "the load target leaves no power for it")
            elif shed is None and is_due and silent & set(job.devices):
                self._hold_lost_job(job.name, handle)
            elif shed is not None and not shed.is_paused and is_due:
                self._follow_pause(job.name, handle, shed)
            elif shed is not None and shed.is_paused and is_due and self._is_resumed(handle):
                del self._shed[job.name]
                self.tell(f"{job.name} ({handle}) was resumed by someone else")
            elif shed is not None and shed.is_paused:
                needs_power = job.name in self._wanted or bool(silent & set(job.devices))
                self._consider_resume(job, handle, shed, needs_power, found.now)

    def _choose(self, found: ShedInput) -> None:
        """Choose again when budgets or nodes have changed."""
        targets = tuple(sorted(found.targets.items(), key=lambda each: each[0]))
        key = tuple(found.limits), tuple(found.budgets_w), targets, frozenset(self._ended)
        if key != self._key:
            self._key = key
            self._wanted = choose_paused_jobs(
                self.tree,
                found.limits,
                self.jobs,
                found.budgets_w,
                self.settings,
                found.targets,
                self.handles.keys() - self._ended,
            )

    def _hold_lost_job(self, name: str, handle: str) -> None:
        """Hold a job that waits for nodes that are lost: after a feed has come back, jobs start one after the other."""
        if self._read_state(name, handle) is PausableState.WAITING:
            self._pause(name, handle, "its nodes do not answer, and it waits for them")

    def _pause(self, name: str, handle: str, reason: str) -> None:
        if self._read_state(name, handle) is PausableState.ENDED:
            self._ended.add(name)
            self.tell(f"{name} ({handle}) has ended; remove it from the jobs file")
            return
        try:
            self.control.pause(handle)
        except PhalanxError as error:
            self.tell(f"{name} ({handle}): cannot be paused: {error}")
            return
        self._shed[name] = _Shed(asked_at=self._now)
        self.tell(f"pausing {name} ({handle}): {reason}")

    def _follow_pause(self, name: str, handle: str, shed: _Shed) -> None:
        state = self._read_state(name, handle)
        if state in (PausableState.PAUSED, PausableState.HELD, PausableState.ENDED):
            shed.is_paused = True
            self.tell(f"{name} ({handle}) is {state}")
        elif self._now - shed.asked_at > ASK_AGAIN_S:
            self.tell(f"{name} ({handle}) still runs; it is asked again")
            del self._shed[name]

    def _consider_resume(self, job: PoweredJob, handle: str, shed: _Shed, needs_power: bool, now: float) -> None:
        if needs_power:
            shed.fits_since, shed.resume_at = None, None
            return
        shed.fits_since = now if shed.fits_since is None else shed.fits_since
        if now - shed.fits_since < RESUME_AFTER_S:
            return
        if shed.resume_at is None:
            site = self.tree.find_site(next(iter(job.devices)))
            nodes = job.devices.items()
            step_w = sum(_estimate_start_step(self.tree.nodes[node].power, len(devices)) for node, devices in nodes)
            shed.resume_at = max(now, self._free_at.get(site.name, now))
            rise_s = step_w / site.max_ramp_w_per_s if site.max_ramp_w_per_s is not None else 0.0
            self._free_at[site.name] = shed.resume_at + rise_s
        if now >= shed.resume_at:
            try:
                self.control.resume(handle)
            except PhalanxError as error:
                self.tell(f"{job.name} ({handle}): cannot be resumed: {error}")
                shed.resume_at = now + RESUME_AFTER_S
                return
            del self._shed[job.name]
            self.tell(f"resuming {job.name} ({handle})")

    def _is_resumed(self, handle: str) -> bool:
        """Whether a paused job may draw power again. What is not known now says nothing."""
        try:
            state = self.control.read_state(handle)
        except PhalanxError:
            return False
        return state in (PausableState.RUNNING, PausableState.WAITING)

    def _read_state(self, name: str, handle: str) -> PausableState:
        try:
            return self.control.read_state(handle)
        except PhalanxError as error:
            self.tell(f"{name} ({handle}): {error}")
            return PausableState.RUNNING  # the worst case


def _estimate_start_step(power: NodePower, num_devices: int) -> float:
    """Return the watts by which the start of a job on `num_devices` of a node raises its power at most."""
    return power.rest_max_w - power.rest_idle_w + num_devices * (power.device_max_w - power.device_idle_w)


def choose_paused_jobs(
    tree: PowerTree,
    limits: Sequence[NodeLimit],
    jobs: Sequence[PoweredJob],
    budgets_w: Sequence[float | None],
    settings: PowerSettings,
    targets: dict[str, LoadTarget],
    pausable: Set[str],
) -> frozenset[str]:
    """Return the names of the jobs to pause: those of the lowest priority, and no more than needed.

    Args:
        tree: The levels and nodes.
        limits: For each node its devices' limits.
        jobs: All jobs, the paused ones, too.
        budgets_w: For each level now.
        settings: Margin and the lowest cap of jobs that were not swept: below it a job is paused rather than slowed.
        targets: The active one of each level. Levels without one, or with the strategy `caps`, pause nothing.
        pausable: Names of the jobs that can be paused.
    """
    pausing = {level: target for level, target in targets.items() if target.strategy != "caps"}
    if not pausing:
        return frozenset()
    is_first = any(target.strategy == "pause-first" for target in pausing.values())

    def find_tight(running: Sequence[PoweredJob]) -> frozenset[int]:
        share = 1.0 if is_first else settings.min_cap_share
        counted = [replace(job, curves={}) for job in running] if is_first else running
        return allocate_caps(tree, limits, counted, budgets_w, settings.margin, share).tight_levels

    levels = {index for index, level in enumerate(tree.levels) if level.label in pausing}
    choice = [job for job in jobs if job.name in pausable and _is_below(tree, job, levels)]
    helped = levels - find_tight([job for job in jobs if job not in choice])
    """Levels that hold with all of these paused: another one, as with a silent node, must not keep them from it."""
    choice = [job for job in choice if _is_below(tree, job, helped)]
    fits = lambda running: helped.isdisjoint(find_tight(running))  # noqa: E731
    return _pause_until(fits, jobs, sorted(choice, key=lambda job: (job.priority, job.num_devices, job.name)))


def _pause_until(
    fits: Callable[[Sequence[PoweredJob]], bool], jobs: Sequence[PoweredJob], choice: Sequence[PoweredJob]
) -> frozenset[str]:
    """Pause one after the other until it fits, then take those back that were not needed, the last ones first. None
    where all together are not enough: what does not help is not paused."""
    paused: list[str] = []

    def running_without(names: Sequence[str]) -> list[PoweredJob]:
        return [job for job in jobs if job.name not in names]

    for job in choice:
        if fits(running_without(paused)):
            break
        paused.append(job.name)
    if not paused or not fits(running_without(paused)):
        return frozenset()
    for name in [job.name for job in reversed(choice) if job.name in paused]:
        rest = [each for each in paused if each != name]
        if fits(running_without(rest)):
            paused = rest
    return frozenset(paused)


def _is_below(tree: PowerTree, job: PoweredJob, levels: Set[int]) -> bool:
    for node in job.devices:
        level = tree.nodes[node].rack
        while level != NO_PARENT:
            if level in levels:
                return True
            level = tree.levels[level].parent
    return False
