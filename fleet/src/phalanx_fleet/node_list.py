"""The nodes of a fleet: list them with their newest readings, drain, test and undrain them."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from phalanx.cluster.health.runner import NodeHealthReport
from phalanx.errors import PhalanxError, UsageError
from phalanx.jobs.backends.base import MAX_SUGGESTED_NAMES, BackendNode, NodeBackend, NodeService, find_node
from phalanx.run import Run
from phalanx.run.node_env import find_node_name
from phalanx.run.telemetry_minutes import NodeMinute
from phalanx.telemetry.record import NodeSampler, open_local_sources
from phalanx.telemetry.sample import SAMPLE_INTERVAL_S, NodeSample, TelemetrySource
from phalanx_fleet.evidence import (
    CoolingFinding,
    RunReadings,
    apply_evidence,
    find_cooling_findings,
    list_run_directories,
    make_cooling_evidence,
    select_recent_runs,
)
from phalanx_fleet.fleet_node import (
    FleetNode,
    LatestReading,
    find_newest_reading,
    make_fleet_node,
    merge_readings,
    merge_state,
    reading_from_minute,
    reading_from_sample,
)
from phalanx_fleet.node_states import OUT_OF_SERVICE, NodeChange, NodeState, NodeStates
from phalanx_fleet.nodes_file import NodeServices, NodesFile, find_racks_of_nodes, load_nodes_file
from phalanx_fleet.telemetry.service_reading import RackSample

logger = logging.getLogger(__name__)
READ_INTERVAL_S = 5.0
STOP_TIMEOUT_S = 5.0
TESTED_REASON = "phalanx doctor: no check failed"


@dataclass(frozen=True)
class NodeReading:
    """A node now, and what cannot be read there, in words."""

    node: str
    sample: NodeSample
    problems: tuple[str, ...]


def read_local_node(
    open_sources: Callable[[], tuple[Sequence[TelemetrySource], Sequence[str]]] = open_local_sources,
    sleep: Callable[[float], None] = time.sleep,
) -> NodeReading:
    """Read this machine. Takes a second: some values are differences of two readings."""
    sources, problems = open_sources()
    node = find_node_name()
    with contextlib.closing(NodeSampler(sources, node)) as sampler:
        sampler.read()
        sleep(SAMPLE_INTERVAL_S)
        return NodeReading(node, sampler.read(), tuple(problems))


@dataclass(frozen=True)
class FleetSources:
    """Where nodes and readings come from: a backend, a nodes file, or both. `runs`: a run directory or a directory of
    some, instead of the runs of the backend's jobs."""

    backend: NodeBackend | None
    nodes_file: Path | None = None
    runs: Path | None = None


@dataclass
class FleetView:
    """All nodes, and what could not be read, in words."""

    nodes: Sequence[FleetNode] = ()
    problems: Sequence[str] = ()
    racks: Sequence[RackSample] = ()
    new_suspects: Sequence[NodeChange] = ()
    """Nodes that this reading found evidence against."""
    is_read: bool = True
    """Whether all this was read at least once."""
    is_current: bool = True
    """Whether the last reading succeeded; otherwise these nodes are of an earlier one."""


class FleetReader:
    """Reads a fleet again and again; what runs have written is read once.

    Args:
        sources: What to ask.
        states: The table of nodes.
        read_here: Reads this machine.
        now: Returns seconds since the epoch.
        list_more_runs: Returns further run directories to read.
        finds_evidence: Whether a node that runs have evidence against becomes suspect in the table.
    """

    def __init__(
        self,
        sources: FleetSources,
        states: NodeStates,
        read_here: Callable[[], NodeSample] = lambda: read_local_node().sample,
        now: Callable[[], float] = time.time,
        list_more_runs: Callable[[], Sequence[Path]] = tuple,
        finds_evidence: bool = True,
    ):
        self._list_more_runs, self._finds_evidence = list_more_runs, finds_evidence
        self._sources, self._states, self._read_here, self._now = sources, states, read_here, now
        file = NodesFile(nodes=[]) if sources.nodes_file is None else load_nodes_file(sources.nodes_file)
        self._entries, self._services = file.nodes, NodeServices(file, now)
        self._racks, self._cdu_racks = find_racks_of_nodes(file), {cdu.id: cdu.racks for cdu in file.cdus}
        if sources.runs is not None and not sources.runs.is_dir():
            raise UsageError(f"--runs {sources.runs}: no such directory")
        self._runs: dict[Path, RunReadings] = {}
        self._newest_minutes: dict[str, NodeMinute] = {}

    def read(self) -> FleetView:
        """Return all nodes as they are now. One that runs have evidence against becomes suspect."""
        problems: list[str] = []
        backend_nodes = {} if self._sources.backend is None else _by_name(self._sources.backend.list_nodes())
        names = list(dict.fromkeys([*backend_nodes, *(entry.name for entry in self._entries)]))
        self._read_runs(problems)
        served, served_problems = self._services.read_nodes()
        racks, rack_problems = self._services.read_racks()
        problems += [*served_problems, *rack_problems]
        readings = {name: self._merge_node(name, backend_nodes.get(name), served.get(name)) for name in names}
        findings = {
            name: find_cooling_findings(self._racks.get(name), racks, self._cdu_racks, readings[name], self._now())
            for name in names
        }
        new_suspects = self._apply_evidence(names, backend_nodes, findings) if self._finds_evidence else []
        changes = self._states.newest()
        nodes = [
            make_fleet_node(
                name,
                backend_nodes.get(name),
                changes.get(name),
                readings[name],
                self._racks.get(name),
                "; ".join(each.text for each in findings[name]) or None,
            )
            for name in names
        ]
        return FleetView(nodes, problems, racks, new_suspects)

    def close(self) -> None:
        self._services.close()

    def _merge_node(
        self, name: str, backend_node: BackendNode | None, served: LatestReading | None
    ) -> LatestReading | None:
        here = reading_from_sample(self._read_here(), SAMPLE_INTERVAL_S) if name == find_node_name() else None
        return merge_readings([self._find_minute_reading(name, backend_node), served, here], self._now())

    def _apply_evidence(
        self,
        names: Sequence[str],
        backend_nodes: Mapping[str, BackendNode],
        findings: Mapping[str, Sequence[CoolingFinding]],
    ) -> list[NodeChange]:
        """Evidence names nodes as their agents do; what is against a node that the fleet does not have is left out.
        What a clock that is ahead has dated in the future waits until then: else a node could not be taken back
        before."""
        node_names = {host: node.name for node in backend_nodes.values() for host in node.host_names}
        node_names |= {name: name for name in names}
        evidence = [each for run in self._runs.values() for each in run.list_evidence()]
        known = [
            replace(each, node=node_names[each.node])
            for each in evidence
            if each.node in node_names and each.time <= self._now()
        ]
        cooling = [each for name in names for each in make_cooling_evidence(name, findings[name], self._now())]
        return apply_evidence(self._states, sorted([*known, *cooling], key=lambda each: each.time))

    def _read_runs(self, problems: list[str]) -> None:
        for path in self._list_runs(problems):
            if path not in self._runs:
                self._runs[path] = RunReadings(Run(path))
            for minute in self._runs[path].read_minutes():
                last = self._newest_minutes.get(minute.node)
                if last is None or minute.time >= last.time:
                    self._newest_minutes[minute.node] = minute

    def _list_runs(self, problems: list[str]) -> list[Path]:
        if self._sources.runs is not None:
            return list_run_directories(self._sources.runs)
        more = list(self._list_more_runs())
        if self._sources.backend is None:
            return more
        try:
            return [*select_recent_runs(self._sources.backend.list_jobs(), self._now()), *more]
        except UsageError as error:  # nodes can be listed where jobs cannot, as on Kubernetes without JobSet
            problems.append(f"readings of runs are missing: {error}")
            return [*self._runs, *more]

    def _find_minute_reading(self, name: str, node: BackendNode | None) -> LatestReading | None:
        host_names = () if node is None else node.host_names
        minutes = (self._newest_minutes.get(each) for each in (name, *host_names))
        return find_newest_reading(None if minute is None else reading_from_minute(minute) for minute in minutes)


class NodeReader:
    """Reads the nodes. `update` reads once; `start` and `stop` have a thread do so, which opens what it reads by
    `open_fleet`, and calls `on_end` at its end."""

    def __init__(self, open_fleet: Callable[[], Callable[[], FleetView]], on_end: Callable[[], None] = lambda: None):
        self._open_fleet, self._on_end = open_fleet, on_end
        self._read: Callable[[], FleetView] | None = None
        self.view = FleetView(is_read=False, is_current=False)
        self._stop_requested = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)

    def start(self) -> None:
        """Keep the nodes up to date in a thread."""
        self._thread.start()

    def stop(self) -> None:
        self._stop_requested.set()
        self._thread.join(STOP_TIMEOUT_S)

    def update(self) -> None:
        """Read the nodes once. Nodes that cannot be read stay as they were, with a problem."""
        try:
            self._read = self._read or self._open_fleet()
            self.view = self._read()
        except PhalanxError as error:
            self.view = FleetView(self.view.nodes, [str(error)], is_current=False)
        except Exception as error:  # the thread must not end: the next reading may succeed
            logger.exception("serve: the nodes cannot be read")
            self.view = FleetView(self.view.nodes, [f"the nodes cannot be read: {error}"], is_current=False)

    def _run(self) -> None:
        while not self._stop_requested.is_set():
            self.update()
            self._stop_requested.wait(READ_INTERVAL_S)
        self._on_end()


@dataclass(frozen=True)
class NodeDetails:
    """A node with its history. Of this machine, also all readings now."""

    node: FleetNode
    history: list[NodeChange]
    here: NodeReading | None


def read_node_details(
    sources: FleetSources,
    states: NodeStates,
    name: str,
    read_here: Callable[[], NodeReading] = read_local_node,
    now: Callable[[], float] = time.time,
) -> tuple[NodeDetails, Sequence[str]]:
    """Return all about a node, and what could not be read. Raises UsageError for a name that no source has."""
    is_here = name == find_node_name()
    here = read_here() if is_here else None
    reader = FleetReader(sources, states, lambda: here.sample if here is not None else read_here().sample, now)
    with contextlib.closing(reader):
        view = reader.read()
    node = next((node for node in view.nodes if node.name == name), None)
    if node is None:
        names = [node.name for node in view.nodes]
        near = get_close_matches(name, names) or names[:MAX_SUGGESTED_NAMES]
        raise UsageError(f"{name}: no such node; nearest are {', '.join(near)} (`phalanx nodes ls` lists all)")
    problems = view.problems if here is None else [*here.problems, *view.problems]
    return NodeDetails(node, states.history(name), here), problems


def drain_node(
    backend: NodeBackend, states: NodeStates, name: str, reason: str, actor: str, for_repair: bool = False
) -> BackendNode:
    """Drain a node through its backend, and record it; or that it is in repair. Returns the node as it was before.

    Raises UsageError for a node that the backend does not have, that is drained already, or that this user may not
    drain.
    """
    _check_reason(name, reason)
    node = find_node(backend.list_nodes(), name, backend.name)
    state = states.find_state(name)
    target = NodeState.REPAIR if for_repair else NodeState.DRAINED
    if state in (target, NodeState.TESTING) and node.service is NodeService.DRAINED:
        _, why = merge_state(node, states.find(name))
        raise UsageError(f"{name}: is {state} already: {why}; `phalanx nodes undrain {name}` takes it back")
    backend.drain_node(name, reason, actor)
    if for_repair and state not in OUT_OF_SERVICE:
        states.change(name, NodeState.DRAINED, reason, actor)
    if state not in (target, NodeState.TESTING):
        states.change(name, target, reason, actor)
    return node


def undrain_node(backend: NodeBackend, states: NodeStates, name: str, reason: str, actor: str) -> None:
    """Take a node back that is drained or suspect, through its backend, and record it.

    Raises UsageError for a node that the backend does not have, that is neither, or that this user may not undrain.
    """
    _check_reason(name, reason)
    node = find_node(backend.list_nodes(), name, backend.name)
    state = states.find_state(name)
    if state is NodeState.HEALTHY and node.service is not NodeService.DRAINED:
        raise UsageError(f"{name}: is neither drained nor suspect; {backend.name} calls it {node.state}")
    if node.service is NodeService.DRAINED:
        backend.undrain_node(name)
    if state is not NodeState.HEALTHY:
        states.change(name, NodeState.HEALTHY, reason, actor)


def _check_reason(node: str, reason: str) -> None:
    """Before the backend changes anything, since the table takes no change without a reason."""
    if not reason.strip() or not reason.isprintable():
        raise UsageError(f"{node}: reason {reason!r}: expected why, in one line of text")


def _by_name(nodes: list[BackendNode]) -> dict[str, BackendNode]:
    return {node.name: node for node in nodes}


@contextlib.contextmanager
def open_node_test(backend: NodeBackend, states: NodeStates, name: str, actor: str) -> Iterator[BackendNode]:
    """A drained node is under test during the block, which calls `record_node_test`; else it is drained again.

    Raises UsageError for a node that the backend does not have, or that is not drained.
    """
    node = find_node(backend.list_nodes(), name, backend.name)
    if node.service is not NodeService.DRAINED:
        raise UsageError(
            f"{name}: is not drained; {backend.name} calls it {node.state}. Drain it first: `phalanx nodes drain "
            f"{name} --reason TEXT --on {backend.name}`"
        )
    if states.find_state(name) in (NodeState.HEALTHY, NodeState.SUSPECT):  # it was drained without Phalanx
        states.change(name, NodeState.DRAINED, node.reason or f"was drained in {backend.name}", actor)
    if states.find_state(name) in (NodeState.DRAINED, NodeState.REPAIR):
        states.change(name, NodeState.TESTING, "phalanx doctor", actor)
    try:
        yield node
    finally:
        if states.find_state(name) is NodeState.TESTING:
            states.change(name, NodeState.DRAINED, "the test was interrupted", actor)


def record_node_test(
    backend: NodeBackend, states: NodeStates, node: BackendNode, report: NodeHealthReport, actor: str
) -> NodeState:
    """Record what the checks found on a node under test, and undrain it if it is fit. Returns its state.

    Raises UsageError for a report of another node, or from before the node was drained.
    """
    if report.node not in (node.name, *node.host_names):
        raise UsageError(f"the report is of {report.node}, expected {node.name}")
    drained_at = max(each.time for each in states.history(node.name) if each.state is NodeState.DRAINED)
    if report.written_at < drained_at:
        raise UsageError(f"{node.name}: the report is older than its drain; run `phalanx doctor --json` there again")
    if report.is_fit:
        backend.undrain_node(node.name)
        states.change(node.name, NodeState.HEALTHY, TESTED_REASON, actor)
        return NodeState.HEALTHY
    failed = [finding for finding in report.findings if finding.verdict.is_unfit]
    reason = "; ".join(f"{finding.check}: {finding.reason}" for finding in failed)
    states.change(node.name, NodeState.DRAINED, f"phalanx doctor: {reason}", actor)
    return NodeState.DRAINED
