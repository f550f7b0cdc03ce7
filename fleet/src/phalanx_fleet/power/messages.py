"""What a guard asks a node, and what the node answers. On a wire a message is a line of JSON."""

import json
from dataclasses import dataclass
from typing import TypeVar

from phalanx.run.fields import TypedMessage, read_as, to_fields

MAX_LINE_BYTES = 1 << 16
MAX_EPOCH = 1 << 40
"""Far more than guards are ever started: a node that reports more would leave no epoch above it to anyone."""
MessageT = TypeVar("MessageT", "NodeRequest", "NodeReport")


class WireError(Exception):
    """A line is no message of this protocol."""


@dataclass(frozen=True)
class DeviceCap:
    """One device. `cap_w`: the most that it may be enforcing, now and after a restart of the node; None where it does
    not answer."""

    id: str
    cap_w: float | None
    min_w: float
    max_w: float
    draw_w: float | None = None
    temperature_c: float | None = None


class NodeRequest(TypedMessage, kw_only=False):
    """A question to a node; with `caps_w` or `releases` an order.

    `seq` grows with each request of a writer. `epoch` and `writer`: by which authority. `takes_over`: become the
    writer, which needs an epoch above that of the last one. `session`: of the node, as its last report had
    it; an order for another session is refused, since it is older than the node's restart.
    """

    seq: int
    epoch: int
    writer: str
    takes_over: bool = False
    session: str = ""
    caps_w: tuple[float, ...] | None = None
    fallback_w: tuple[float, ...] | None = None
    lease_s: float = 0.0
    releases: bool = False
    """Without `caps_w`: give the devices their caps of before the first order, and end the control of this node."""
    reverts: bool = False
    """When the lease ends, the caps of before the first such order come back, instead of the fallback."""

    @property
    def is_order(self) -> bool:
        return self.caps_w is not None or self.releases


class NodeReport(TypedMessage, kw_only=False):
    """What a node answers. `seq`: of the request; `newest_seq`: the newest request that the node has seen of its
    writer, so that an older order that still travels has no effect."""

    node: str
    session: str
    seq: int
    newest_seq: int
    epoch: int
    writer: str
    devices: tuple[DeviceCap, ...] = ()
    original_w: tuple[float, ...] = ()
    """Caps before the first order."""
    lease_left_s: float = 0.0
    refusal: str = ""
    """Why an order was not carried out."""
    foreign_change: str = ""
    """What someone else changed."""
    problems: tuple[str, ...] = ()


def format_line(message: NodeRequest | NodeReport) -> bytes:
    return json.dumps(to_fields(message), separators=(",", ":")).encode() + b"\n"


def parse_request(line: bytes) -> NodeRequest:
    """Read a request. Raises WireError."""
    return _parse(line, NodeRequest)


def parse_report(line: bytes) -> NodeReport:
    """Read a report. Raises WireError."""
    report = _parse(line, NodeReport)
    if report.epoch > MAX_EPOCH:
        raise WireError(f"no {NodeReport.kind}: epoch {report.epoch}")
    return report


def _parse(line: bytes, kind: type[MessageT]) -> MessageT:
    try:
        found = json.loads(line[:MAX_LINE_BYTES])
        if found.get("kind") != kind.kind:
            raise ValueError(found.get("kind"))
        return read_as(kind, found)  # type: ignore[no-any-return]
    except (ValueError, OverflowError, AttributeError, RecursionError, KeyError, TypeError) as error:
        raise WireError(f"no {kind.kind}: {line[:200]!r} ({error})") from None
