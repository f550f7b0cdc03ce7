"""Ask a local controller for a supply temperature: within limits, by steps, with heartbeats both ways.

It is a request. The controller verifies it, holds what it wants, and drops the request when our heartbeat stops: so a
session that ends in any way leaves nothing behind. Nothing here waits; clocks and channels are passed in.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

HEARTBEAT_INTERVAL_S = 10.0
HEARTBEAT_LIMIT_S = 3 * HEARTBEAT_INTERVAL_S
"""Age of the controller's own heartbeat or echo from which the request is withdrawn."""
HELD_TOLERANCE_K = 0.05


@dataclass(frozen=True)
class RequestLimits:
    """What may be asked for."""

    min_c: float
    max_c: float
    max_step_k: float
    step_interval_s: float


@dataclass(frozen=True)
class ControllerState:
    """What a controller says.

    `grant_problem`: why it does not take requests of ours, or has not said so. `set_point_c`: what it holds; None if
    that is not known. `heartbeat_age_s`: of its sign of life, or of its echo of ours; None before the first.
    """

    grant_problem: str | None
    set_point_c: float | None
    heartbeat_age_s: float | None
    is_operator_in_charge: bool = False


class RequestChannel(Protocol):
    """The way to one controller."""

    def read_state(self) -> ControllerState:
        """Return what the controller says now."""
        ...

    def describe_writes(self, supply_c: float) -> list[str]:
        """Return the exact writes of a request, in words."""
        ...

    def beat(self) -> None:
        """Send a heartbeat."""
        ...

    def request(self, supply_c: float) -> None:
        """Ask for a supply temperature."""
        ...

    def withdraw(self) -> None:
        """Ask for nothing any more."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...


@dataclass(frozen=True)
class RequestStatus:
    """A step. `requested_c`: what is asked for now; None before the controller's first sign of life, and where the
    request was withdrawn, for the reason `ended`."""

    requested_c: float | None
    set_point_c: float | None
    ended: str | None = None

    @property
    def is_followed(self) -> bool:
        """Whether the controller holds what is asked for."""
        known = self.requested_c is not None and self.set_point_c is not None
        return known and abs(float(self.requested_c or 0) - float(self.set_point_c or 0)) <= HELD_TOLERANCE_K


class RequestSession:
    """Asks for `target_c` until it is withdrawn. `clock`: seconds of a monotonic clock; `find_withdrawal` returns why
    an operator wants no requests, or None; `record` takes what was written, for the audit log."""

    def __init__(
        self,
        target_c: float,
        limits: RequestLimits,
        channel: RequestChannel,
        clock: Callable[[], float],
        find_withdrawal: Callable[[], str | None] = lambda: None,
        record: Callable[[dict[str, object]], None] = lambda fields: None,
    ):
        self._target_c, self._limits, self._channel, self._clock = target_c, limits, channel, clock
        self._find_withdrawal, self._record = find_withdrawal, record
        self._requested_c: float | None = None
        self._stepped_at: float | None = None
        self._began_at: float | None = None

    def find_refusal(self, state: ControllerState) -> str | None:
        """Return why nothing may be asked for; None if it may."""
        limits = self._limits
        if (withdrawal := self._find_withdrawal()) is not None:
            return withdrawal
        if not limits.min_c <= self._target_c <= limits.max_c:
            return (
                f"{self._target_c:g} °C is not within {limits.min_c:g} to {limits.max_c:g} °C, the limits of set_point"
            )
        if state.grant_problem is not None:
            return state.grant_problem
        if state.is_operator_in_charge:
            return "an operator has taken over"
        if state.set_point_c is None:
            return "the set point that the controller holds is not known, so a step cannot be bounded"
        return None

    def find_next_c(self, set_point_c: float) -> float:
        """Return the next request on the way from what the controller holds."""
        step_k = self._limits.max_step_k
        return min(max(self._target_c, set_point_c - step_k), set_point_c + step_k)

    def step(self) -> RequestStatus:
        """Send a heartbeat, and the next step when it is due. Call it each `HEARTBEAT_INTERVAL_S`. After a status with
        `ended` the session is over."""
        now, state = self._clock(), self._channel.read_state()
        self._began_at = now if self._began_at is None else self._began_at
        reason = self.find_refusal(state) or self._find_silence(state, now)
        if reason is not None:
            self.withdraw(reason)
            return RequestStatus(None, state.set_point_c, reason)
        self._channel.beat()
        if state.heartbeat_age_s is None:  # nothing is asked of a controller that has not answered yet
            return RequestStatus(None, state.set_point_c)
        assert state.set_point_c is not None
        base_c = state.set_point_c if self._requested_c is None else self._requested_c
        is_due = self._stepped_at is None or now - self._stepped_at >= self._limits.step_interval_s
        if is_due and (next_c := self.find_next_c(base_c)) != self._requested_c:
            self._requested_c, self._stepped_at = next_c, now
            self._record({"request_supply_c": next_c, "held_c": state.set_point_c, "target_c": self._target_c})
        if self._requested_c is not None:
            self._channel.request(self._requested_c)  # again: a controller may have missed it
        return RequestStatus(self._requested_c, state.set_point_c)

    def withdraw(self, reason: str) -> None:
        """Ask for nothing any more."""
        self._record({"withdraw": reason})
        self._requested_c = None
        self._channel.withdraw()

    def _find_silence(self, state: ControllerState, now: float) -> str | None:
        """Why the controller does not seem to live. Before its first echo it has as long as for any other."""
        assert self._began_at is not None
        age_s = now - self._began_at if state.heartbeat_age_s is None else state.heartbeat_age_s
        if age_s > HEARTBEAT_LIMIT_S:
            return f"the controller has given no sign of life for {age_s:.0f} s"
        return None
