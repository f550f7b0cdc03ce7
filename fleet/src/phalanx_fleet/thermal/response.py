"""Respond to a fault of the cooling: report it, drain the nodes, have their jobs save. Nothing is powered off: the
hardware protects itself. The clock and all that acts are passed in.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from phalanx_fleet.thermal.cooling_faults import CoolingFault, ObservedFault

if TYPE_CHECKING:
    from phalanx_fleet.thermal.guard import FleetActions

Problems = Mapping[str, str]
"""Why an action did not work, by its target; nothing for those for which it did."""


class CoolingAction(StrEnum):
    """What follows a fault, in this order."""

    REPORT = "report"
    DRAIN = "drain"
    SAVE_CHECKPOINT = "save checkpoint"


@dataclass(frozen=True)
class ResponseEvent:
    """What was done at `time_s`. `problem`: why it did not work."""

    time_s: float
    action: CoolingAction
    target: str
    text: str
    problem: str = ""
    is_done: bool = True
    """False in a dry run: it would have been done."""


@dataclass
class CoolingResponder:
    """Responds to faults, each once while it lasts. `may_act` False: nothing is done, and all is reported."""

    actions: "FleetActions"
    clock: Callable[[], float]
    may_act: bool
    record: Callable[[ResponseEvent], None] = lambda event: None
    _active: set[tuple[CoolingFault, str]] = field(default_factory=set)
    _drained: set[str] = field(default_factory=set)
    _asked: set[str] = field(default_factory=set)

    def respond(self, faults: Sequence[ObservedFault]) -> list[ResponseEvent]:
        """Do what follows new faults."""
        new = [fault for fault in faults if fault.key not in self._active]
        self._active = {fault.key for fault in faults}
        return [event for fault in new for event in self._begin(fault)]

    def _begin(self, fault: ObservedFault) -> list[ResponseEvent]:
        where = "" if fault.nodes else "; no node is known there"
        events = [self._emit(CoolingAction.REPORT, fault.place, f"{fault.text}{where}")]
        nodes = [node for node in fault.nodes if node not in self._drained]
        self._drained.update(nodes)
        drain, text = CoolingAction.DRAIN, "no job starts there"
        events += self._act(drain, nodes, text, lambda targets: self.actions.drain(targets, fault.text))
        if fault.needs_save:
            jobs = dict.fromkeys(job for node in fault.nodes for job in self.actions.list_jobs(node))
            new = [job for job in jobs if job not in self._asked]
            self._asked.update(new)
            save, text = CoolingAction.SAVE_CHECKPOINT, "it is asked to save and stop"
            events += self._act(save, new, text, self.actions.request_save)
        return events

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
