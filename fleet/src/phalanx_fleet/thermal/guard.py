"""Watch racks, CDUs and margins, and respond when cooling is lost: `phalanx thermal guard` reports a fault, drains the
nodes and has their jobs save. Nothing is powered off: the hardware protects itself.

One measurement alone may be an error of a sensor, so a fault counts after two: a value that is read twice, as from a
bus or a cache, is one measurement. A missing value is no fault: it is reported as blindness."""

import contextlib
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import median

from phalanx.errors import UsageError
from phalanx.jobs.backends.base import NodeBackend, group_running_jobs
from phalanx.jobs.spec import JobState
from phalanx.run.boot_clock import unix_now
from phalanx.run.private_files import state_root
from phalanx_fleet.audit_log import find_actor, find_audit_problem
from phalanx_fleet.fleet_node import LatestReading
from phalanx_fleet.node_states import OUT_OF_SERVICE, NodeState, NodeStates
from phalanx_fleet.nodes_file import NodeServices, find_racks_of_nodes, load_nodes_file
from phalanx_fleet.telemetry.service_reading import PollingThread, RackSample

USUAL_FLOW_SAMPLES = 300
"""Readings of which the median is a rack's usual flow."""
MIN_USUAL_SAMPLES = 5
MIN_GAP_S = 0.5
"""Between two measurements; what is less is rounding of their ages."""
LEAK_CONFIRM_S = 10.0
"""For which a leak has to be reported that is measured once: a building's bus sends a state when it changes."""
Problems = Mapping[str, str]
"""Why an action did not work, by its target; nothing for those for which it did."""
logger = logging.getLogger(__name__)
READ_INTERVAL_S = 1.0
JOBS_INTERVAL_S = 15.0
"""Jobs are asked for beforehand: after a fault there is no time for it."""
ACTION_TIMEOUT_S = 2.0
"""How long an action is waited for before the next one begins; it continues meanwhile."""
MAX_CONCURRENT_ACTIONS = 64


class CoolingFault(StrEnum):
    """What sensors report."""

    LEAK = "leak"
    NO_FLOW = "no flow"
    NO_MARGIN = "no margin"


@dataclass(frozen=True)
class CooledNodes:
    """Which rack each node is in, and which racks each CDU supplies."""

    racks: Mapping[str, str]
    """By node."""
    cdu_racks: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def list_nodes(self, racks: Iterable[str]) -> tuple[str, ...]:
        """Return the nodes in some racks."""
        wanted = set(racks)
        return tuple(node for node, rack in self.racks.items() if rack in wanted)


@dataclass(frozen=True)
class ObservedFault:
    """A fault at `place`, a rack, a CDU or a node, with the nodes that it concerns. `measured_at`: seconds of a
    monotonic clock. `needs_save`: whether jobs have to save and leave, or the nodes only get no more jobs."""

    fault: CoolingFault
    place: str
    nodes: tuple[str, ...]
    text: str
    measured_at: float
    needs_save: bool = True
    period_s: float = 0.0
    """Of a source that renews its values so often: what it has before that may be the same measurement."""

    @property
    def key(self) -> tuple[CoolingFault, str]:
        """What is the same fault."""
        return self.fault, self.place


@dataclass(frozen=True)
class NodeMargin:
    """Kelvins of a node's hottest device up to the temperature from which it slows down, and how old they are."""

    margin_k: float
    age_s: float = 0.0
    period_s: float = 0.0


@dataclass(frozen=True)
class _Sighting:
    """When a fault was first seen, when it was measured last, and how often."""

    since: float
    measured_at: float
    num_measurements: int


class FaultDetector:
    """Keeps what is usual, and since when something is not. `min_flow_share`: of the usual flow, below which flow is
    lost."""

    def __init__(self, nodes: CooledNodes, min_flow_share: float):
        self._nodes, self._min_flow_share = nodes, min_flow_share
        self._flows: dict[str, deque[float]] = {}
        self._seen: dict[tuple[CoolingFault, str], _Sighting] = {}

    def find_faults(
        self, racks: Sequence[RackSample], margins: Mapping[str, NodeMargin], now: float
    ) -> list[ObservedFault]:
        """Return the confirmed faults.

        Args:
            racks: The newest reading of each rack and CDU.
            margins: Of nodes that have one.
            now: Seconds of a monotonic clock.
        """
        seen = [*self._find_in_racks(racks, now), *self._find_in_margins(margins, now)]
        self._seen = {fault.key: _see_again(self._seen.get(fault.key), fault, now) for fault in seen}
        return [fault for fault in seen if self._is_confirmed(fault, now)]

    def _is_confirmed(self, fault: ObservedFault, now: float) -> bool:
        sighting = self._seen[fault.key]
        lasts = fault.fault is CoolingFault.LEAK and now - sighting.since >= LEAK_CONFIRM_S
        return sighting.num_measurements >= 2 or lasts

    def find_blind_racks(self, racks: Sequence[RackSample]) -> list[str]:
        """Return the racks with nodes of which neither a leak nor the flow is known now."""
        known = {rack.id for rack in racks if rack.has_leak is not None or rack.flow_l_per_min is not None}
        covered = known | {rack for cdu, supplied in self._nodes.cdu_racks.items() if cdu in known for rack in supplied}
        return sorted(set(self._nodes.racks.values()) - covered)

    def _find_in_racks(self, racks: Sequence[RackSample], now: float) -> Iterator[ObservedFault]:
        for rack in racks:
            is_cdu = rack.equipment == "CDU"
            supplied = self._nodes.cdu_racks.get(rack.id, ()) if is_cdu else (rack.id,)
            nodes, place = self._nodes.list_nodes(supplied), f"{rack.equipment} {rack.id}"
            if rack.has_leak:
                # a tray below a CDU may be wet while its racks are not: their own sensors say so
                text = f"{place} reports a leak"
                measured_at = now - _find_age(rack, "has_leak")
                yield ObservedFault(CoolingFault.LEAK, place, nodes, text, measured_at, needs_save=not is_cdu)
            share = self._find_flow_share(place, rack.flow_l_per_min)
            if share is not None and share < self._min_flow_share:
                text = f"{place} has {rack.flow_l_per_min:.1f} l/min, {share:.0%} of its usual flow"
                measured_at = now - _find_age(rack, "flow_l_per_min")
                yield ObservedFault(CoolingFault.NO_FLOW, place, nodes, text, measured_at)

    def _find_flow_share(self, place: str, flow_l_per_min: float | None) -> float | None:
        """Flow over the usual one; None where one of them is not known."""
        if flow_l_per_min is None:
            return None
        usual = self._flows.setdefault(place, deque(maxlen=USUAL_FLOW_SAMPLES))
        share = flow_l_per_min / median(usual) if len(usual) >= MIN_USUAL_SAMPLES and median(usual) > 0 else None
        if flow_l_per_min > 0 and (share is None or share >= self._min_flow_share):
            usual.append(flow_l_per_min)
        return share

    def _find_in_margins(self, margins: Mapping[str, NodeMargin], now: float) -> Iterator[ObservedFault]:
        for node, margin in margins.items():
            if margin.margin_k <= 0:
                # a device slows down there, and protects itself: it may do so for months
                text = f"{node}: a device is at the temperature from which it slows down"
                measured_at = now - margin.age_s
                yield ObservedFault(
                    CoolingFault.NO_MARGIN, node, (node,), text, measured_at, needs_save=False, period_s=margin.period_s
                )


def _find_age(rack: RackSample, column: str) -> float:
    return rack.ages_s.get(column, rack.age_s or 0.0)


def _see_again(last: _Sighting | None, fault: ObservedFault, now: float) -> _Sighting:
    if last is None:
        return _Sighting(now, fault.measured_at, 1)
    if fault.measured_at - last.measured_at < max(MIN_GAP_S, fault.period_s):
        return last
    return _Sighting(last.since, fault.measured_at, last.num_measurements + 1)


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


@dataclass
class KnownJobs:
    """The running jobs by node; renewed in the background."""

    open_backend: Callable[[], NodeBackend]
    by_node: Mapping[str, Sequence[str]] = field(default_factory=dict)
    problem: str = ""
    _backends: threading.local = field(default_factory=threading.local)

    @property
    def backend(self) -> NodeBackend:
        """The backend of this thread: a database of a queue belongs to the thread that opened it."""
        if not hasattr(self._backends, "backend"):
            self._backends.backend = self.open_backend()
        found: NodeBackend = self._backends.backend
        return found

    def renew(self) -> None:
        try:
            running = [each for each in self.backend.list_jobs() if each.state is JobState.RUNNING]
        except Exception as error:  # noqa: BLE001 - it is shown, and asked again; the guard must not end
            self.problem = f"the jobs are not known: {type(error).__name__}: {error}"
            return
        self.by_node, self.problem = group_running_jobs(running), ""


@dataclass
class KnownMargins:
    """The temperature margins of nodes; renewed in the background, since an exporter may take seconds to answer."""

    services: NodeServices
    readings: Mapping[str, LatestReading] = field(default_factory=dict)
    problems: Sequence[str] = ()

    def renew(self) -> None:
        self.readings, self.problems = self.services.read_nodes()

    def find_all(self, now: float) -> dict[str, NodeMargin]:
        """Return the margin of each node that has one that is not late."""
        return {
            name: NodeMargin(each.margin_k, now - each.time, each.period_s)
            for name, each in self.readings.items()
            if each.margin_k is not None and not each.is_late(now)
        }


class FleetActions:
    """Acts on a backend; each action is for all its targets together, returns soon, and raises nothing: what comes
    next must be done, too. `timeout_s`: how long an action is waited for."""

    def __init__(self, jobs: KnownJobs | None, states: NodeStates, timeout_s: float = ACTION_TIMEOUT_S):
        self._jobs, self._states, self._timeout_s = jobs, states, timeout_s
        self._pool = ThreadPoolExecutor(MAX_CONCURRENT_ACTIONS, thread_name_prefix="cooling-response")

    def drain(self, nodes: Sequence[str], reason: str) -> Problems:
        """Drain nodes through the backend, and record it."""
        if self._jobs is None:
            return dict.fromkeys(nodes, "no backend is named (--on)")
        jobs, actor = self._jobs, find_actor()
        problems = self._do_all(nodes, lambda node: jobs.backend.drain_node(node, reason, actor))
        for node in nodes:
            if node not in problems and self._states.find_state(node) not in OUT_OF_SERVICE:
                with contextlib.suppress(UsageError):  # another operator was faster
                    self._states.change(node, NodeState.DRAINED, reason, actor)
        return problems

    def list_jobs(self, node: str) -> Sequence[str]:
        """Return the jobs of a node, as they were when they were last asked for."""
        return () if self._jobs is None else self._jobs.by_node.get(node, ())

    def request_save(self, jobs: Sequence[str]) -> Problems:
        """Send SIGUSR1: the run saves and ends with 75, and its backend starts it again where it may."""
        assert self._jobs is not None  # else there are no jobs
        known = self._jobs
        return self._do_all(jobs, lambda job: known.backend.send_signal(job, signal.SIGUSR1))

    def close(self) -> None:
        """Leave actions that do not end behind."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _do_all(self, targets: Sequence[str], act: Callable[[str], None]) -> dict[str, str]:
        """Act on all targets at once; return what did not work in time, by target."""
        futures = {target: self._pool.submit(act, target) for target in targets}
        wait(futures.values(), timeout=self._timeout_s)
        problems = {}
        for target, future in futures.items():
            if not future.done():
                problems[target] = f"no answer within {self._timeout_s:g} s"
            elif (error := future.exception()) is not None:
                # whatever it is, what comes next must be done
                logger.error("%s: %s", target, error, exc_info=error)
                problems[target] = str(error) or type(error).__name__
        return problems


@dataclass(frozen=True)
class GuardReport:
    """A turn of the guard: what it did, and what it cannot see."""

    events: Sequence[ResponseEvent] = ()
    problems: Sequence[str] = ()


def guard_cooling(
    nodes: Path,
    open_backend: Callable[[], NodeBackend] | None,
    states: NodeStates,
    may_act: bool,
    duration_s: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[GuardReport]:
    """Read all sources each second and respond to faults; yield what is done, and problems when they change.

    Raises UsageError for a nodes file in which no node has a rack and none has a source of margins.
    """
    file = load_nodes_file(nodes)
    settings = file.cooling_response
    racks = find_racks_of_nodes(file)
    if not racks and not any(node.prometheus or node.redfish for node in file.nodes):
        raise UsageError(f"{nodes}: nothing to guard: give nodes a rack, and name mqtt or cdus, or a source of margins")
    cooled = CooledNodes(racks, {cdu.id: cdu.racks for cdu in file.cdus})
    detector = FaultDetector(cooled, settings.min_flow_share)
    audit = state_root() / "thermal" / "audit.jsonl"
    audit_problems: dict[str, None] = {}

    def record(event: ResponseEvent) -> None:
        if event.is_done and (problem := find_audit_problem(audit, [asdict(event)])):
            audit_problems[problem] = None

    with contextlib.ExitStack() as stack:
        services = stack.enter_context(contextlib.closing(NodeServices(file, unix_now)))
        margins = KnownMargins(services)
        stack.callback(PollingThread(margins.renew, READ_INTERVAL_S).stop)
        jobs = _watch_jobs(open_backend, stack)
        actions = stack.enter_context(contextlib.closing(FleetActions(jobs, states)))
        responder = CoolingResponder(actions, clock, may_act, record)
        began, last_problems = clock(), None
        while duration_s is None or clock() - began < duration_s:
            samples, rack_problems = services.read_racks()
            events = responder.respond(detector.find_faults(samples, margins.find_all(unix_now()), clock()))
            blind = [f"{rack}: neither leak nor flow is known" for rack in detector.find_blind_racks(samples)]
            unknown = [jobs.problem] if jobs is not None and jobs.problem else []
            problems = [*rack_problems, *margins.problems, *blind, *unknown]
            if events or problems != last_problems:
                last_problems = problems
                yield GuardReport(events, [*problems, *audit_problems])
            sleep(READ_INTERVAL_S)


def _watch_jobs(open_backend: Callable[[], NodeBackend] | None, stack: contextlib.ExitStack) -> KnownJobs | None:
    if open_backend is None:
        return None
    jobs = KnownJobs(open_backend)
    _ = jobs.backend  # a missing package or an unknown name ends the command
    jobs.renew()
    stack.callback(PollingThread(jobs.renew, JOBS_INTERVAL_S).stop)
    return jobs
