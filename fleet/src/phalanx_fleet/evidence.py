"""What runs say about nodes, and evidence against nodes, from the minutes of their agents, the events of runs, and what
the building and their margins say of cooling. What counts, and what follows, is data/evidence.yaml."""

import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from ruamel.yaml import YAML

from phalanx.cluster.health.checks.kernel_log import XidAction, find_xid
from phalanx.errors import DataError, ExitCode
from phalanx.jobs.spec import JobState, JobStatus
from phalanx.run import Run
from phalanx.run.event_types import Event, StragglerDetected, WorkerFailure, WorkerStarted
from phalanx.run.events import LineTail, parse_event
from phalanx.run.telemetry_minutes import NodeMinute, NodeMinuteTail
from phalanx_fleet.fleet_node import LatestReading
from phalanx_fleet.node_states import NodeChange, NodeState, NodeStates
from phalanx_fleet.telemetry.service_reading import RackSample

COUNTER_EVIDENCE = {
    "ecc_uncorrected_total": ("ecc-uncorrected", "uncorrected memory errors"),
    "pcie_replays_total": ("pcie-replays", "PCIe replays"),
    "nvlink_errors_total": ("nvlink-errors", "NVLink errors"),
}
"""Counters of an accelerator that are evidence: its kind, and what is counted."""
ERRORS_PATTERN = re.compile(rb'"xids"|"(?:%s)":(?! *0(?:\.0)?[,}])' % "|".join(COUNTER_EVIDENCE).encode())
"""In the line of a minute with errors: Xid errors, or a counter that increased."""
EVIDENCE_ACTOR = "evidence"
"""Actor of a change that evidence made, in the history of a node."""
MAX_SHOWN_EVIDENCE = 3
MAX_REASON_CHARS = 500
"""Characters of a reason: names of devices are what a run says."""
logger = logging.getLogger(__name__)
MAX_MINUTES_BYTES = 16 << 20
"""Bytes of a node's minutes that are read at first, from the end: more than a day with 8 accelerators."""
MAX_EVENTS_BYTES = 16 << 20
"""Bytes of a run's events that are read at first, from the end: 40,000 steps."""
RELEVANT_EVENTS = (WorkerStarted, StragglerDetected, WorkerFailure)
RELEVANT_KINDS_PATTERN = re.compile(rb'"(?:%s)"' % "|".join(each.kind for each in RELEVANT_EVENTS).encode())
MAX_JOB_AGE_S = 24 * 3600.0
"""Seconds since the end of a job for which its run is read: what ended it may be its node's fault."""


@dataclass(frozen=True)
class EvidenceRule:
    """What follows from a kind of evidence, from the figure `at_least` on."""

    state: NodeState
    at_least: float
    advice: str


@dataclass(frozen=True)
class NodeEvidence:
    """Something speaks against a node, which an agent calls `node`, at `time` (seconds since the epoch)."""

    node: str
    kind: str
    time: float
    text: str


@cache
def read_evidence_table() -> Mapping[str, EvidenceRule]:
    """The rules by the kind of evidence."""
    rows = YAML(typ="safe", pure=True).load((files("phalanx_fleet") / "data/evidence.yaml").read_text())
    return {kind: EvidenceRule(NodeState(row["state"]), row["at_least"], row["advice"]) for kind, row in rows.items()}


def find_evidence(minutes: Iterable[NodeMinute], events: Iterable[Event]) -> list[NodeEvidence]:
    """Return what makes a node suspect, by time. `minutes` and `events` are those of one run, in order."""
    found = (*_find_in_minutes(minutes), *_find_in_events(events))
    return sorted(found, key=lambda evidence: evidence.time)


def apply_evidence(states: NodeStates, evidence: Iterable[NodeEvidence]) -> list[NodeChange]:
    """Bring healthy nodes with evidence into the state `suspect`, and return the changes. Evidence from before the
    newest change of a node was known when it changed: so to apply it again changes nothing."""
    by_node: dict[str, list[NodeEvidence]] = {}
    for each in evidence:
        by_node.setdefault(each.node, []).append(each)
    changes = []
    for node, items in by_node.items():
        last = states.find(node)
        new = [each for each in items if last is None or each.time > last.time]
        if not new or (last is not None and last.state is not NodeState.HEALTHY):
            continue
        texts = list(dict.fromkeys(each.text for each in new))
        more = f"; and {len(texts) - MAX_SHOWN_EVIDENCE} more" if len(texts) > MAX_SHOWN_EVIDENCE else ""
        reason = "; ".join(texts[:MAX_SHOWN_EVIDENCE])[:MAX_REASON_CHARS] + more
        change = states.change_healthy(node, NodeState.SUSPECT, reason, EVIDENCE_ACTOR)
        if change is not None:
            changes.append(change)
    return changes


def may_have_errors(line: bytes) -> bool:
    """Whether a line may be a minute with errors, by its bytes."""
    return ERRORS_PATTERN.search(line) is not None


def has_errors(minute: NodeMinute) -> bool:
    """Whether a minute may be evidence."""
    return any(
        device.xids or any(device.increases.get(column) for column in COUNTER_EVIDENCE)
        for device in minute.devices.values()
    )


def _find_in_minutes(minutes: Iterable[NodeMinute]) -> Iterator[NodeEvidence]:
    counts: Counter[tuple[str, str, int]] = Counter()
    for minute in minutes:
        for id, device in minute.devices.items():
            for number in device.xids:
                counts[minute.node, id, number] += 1
                yield from _judge_xid(minute, id, number, counts[minute.node, id, number])
            for column, (kind, noun) in COUNTER_EVIDENCE.items():
                count = device.increases.get(column, 0.0)
                text = f"{count:.0f} {noun} on {id} within a minute"
                yield from judge_evidence(minute.node, kind, minute.time, count, text)


def _judge_xid(minute: NodeMinute, id: str, number: int, count: int) -> Iterator[NodeEvidence]:
    """`count`: how many times this Xid came on this accelerator, so far. One that the catalog does not have says
    nothing."""
    entry = find_xid(number)
    if entry is None:
        return
    # the worse of both: what came back may ask for less than it did at first
    severity = list(XidAction).index
    action = entry.action if count == 1 else max(entry.action, entry.repeated, key=severity)
    kind = f"xid-{action}"
    again = "" if count == 1 else f", {count} times"
    yield from judge_evidence(minute.node, kind, minute.time, 1.0, f"Xid {number} on {id}{again} ({entry.meaning})")


def _find_in_events(events: Iterable[Event]) -> Iterator[NodeEvidence]:
    hosts: dict[int, str] = {}
    for event in events:
        if isinstance(event, WorkerStarted):
            hosts[event.rank] = event.host
        elif isinstance(event, StragglerDetected | WorkerFailure):
            node = event.host or hosts.get(event.rank)
            if node is not None:
                yield from _judge_event(event, node)


def _judge_event(event: StragglerDetected | WorkerFailure, node: str) -> Iterator[NodeEvidence]:
    if isinstance(event, StragglerDetected):
        text = f"rank {event.rank} takes {event.slowdown:.1f} times as long as its peers"
        yield from judge_evidence(node, "straggler", event.time, event.slowdown, text)
    elif event.cause == "gpu_failed":
        yield from judge_evidence(node, "gpu-failed", event.time, 1.0, f"the GPU of rank {event.rank} failed")
    elif event.cause == "exit_code" and event.exit_code == ExitCode.UNFIT_NODE:
        text = f"a run left it as unfit ({event.message})"
        yield from judge_evidence(node, "unfit-node", event.time, 1.0, text)


def judge_evidence(node: str, kind: str, time: float, figure: float, text: str) -> Iterator[NodeEvidence]:
    """Return the evidence of this kind with its advice where the figure makes a node suspect; else nothing."""
    rule = read_evidence_table().get(kind)
    if rule is not None and rule.state is NodeState.SUSPECT and figure >= rule.at_least:
        yield NodeEvidence(node, kind, time, f"{text}: {rule.advice}")


@dataclass(frozen=True)
class CoolingFinding:
    """Something is wrong with the cooling of a node. `kind`: of the table of evidence."""

    kind: str
    text: str


def find_cooling_findings(
    rack: str | None,
    samples: Sequence[RackSample],
    cdu_racks: Mapping[str, Sequence[str]],
    reading: LatestReading | None,
    now: float,
) -> list[CoolingFinding]:
    """Return what is wrong with a node's cooling; nothing where values are missing.

    Args:
        rack: The node's rack, if it is known.
        samples: The newest readings of racks and CDUs.
        cdu_racks: The racks that each CDU supplies.
        reading: The newest reading of the node.
        now: Seconds since the epoch.
    """
    found = []
    for sample in samples:
        is_cdu = sample.equipment == "CDU"
        if rack is None or (rack not in cdu_racks.get(sample.id, ()) if is_cdu else sample.id != rack):
            continue
        place = f"{sample.equipment} {sample.id}"
        if sample.has_leak:
            found.append(CoolingFinding("leak", f"{place} reports a leak"))
        if sample.flow_l_per_min == 0 and reading is not None and not reading.is_late(now):
            found.append(CoolingFinding("no-flow", f"{place} has no flow"))
    if reading is not None and not reading.is_late(now) and reading.margin_k is not None and reading.margin_k <= 0:
        found.append(CoolingFinding("throttling", "an accelerator is at the temperature from which it slows down"))
    return found


def make_cooling_evidence(node: str, findings: Iterable[CoolingFinding], now: float) -> list[NodeEvidence]:
    """Return the evidence in the findings of a node."""
    return [each for found in findings for each in judge_evidence(node, found.kind, now, 1.0, found.text)]


def list_run_directories(folder: Path) -> list[Path]:
    """Return the run directories in a folder; the folder itself, if it is one."""
    if _is_run(folder):
        return [folder]
    return sorted(path for path in folder.iterdir() if path.is_dir() and _is_run(path))


def select_recent_runs(statuses: Iterable[JobStatus], now: float) -> list[Path]:
    """Return the run directories of the jobs that run, or ended within the last day."""
    found: dict[Path, None] = {}
    for status in statuses:
        is_recent = status.ended_at is not None and now - status.ended_at < MAX_JOB_AGE_S
        if status.run_dir is not None and (status.state is JobState.RUNNING or is_recent):
            found[Path(status.run_dir)] = None
    return list(found)


class RunReadings:
    """The newest minutes of a run's nodes; what may be evidence against a node is kept."""

    def __init__(self, run: Run):
        self._run = run
        self._tails: dict[Path, NodeMinuteTail] = {}
        self._events: LineTail | None = None
        self._suspicious_minutes: list[NodeMinute] = []
        self._relevant_events: list[Event] = []

    def list_evidence(self) -> list[NodeEvidence]:
        """Return the evidence against nodes in what was read of minutes so far, and in the events until now."""
        self._read_events()
        return find_evidence(self._suspicious_minutes, self._relevant_events)

    def read_minutes(self) -> list[NodeMinute]:
        """Return the newest minute of each node, and those with errors before it since the last call, of each node in
        order. A file that is no file is left out."""
        found: list[NodeMinute] = []
        for path in self._list_minute_files():
            try:
                if path not in self._tails:
                    self._tails[path] = NodeMinuteTail(path, MAX_MINUTES_BYTES)
                found += self._tails[path].read_chosen(may_have_errors)
            except (OSError, DataError) as error:
                logger.debug("%s is not read: %s", path, error)
        self._suspicious_minutes += filter(has_errors, found)
        return found

    def _list_minute_files(self) -> list[Path]:
        folder = self._run.telemetry
        try:
            return [folder / name for name in sorted(os.listdir(folder)) if name.endswith(".jsonl")]
        except OSError as error:  # there are none yet, or this user may not read them
            logger.debug("%s is not read: %s", folder, error)
            return []

    def _read_events(self) -> None:
        try:
            if self._events is None:
                events = LineTail(self._run.events)
                events.skip(MAX_EVENTS_BYTES)
                self._events = events
            for line in self._events.read():
                if RELEVANT_KINDS_PATTERN.search(line) is None:  # most are steps, and to parse them takes seconds
                    continue
                event = parse_event(line.decode(errors="replace"))
                if isinstance(event, RELEVANT_EVENTS):
                    self._relevant_events.append(event)
        except (OSError, DataError) as error:
            logger.debug("%s is not read: %s", self._run.events, error)


def _is_run(path: Path) -> bool:
    """Whether a run is there that this user may read."""
    try:
        return Run(path).has_started()
    except PermissionError:
        return False
