"""What a guard reports on a bus in the form of NVIDIA's DSX Flex: the state of feeds, breaches, and what was done."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.fleet.power.breaches import Breach, BreachTracker
from phalanx.fleet.power.claims import claim_node
from phalanx.fleet.power.flex_bus import OutgoingMessage
from phalanx.fleet.power.flex_messages import (
    BREACH_TYPE,
    ENFORCEMENT_TYPE,
    STATUS_TYPE,
    JsonObject,
    format_target,
    format_time,
    format_watts,
    make_event,
)
from phalanx.fleet.power.load_targets import LoadTarget, find_active_targets
from phalanx.fleet.power_tree import NO_PARENT, PowerTree

STATUS_INTERVAL_S = 60.0


@dataclass(frozen=True)
class FeedReport:
    """Watts of the levels by label in a step. `is_changing`: whether caps or jobs are still on their way.
    `paused_nodes`: nodes of jobs that are paused."""

    claims_w: Mapping[str, float]
    measured_w: Mapping[str, float]
    is_changing: bool
    paused_nodes: Sequence[str] = ()


class FlexReporter:
    """Publishes what changes, and the state of all feeds once a minute."""

    def __init__(self, agent: str, tree: PowerTree, publish: Callable[[OutgoingMessage], None], margin: float):
        self._agent, self._tree, self._publish = agent, tree, publish
        self._feeds = {level.label: level for level in tree.levels if level.kind == "feed"}
        lowest = [
            claim_node(node.power, [node.power.device_min_cap_w or 0.0] * node.power.num_devices, margin)
            for node in tree.nodes
        ]
        labels = [level.label for level in tree.levels]
        self._lowest_w = dict(zip(labels, tree.sum_by_level(lowest), strict=True))
        self._highest_w = dict(zip(labels, tree.sum_by_level([node.power.max_w for node in tree.nodes]), strict=True))
        self._breaches = BreachTracker()
        self._limits: dict[str, float | None] = {}
        self._known: Sequence[LoadTarget] = ()
        self._ramps: dict[str, str] = {}
        self._next_status_s = 0.0
        self._paused: dict[str, tuple[str, ...]] = {}

    def report(self, targets: Sequence[LoadTarget], found: FeedReport, unix_time_s: float) -> list[Breach]:
        """Publish what has changed since the last step; return the breaches that have."""
        active = find_active_targets(targets, unix_time_s)
        events = self._find_events(targets, active, found.is_changing)
        if any(event != "periodic" for event in events.values()) or unix_time_s >= self._next_status_s:
            self._next_status_s = unix_time_s + STATUS_INTERVAL_S
            feeds = {
                level.name: self._describe_feed(label, targets, active, found, events[label])
                for label, level in self._feeds.items()
            }
            data = {"snapshot_time": format_time(unix_time_s), "feeds": feeds}
            self._send("powerstate/status", STATUS_TYPE, "powerstate", data, unix_time_s)
        of_feeds = {label: target for label, target in active.items() if label in self._feeds}
        changed = self._breaches.update(of_feeds, found.measured_w, unix_time_s)
        for breach in changed:
            self._report_breach(breach, found.paused_nodes, unix_time_s)
        return changed

    def _send(self, topic: str, type: str, subject: str, data: JsonObject, now: float, of: str = "") -> None:
        qos: Literal[1, 2] = 1 if type == STATUS_TYPE else 2
        path = f"grid/v1/dsx-flex-agent/{self._agent}/{topic}"
        self._publish(OutgoingMessage(path, make_event(type, self._agent, subject, data, now, of), qos))

    def _find_events(
        self, targets: Sequence[LoadTarget], active: Mapping[str, LoadTarget], is_changing: bool
    ) -> dict[str, str]:
        """The reason for a report of each feed."""
        is_new, self._known = list(targets) != list(self._known), list(targets)
        events = {}
        for label in self._feeds:
            target = active.get(label)
            limit_w, before_w = None if target is None else target.limit_w, self._limits.get(label)
            event = "target_set" if is_new else "periodic"
            if limit_w != before_w:
                is_down = limit_w is not None and (before_w is None or limit_w < before_w)
                event = "start_ramp_down" if is_down else "start_ramp_up"
                self._ramps[label] = event
            elif label in self._ramps and not is_changing:
                event = self._ramps.pop(label).replace("start", "end")
            self._limits[label] = limit_w
            events[label] = event
        return events

    def _describe_feed(
        self,
        label: str,
        targets: Sequence[LoadTarget],
        active: Mapping[str, LoadTarget],
        found: FeedReport,
        event: str,
    ) -> JsonObject:
        budget_w, target = self._feeds[label].budget_w, active.get(label)
        highest_w, claim_w = self._highest_w[label], found.claims_w.get(label, self._highest_w[label])
        return {
            "metadata": {
                "power_minimum": format_watts(self._lowest_w[label]),
                "power_maximum": format_watts(highest_w),
                "default_constraint": format_watts(highest_w if budget_w is None else budget_w),
            },
            "targets": [
                format_target(each, each is target)
                for each in targets
                if each.level == label and each.limit_w is not None
            ],
            "calculated_load": format_watts(claim_w),
            "in_flight": label in self._ramps,
            "event": event,
            "compliant": target is None or claim_w <= (target.limit_w or 0.0) + 1e-6,
        }

    def _report_breach(self, breach: Breach, paused_nodes: Sequence[str], now: float) -> None:
        """Publish a breach with the nodes that would be suspended, and what was suspended for it."""
        nodes, name = self._list_nodes(breach.target.level), self._feeds[breach.target.level].name
        timing = {"breach_id": breach.id, "detected_at": format_time(breach.detected_s)}
        if breach.resolved_s is not None:
            timing["resolved_at"] = format_time(breach.resolved_s)
        data: JsonObject = {
            "feed_tag": name,
            "status": breach.status,
            "severity": "critical" if breach.is_critical else "warning",
            "breach": timing,
            "target": {
                "correlation_id": breach.target.id,
                "load_constraint": format_watts(breach.target.limit_w or 0.0),
            },
            "measured_load": format_watts(breach.measured_w),
            "infrastructure_actions": [] if breach.status == "resolved" else ["SHUTDOWN_NODES"],
        }
        if breach.status != "resolved":
            data["shed_hints"] = [
                {"resource_id": node, "resource_type": "node", "action": "suspend", "priority": number}
                for number, node in enumerate((node for node in nodes if node not in paused_nodes), 1)
            ]
        self._send("powerbreach", BREACH_TYPE, "powerbreach", data, now, breach.target.id)
        paused = self._paused.pop(breach.id, None) or tuple(node for node in nodes if node in paused_nodes)
        if not paused:
            return
        if breach.status != "resolved":
            self._paused[breach.id] = paused
        enforcement: JsonObject = {
            "breach_id": breach.id,
            "feed_tag": name,
            "action": "applied",
            "code": "success",
            "results": [
                {"resource_id": node, "resource_type": "node", "requested_action": "suspend", "code": "applied"}
                for node in paused
            ],
            "timestamp": format_time(now),
        }
        self._send("powerbreach/enforcement", ENFORCEMENT_TYPE, "powerbreach", enforcement, now, breach.target.id)

    def _list_nodes(self, label: str) -> list[str]:
        """Names of the nodes behind a level."""
        found = []
        for node in self._tree.nodes:
            level = node.rack
            while level != NO_PARENT and self._tree.levels[level].label != label:
                level = self._tree.levels[level].parent
            if level != NO_PARENT:
                found.append(node.name)
        return found
