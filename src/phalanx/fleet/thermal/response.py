"""Carry out what `plan_response` says after a fault: report, stop scheduling, ask for isolation, save if seconds allow,
power off. The clock and all that acts are passed in.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from phalanx.fleet.thermal.cooling_faults import ObservedFault
from phalanx.fleet.thermal.flow_loss import (
    CoolingAction,
    CoolingEvent,
    CoolingFault,
    HeatCapacity,
    find_response_window,
    plan_response,
)

MAX_UNKNOWN_SAVE_S = 60.0
"""For a job that has saved none yet, where the temperature leaves all the time: a leak does not."""


Problems = Mapping[str, str]
"""Why an action did not work, by its target; nothing for those for which it did."""


@dataclass(frozen=True)
class NodeJob:
    """A job on a node. `save_s`: what its last checkpoint took; None if it has saved none."""

    id: str
    save_s: float | None = None


class ResponseActions(Protocol):
    """What a response can do. Each action is for all its targets together, returns soon, and raises nothing: what comes
    next must be done, too."""

    def stop_scheduling(self, nodes: Sequence[str], reason: str) -> Problems:
        """Start no job on these nodes."""
        ...

    def request_isolation(self, place: str) -> Problems:
        """Ask the building to isolate a rack."""
        ...

    def list_jobs(self, node: str) -> Sequence[NodeJob]:
        """Return the jobs that run on a node, as far as they are known."""
        ...

    def request_save(self, jobs: Sequence[str]) -> Problems:
        """Ask jobs to save and stop; they can be started again."""
        ...

    def is_saved(self, job_id: str) -> bool:
        """Whether a job has saved since it was asked to."""
        ...

    def power_off(self, nodes: Sequence[str]) -> Problems:
        """Take the power of these nodes away."""
        ...


@dataclass(frozen=True)
class ResponseEvent:
    """What was done at `time_s`. `problem`: why it did not work."""

    time_s: float
    action: CoolingAction
    target: str
    text: str
    problem: str = ""
    is_done: bool = True
    """False in a rehearsal: it would have been done."""


@dataclass(frozen=True)
class _PendingOff:
    node: str
    due_s: float
    jobs: tuple[str, ...]
    text: str


@dataclass
class CoolingResponder:
    """Responds to faults, each once while it lasts.

    `find_device` returns the hottest device of a node as it is now; `may_act` False rehearses: nothing is done, and all
    is reported.
    """

    actions: ResponseActions
    clock: Callable[[], float]
    find_device: Callable[[str], HeatCapacity]
    may_act: bool
    record: Callable[[ResponseEvent], None] = lambda event: None
    _active: set[tuple[CoolingFault, str]] = field(default_factory=set)
    _pending: list[_PendingOff] = field(default_factory=list)
    _stopped: set[str] = field(default_factory=set)
    _is_off: set[str] = field(default_factory=set)
    _asked: set[str] = field(default_factory=set)

    def respond(self, faults: Sequence[ObservedFault]) -> list[ResponseEvent]:
        """Begin with what is new, and power off what is due. Call it each second, and `power_off_due` more often."""
        events: list[ResponseEvent] = []
        new = [fault for fault in faults if fault.key not in self._active]
        self._active = {fault.key for fault in faults}
        for fault in new:
            events += self._begin(fault)
        return [*events, *self.power_off_due()]

    def _begin(self, fault: ObservedFault) -> list[ResponseEvent]:
        jobs = {node: self.actions.list_jobs(node) for node in fault.nodes}
        plans = {node: self._plan(fault, node, jobs[node]) for node in fault.nodes}
        deadline = min((plan[0].text for plan in plans.values()), default="no node is known there")
        events = [self._emit(CoolingAction.REPORT, fault.place, f"{fault.text}; {deadline}")]
        new = [node for node in fault.nodes if node not in self._stopped]
        self._stopped.update(new)
        stop, text = CoolingAction.STOP_SCHEDULING, "no job starts there"
        events += self._act(stop, new, text, lambda nodes: self.actions.stop_scheduling(nodes, fault.text))
        if not fault.needs_power_off:
            return events
        if fault.fault is CoolingFault.LEAK:
            isolate, text = CoolingAction.REQUEST_ISOLATION, "the building decides"
            events += self._act(isolate, [fault.place], text, lambda places: self.actions.request_isolation(places[0]))
        saving = {
            job.id: job
            for node, plan in plans.items()
            for job in jobs[node]
            if any(each.action is CoolingAction.SAVE_CHECKPOINT for each in plan) and job.id not in self._asked
        }
        self._asked.update(saving)
        save = CoolingAction.SAVE_CHECKPOINT
        events += self._act(save, list(saving), "they are asked to save and stop", self.actions.request_save)
        for node, plan in plans.items():
            self._pending += self._plan_off(node, plan, jobs[node])
        return events

    def _plan_off(self, node: str, plan: Sequence[CoolingEvent], jobs: Sequence[NodeJob]) -> list[_PendingOff]:
        if node in self._is_off:
            return []
        has_time = any(each.action is CoolingAction.SAVE_CHECKPOINT for each in plan)
        off = next(each for each in plan if each.action is CoolingAction.POWER_OFF)
        text = "its time is over" if has_time else "no time to save" if jobs else "no job runs there"
        waiting = tuple(job.id for job in jobs) if has_time else ()
        return [_PendingOff(node, self.clock() + off.time_s - plan[0].time_s, waiting, text)]

    def _plan(self, fault: ObservedFault, node: str, jobs: Sequence[NodeJob]) -> list[CoolingEvent]:
        """The plan of a node. A job that has saved none gets all the time that there is."""
        device = self.find_device(node)
        known = [job.save_s for job in jobs]
        spare_s = min(find_response_window(fault.fault, device, fault.flow_share, 0.0).spare_s, MAX_UNKNOWN_SAVE_S)
        save_s = None if not jobs else spare_s if None in known else max(each or 0.0 for each in known)
        return plan_response(fault.fault, device, save_s, fault.flow_share, 0.0)

    def power_off_due(self) -> list[ResponseEvent]:
        """Power off the nodes of which the jobs have saved, or the time is over."""
        now, due, waiting = self.clock(), {}, []
        for pending in self._pending:
            is_saved = bool(pending.jobs) and self.may_act and all(map(self.actions.is_saved, pending.jobs))
            if pending.node in self._is_off or pending.node in due:
                continue
            if now < pending.due_s and not is_saved:
                waiting.append(pending)
            else:
                due[pending.node] = "its jobs have saved" if is_saved else pending.text
        self._pending = waiting
        self._is_off.update(due)
        return [
            event
            for text in dict.fromkeys(due.values())
            for event in self._act(
                CoolingAction.POWER_OFF, [node for node in due if due[node] == text], text, self.actions.power_off
            )
        ]

    def _act(
        self, action: CoolingAction, targets: Sequence[str], text: str, act: Callable[[Sequence[str]], Problems]
    ) -> list[ResponseEvent]:
        """Do it; what does not work is reported, and what follows is done nevertheless."""
        problems = act(targets) if self.may_act and targets else {}
        return [self._emit(action, target, text, problems.get(target, "")) for target in targets]

    def _emit(self, action: CoolingAction, target: str, text: str, problem: str = "") -> ResponseEvent:
        is_done = self.may_act or action is CoolingAction.REPORT
        event = ResponseEvent(self.clock(), action, target, text, problem, is_done)
        self.record(event)
        return event
