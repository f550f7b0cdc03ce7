"""What a guard knows of each node, and so what it must count. Pure: requests, reports and times in, caps out.

A raise that was sent counts from then on; a lowering counts once it is read back. Ages count from when a request was
sent, by the guard's own clock: no clock of a node is compared with it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx_fleet.power.messages import NodeReport, NodeRequest

CAP_ROUNDING_W = 1.0
"""Devices round caps to a watt or less."""
MAX_REQUESTS_KEPT = 64
"""Requests of a node that may be without an answer; what is older is late, and so missing."""


@dataclass
class NodeAccount:
    """What is known of a node, for the guard with `epoch` and `writer`."""

    epoch: int
    writer: str
    fresh_s: float
    next_seq: int = 1
    report: NodeReport | None = None
    reported_at: float = float("-inf")
    """When the request of the newest report was sent."""
    requests: "OrderedDict[int, tuple[float, NodeRequest]]" = field(default_factory=OrderedDict)

    def add_request(self, request: NodeRequest, now: float) -> None:
        """Remember a request before it is sent."""
        self.requests[request.seq] = now, request
        self.next_seq = request.seq + 1
        while len(self.requests) > MAX_REQUESTS_KEPT:
            self.requests.popitem(last=False)

    def add_report(self, report: NodeReport) -> bool:
        """Take a report; return whether it is newer than the last one. One that answers no request of this guard, or
        an older one than was answered, is late."""
        found = self.requests.get(report.seq)
        if found is None or (self.report is not None and report.seq <= self.report.seq):
            return False
        self.report, self.reported_at = report, found[0]
        for seq in [seq for seq in self.requests if seq < report.seq and seq not in self._orders_in_flight(report)]:
            del self.requests[seq]
        return True

    def is_owned(self) -> bool:
        """Whether this guard is the node's writer, as far as it knows."""
        return self.report is not None and (self.report.epoch, self.report.writer) == (self.epoch, self.writer)

    def is_lost(self) -> bool:
        """Whether another guard is the node's writer, by an epoch that is not below this guard's."""
        return self.report is not None and self.report.writer != self.writer and self.report.epoch >= self.epoch

    def is_fresh(self, now: float) -> bool:
        """Whether the node may be believed: it is owned, and its report is not late."""
        return self.report is not None and self.is_owned() and now - self.reported_at <= self.fresh_s

    def bound_caps(self, now: float, num_devices: int, fallback_w: Sequence[float] = ()) -> list[float | None]:
        """Return the most that each device may be enforcing; None for a silent one.

        A node of which someone else has set a cap takes no orders. Its keeper lowers each device to `fallback_w` when
        its lease has ended: from then on it counts at that; before, each device counts as silent.
        """
        report = self.report
        if report is None or not self.is_fresh(now) or len(report.devices) != num_devices:
            return [None] * num_devices
        bounds = [device.cap_w for device in report.devices]
        if report.foreign_change:
            held = list(zip(bounds, fallback_w, strict=False)) if report.lease_left_s <= 0 else []
            is_held = len(held) == num_devices and all(b is not None and b <= f + CAP_ROUNDING_W for b, f in held)
            return [f + CAP_ROUNDING_W for _, f in held] if is_held else [None] * num_devices
        for seq in self._orders_in_flight(report):
            caps = self.requests[seq][1].caps_w or ()
            bounds = [None if bound is None else max(bound, cap) for bound, cap in zip(bounds, caps, strict=True)]
        return bounds

    def _orders_in_flight(self, report: NodeReport) -> Sequence[int]:
        """Orders that the node may carry out after this report: newer than what it has seen, of the same session."""
        return [
            seq
            for seq, (_, request) in self.requests.items()
            if seq > report.newest_seq and request.caps_w is not None and request.session == report.session
        ]
