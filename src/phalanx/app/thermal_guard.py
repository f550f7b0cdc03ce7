"""Watch racks, CDUs and margins, and respond when cooling is lost: `phalanx thermal guard`."""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path

from phalanx.app.fleet_nodes import find_actor
from phalanx.app.thermal_requests import open_bus_requests, thermal_state_dir
from phalanx.errors import DataError, UsageError
from phalanx.fleet.audit_log import find_audit_problem
from phalanx.fleet.latest_reading import LatestReading
from phalanx.fleet.node_services import NodeServices
from phalanx.fleet.node_states import NodeState, NodeStates
from phalanx.fleet.nodes_file import NodesFile, find_racks_of_nodes, load_nodes_file
from phalanx.fleet.telemetry.mqtt import MqttOptions
from phalanx.fleet.telemetry.polling import PollingThread
from phalanx.fleet.telemetry.redfish import RedfishOptions
from phalanx.fleet.telemetry.source import SourceUnavailableError
from phalanx.fleet.thermal.bms_requests import ISOLATION_TYPES, BmsRequests
from phalanx.fleet.thermal.cooling_faults import CooledNodes, FaultDetector
from phalanx.fleet.thermal.redfish_power import RedfishErrors, RedfishPowerSwitch, open_power_switch
from phalanx.fleet.thermal.request_session import HEARTBEAT_INTERVAL_S
from phalanx.fleet.thermal.response import CoolingResponder, NodeJob, Problems, ResponseEvent
from phalanx.jobs.backends.nodes import NodeBackend, PowerOffBackend
from phalanx.jobs.spec import JobState
from phalanx.run import Run, read_events
from phalanx.run.event_types import CheckpointSaved

logger = logging.getLogger(__name__)

READ_INTERVAL_S = 1.0
DUE_INTERVAL_S = 0.2
JOBS_INTERVAL_S = 15.0
"""Jobs are asked for beforehand: after a fault there is no time for it."""
ACTION_TIMEOUT_S = 2.0
"""How long an action is waited for before the next one begins; it continues meanwhile."""
MAX_CONCURRENT_ACTIONS = 64


@dataclass
class KnownJobs:
    """The running jobs by node, with what their last save took; renewed in the background."""

    open_backend: Callable[[], NodeBackend]
    by_node: Mapping[str, Sequence[NodeJob]] = field(default_factory=dict)
    runs: Mapping[str, Path] = field(default_factory=dict)
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
        found: dict[str, list[NodeJob]] = {}
        for job in running:
            save_s = None if job.run_dir is None else _find_save_s(Path(job.run_dir))
            for node in job.nodes:
                found.setdefault(node, []).append(NodeJob(job.id, save_s))
        self.runs = {job.id: Path(job.run_dir) for job in running if job.run_dir is not None}
        self.by_node, self.problem = found, ""


@dataclass
class KnownMargins:
    """The temperature margins of nodes; renewed in the background, since an exporter may take seconds to answer."""

    services: NodeServices
    readings: Mapping[str, LatestReading] = field(default_factory=dict)
    problems: Sequence[str] = ()

    def renew(self) -> None:
        """Ask all nodes."""
        self.readings, self.problems = self.services.read_nodes()

    def find_all(self, now: float) -> dict[str, float | None]:
        """Return the margin of each node; None for one that is late."""
        return {name: None if each.is_late(now) else each.margin_k for name, each in self.readings.items()}


class FleetActions:
    """Acts on a backend, on management controllers and on the building's bus.

    `backend_nodes` are powered off through the backend, those of `switches` through their controllers. `timeout_s`: how
    long an action is waited for. `problems`: what did not work after that.
    """

    def __init__(
        self,
        jobs: KnownJobs | None,
        states: NodeStates,
        switches: Mapping[str, RedfishPowerSwitch],
        bus: BmsRequests | None = None,
        backend_nodes: Collection[str] = (),
        timeout_s: float = ACTION_TIMEOUT_S,
        now: Callable[[], float] = time.time,
    ):
        self._jobs, self._states, self._switches, self._bus, self._timeout_s = jobs, states, switches, bus, timeout_s
        self._backend_nodes, self._now = backend_nodes, now
        self.problems: list[str] = []
        self._asked_at: dict[str, float] = {}
        self._reasons: dict[str, str] = {}
        self._pool = ThreadPoolExecutor(MAX_CONCURRENT_ACTIONS, thread_name_prefix="cooling-response")

    def stop_scheduling(self, nodes: Sequence[str], reason: str) -> Problems:
        """Drain nodes through the backend, and record it."""
        self._reasons |= dict.fromkeys(nodes, reason)
        if self._jobs is None:
            return dict.fromkeys(nodes, "no backend is named (--on)")
        jobs, actor = self._jobs, find_actor()
        problems = self._do_all(nodes, lambda node: jobs.backend.drain_node(node, reason, actor))
        for node in nodes:
            last = self._states.find(node)
            if node not in problems and (last is None or last.state is not NodeState.DRAINED):
                with contextlib.suppress(UsageError):  # it is being tested: drained as well
                    self._states.change(node, NodeState.DRAINED, reason, actor)
        return problems

    def request_isolation(self, place: str) -> Problems:
        """Publish the requests of isolation that the building grants for a rack."""
        rack = place.removeprefix("rack ")
        grants = [] if self._bus is None else [self._bus.find_grant(each, rack) for each in ISOLATION_TYPES]
        topics = [grant.topic for grant in grants if grant is not None]
        if self._bus is None or not topics:
            return {place: "the building grants no request of isolation"}
        bus = self._bus
        problems = self._do_all(topics, lambda topic: bus.hold(topic, 1.0))
        return {place: "; ".join(problems.values())} if problems else {}

    def list_jobs(self, node: str) -> Sequence[NodeJob]:
        """Return the jobs of a node, as they were when they were last asked for."""
        return () if self._jobs is None else self._jobs.by_node.get(node, ())

    def request_save(self, jobs: Sequence[str]) -> Problems:
        """Send SIGUSR1: the run saves and ends with 75, and its backend starts it again where it may."""
        assert self._jobs is not None  # else there are no jobs
        known = self._jobs
        self._asked_at.update(dict.fromkeys(jobs, self._now()))
        return self._do_all(jobs, lambda job: known.backend.send_signal(job, signal.SIGUSR1))

    def is_saved(self, job_id: str) -> bool:
        """Whether its run has a checkpoint since it was asked to save."""
        path = None if self._jobs is None else self._jobs.runs.get(job_id)
        last = None if path is None else _find_last_save(path)
        return last is not None and last.time >= self._asked_at[job_id]

    def power_off(self, nodes: Sequence[str]) -> Problems:
        """Power nodes off through their management controllers; those without one, or of which it fails, through the
        backend."""
        unknown = "it is not powered off: that takes allow_power_off in the nodes file, and redfish or --on slurm"
        problems = {each: unknown for each in nodes if each not in self._switches and each not in self._backend_nodes}
        futures: dict[str, Future[Problems | None]] = {
            node: self._pool.submit(self._switches[node].power_off) for node in nodes if node in self._switches
        }
        futures |= self._ask_backend([node for node in nodes if node in self._backend_nodes])
        problems |= self._collect(futures)
        if self._jobs is not None and isinstance(self._jobs.backend, PowerOffBackend):
            name = self._jobs.backend.name
            failed = {node: problems[node] for node in nodes if node in problems and node in self._switches}
            second = self._collect(self._ask_backend(list(failed)))
            problems |= {node: f"{failed[node]}; {name}: {problem}" for node, problem in second.items()}
            for node in [each for each in failed if each not in second]:
                self.problems.append(f"{node}: powered off through {name}: its controller failed: {problems.pop(node)}")
        return problems

    def _ask_backend(self, nodes: Sequence[str]) -> dict[str, Future[Problems | None]]:
        by_reason: dict[str, list[str]] = {}
        for node in nodes:
            by_reason.setdefault(self._reasons.get(node, "cooling is lost"), []).append(node)
        futures: dict[str, Future[Problems | None]] = {}
        for reason, group in by_reason.items():
            futures |= dict.fromkeys(group, self._pool.submit(self._power_off_through_backend, group, reason))
        return futures

    def close(self) -> None:
        """Leave actions that do not end behind."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for switch in self._switches.values():
            switch.close()

    def _power_off_through_backend(self, nodes: Sequence[str], reason: str) -> Problems:
        backend = self._find_power_off_backend()
        problems = backend.power_off_nodes(nodes, reason)
        accepted = [node for node in nodes if node not in problems]
        if accepted:  # not in the pool, which takes no more once the guard ends: this has to follow
            threading.Thread(target=self._finish_power_off, args=(accepted, reason), name="power-off").start()
        return problems

    def _finish_power_off(self, nodes: Sequence[str], reason: str) -> None:
        try:
            problems = self._find_power_off_backend().finish_power_off(nodes, reason)
        except Exception as error:  # noqa: BLE001 - it is reported; nothing waits for this thread
            problems = dict.fromkeys(nodes, f"jobs may power it up again: {type(error).__name__}: {error}")
        self.problems += [f"{node}: {problem}" for node, problem in problems.items()]

    def _find_power_off_backend(self) -> PowerOffBackend:
        assert self._jobs is not None  # else `backend_nodes` is empty
        backend = self._jobs.backend
        assert isinstance(backend, PowerOffBackend)
        return backend

    def _do_all(self, targets: Sequence[str], act: Callable[[str], None]) -> dict[str, str]:
        """Act on all targets at once; return what did not work in time."""
        return self._collect({target: self._pool.submit(act, target) for target in targets})

    def _collect(self, futures: Mapping[str, Future[Problems | None]]) -> dict[str, str]:
        """Wait for actions; return what did not work in time, by target."""
        wait(futures.values(), timeout=self._timeout_s)
        problems = {}
        for target, future in futures.items():
            if not future.done():
                problems[target] = f"no answer within {self._timeout_s:g} s"
            elif (error := future.exception()) is not None:
                # whatever it is, what comes next must be done
                logger.error("%s: %s", target, error, exc_info=error)
                problems[target] = str(error) or type(error).__name__
            elif refused := (future.result() or {}).get(target):
                problems[target] = refused
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
    audit = thermal_state_dir() / "audit.jsonl"
    audit_problems: dict[str, None] = {}

    def record(event: ResponseEvent) -> None:
        if event.is_done and (problem := find_audit_problem(audit, [asdict(event)])):
            audit_problems[problem] = None

    with contextlib.ExitStack() as stack:
        services = stack.enter_context(contextlib.closing(NodeServices(file)))
        margins = KnownMargins(services)
        margins.renew()
        stack.callback(PollingThread(margins.renew, READ_INTERVAL_S).stop)
        jobs = _watch_jobs(open_backend, stack)
        bus = _join_bus(file, stack) if may_act else None
        switches, setup_problems = open_switches(file) if may_act else ({}, [])
        backend_nodes, backend_problems = find_backend_nodes(file, switches, jobs) if may_act else ([], [])
        actions = stack.enter_context(contextlib.closing(FleetActions(jobs, states, switches, bus, backend_nodes)))
        responder = CoolingResponder(
            actions, clock, lambda node: settings.find_device(margins.find_all(time.time()).get(node)), may_act, record
        )
        began, next_read, last_problems = clock(), clock(), None
        while duration_s is None or clock() - began < duration_s:
            events, problems = [], None
            if clock() >= next_read:
                next_read = max(next_read + READ_INTERVAL_S, clock())
                samples, rack_problems = services.read_racks()
                events += responder.respond(detector.find_faults(samples, margins.find_all(time.time()), clock()))
                blind = [f"{rack}: neither leak nor flow is known" for rack in detector.find_blind_racks(samples)]
                unknown = [jobs.problem] if jobs is not None and jobs.problem else []
                problems = [*setup_problems, *backend_problems, *rack_problems, *margins.problems, *blind, *unknown]
                problems += actions.problems
            events += responder.power_off_due()
            if events or (problems is not None and problems != last_problems):
                last_problems = last_problems if problems is None else problems
                yield GuardReport(events, [*(problems or ()), *audit_problems])
            sleep(DUE_INTERVAL_S)


def open_switches(file: NodesFile) -> tuple[dict[str, RedfishPowerSwitch], list[str]]:
    """Open the power switches of the nodes that may be powered off and have one; return them, and why others are
    missing."""
    found, problems = {}, []
    if forbidden := [node.name for node in file.nodes if node.rack is not None and not node.allow_power_off]:
        problems.append(f"{_describe_nodes(forbidden)} may not be powered off (allow_power_off)")
    for node in file.nodes:
        if not node.allow_power_off or node.redfish is None:
            continue
        try:
            found[node.name] = open_power_switch(RedfishOptions(**node.redfish.model_dump()))
        except (*RedfishErrors, SourceUnavailableError, UsageError) as error:
            problems.append(f"{node.name}: its controller cannot power it off: {error}")
    return found, problems


def find_backend_nodes(
    file: NodesFile, switches: Collection[str], jobs: KnownJobs | None
) -> tuple[list[str], list[str]]:
    """Return the nodes that may be powered off and of which no switch is open, and what keeps the backend from it."""
    nodes = [node.name for node in file.nodes if node.allow_power_off and node.name not in switches]
    if not nodes:
        return [], []
    cannot = f"{_describe_nodes(nodes)} cannot be powered off: no redfish that answers, and"
    if jobs is None:
        return [], [f"{cannot} no backend is named (--on)"]
    if not isinstance(jobs.backend, PowerOffBackend):
        return [], [f"{cannot} the backend {jobs.backend.name} cannot power off a node"]
    try:
        problems = jobs.backend.check_power_off(nodes)
    except UsageError as error:
        problems = [str(error)]
    return nodes, [f"power off through {jobs.backend.name}: {problem}" for problem in problems]


def _describe_nodes(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more nodes"


def _watch_jobs(open_backend: Callable[[], NodeBackend] | None, stack: contextlib.ExitStack) -> KnownJobs | None:
    if open_backend is None:
        return None
    jobs = KnownJobs(open_backend)
    _ = jobs.backend  # a missing package or an unknown name ends the command
    jobs.renew()
    stack.callback(PollingThread(jobs.renew, JOBS_INTERVAL_S).stop)
    return jobs


def _join_bus(file: NodesFile, stack: contextlib.ExitStack) -> BmsRequests | None:
    """The building's bus, with our heartbeat, if it has given Phalanx a name."""
    if file.mqtt is None or file.mqtt.integration is None:
        return None
    try:
        requests, bus = open_bus_requests(MqttOptions(**file.mqtt.model_dump()))
    except SourceUnavailableError as error:
        logger.warning("isolation cannot be requested: %s", error)
        return None
    stack.callback(bus.stop)
    stack.callback(PollingThread(lambda: _beat(requests), HEARTBEAT_INTERVAL_S).stop)
    return requests


def _beat(requests: BmsRequests) -> None:
    try:
        requests.beat()
    except OSError as error:
        logger.warning("%s", error)


def _find_save_s(run: Path) -> float | None:
    last = _find_last_save(run)
    return None if last is None else last.duration_s + last.stall_s


def _find_last_save(run: Path) -> CheckpointSaved | None:
    try:
        return max(
            (event for event in read_events(Run(run).events) if isinstance(event, CheckpointSaved)),
            key=lambda event: event.time,
            default=None,
        )
    except (OSError, DataError) as error:
        logger.info("%s: %s", os.fspath(run), error)
        return None
