"""Watch racks, CDUs and margins, and respond when cooling is lost: `phalanx thermal guard` reports a fault, drains the
nodes and has their jobs save. Nothing is powered off: the hardware protects itself."""

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.jobs.backends.base import NodeBackend, group_running_jobs
from phalanx.jobs.spec import JobState
from phalanx.run.boot_clock import unix_now
from phalanx.run.private_files import state_root
from phalanx_fleet.audit_log import find_actor, find_audit_problem
from phalanx_fleet.latest_reading import LatestReading
from phalanx_fleet.node_services import NodeServices, ServiceOpeners
from phalanx_fleet.node_states import OUT_OF_SERVICE, NodeState, NodeStates
from phalanx_fleet.nodes_file import find_racks_of_nodes, load_nodes_file
from phalanx_fleet.telemetry.polling import PollingThread
from phalanx_fleet.thermal.cooling_faults import CooledNodes, CoolingFault, FaultDetector, NodeMargin, ObservedFault

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


logger = logging.getLogger(__name__)

READ_INTERVAL_S = 1.0
JOBS_INTERVAL_S = 15.0
"""Jobs are asked for beforehand: after a fault there is no time for it."""
ACTION_TIMEOUT_S = 2.0
"""How long an action is waited for before the next one begins; it continues meanwhile."""
MAX_CONCURRENT_ACTIONS = 64


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
        """Ask the backend."""
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
        """Ask all nodes."""
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
    openers: ServiceOpeners | None = None,
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
        services = stack.enter_context(contextlib.closing(NodeServices(file, openers, unix_now)))
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
