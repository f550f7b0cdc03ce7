"""Ask the building for a supply temperature: `phalanx thermal request` and `withdraw`."""

import getpass
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.fleet.audit_log import write_audit
from phalanx.fleet.nodes_file import CduEntry, NodesFile, load_nodes_file
from phalanx.fleet.telemetry.modbus import ModbusError, PymodbusClient
from phalanx.fleet.telemetry.mqtt import AiomqttSubscriber, MqttOptions, open_subscriber
from phalanx.fleet.telemetry.source import SourceUnavailableError
from phalanx.fleet.thermal.bms_requests import REQUEST_TOPIC_FILTERS, BmsRequestChannel, BmsRequests
from phalanx.fleet.thermal.modbus_requests import ModbusRequestChannel
from phalanx.fleet.thermal.request_session import (
    HEARTBEAT_INTERVAL_S,
    ControllerState,
    RequestChannel,
    RequestLimits,
    RequestSession,
    RequestStatus,
)
from phalanx.run.private_files import state_root

METADATA_WAIT_S = 5.0
"""How long to wait for what the broker keeps; the building sends it again each 100 s."""
POLL_INTERVAL_S = 0.2


def thermal_state_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the audit log of requests is, and whether operators want none."""
    return state_root(environment) / "thermal"


@dataclass(frozen=True)
class CduRequest:
    """A request that may be made: its way, its limits, and what the controller says now."""

    cdu_id: str
    target_c: float
    limits: RequestLimits
    channel: RequestChannel
    state: ControllerState


def open_request(nodes: Path, cdu_id: str, target_c: float, sleep: Callable[[float], None] = time.sleep) -> CduRequest:
    """Open the way to a CDU's controller, and read what it says. Nothing is written.

    Raises:
        UsageError: There is no such CDU, nothing may be requested of it, or it cannot be reached.
    """
    file = load_nodes_file(nodes)
    cdu = next((each for each in file.cdus if each.id == cdu_id), None)
    if cdu is None:
        known = ", ".join(each.id for each in file.cdus) or "none"
        raise UsageError(f"{nodes}: no CDU {cdu_id} (cdus has {known})")
    if cdu.set_point is None:
        raise UsageError(f"{nodes}: {cdu_id}: add set_point: {{min_c: 25, max_c: 40}}; without it nothing is requested")
    try:
        channel = _open_channel(nodes, file, cdu)
        state = channel.read_state()
        until = time.monotonic() + METADATA_WAIT_S
        while (state.grant_problem or state.set_point_c is None) and cdu.modbus is None and time.monotonic() < until:
            sleep(POLL_INTERVAL_S)
            state = channel.read_state()
    except (SourceUnavailableError, ModbusError) as error:
        raise UsageError(f"{cdu_id}: {error}") from None
    return CduRequest(cdu_id, target_c, RequestLimits(**cdu.set_point.model_dump()), channel, state)


def make_session(request: CduRequest, clock: Callable[[], float] = time.monotonic) -> RequestSession:
    """Return the session of a request, with this user's audit log and withdrawal."""
    folder = thermal_state_dir()

    def record(fields: dict[str, object]) -> None:
        line = {"cdu": request.cdu_id, **fields}
        write_audit(folder / "audit.jsonl", [line])

    return RequestSession(request.target_c, request.limits, request.channel, clock, find_withdrawal, record)


def hold_request(
    session: RequestSession,
    duration_s: float | None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[RequestStatus]:
    """Send heartbeats and steps; yield each. Ends after `duration_s`, when the controller is silent, or when an
    operator takes over or withdraws. The request is withdrawn however this ends."""
    end, reason = clock() + (float("inf") if duration_s is None else duration_s), "ended by its user"
    status = None
    try:
        while clock() < end:
            status = session.step()
            yield status
            if status.ended is not None:
                return
            sleep(min(HEARTBEAT_INTERVAL_S, max(0.0, end - clock())))
        reason = "its time is over"
    except (OSError, ModbusError) as error:
        reason = str(error)
        raise UsageError(f"{error}; the request lapses when the controller misses the heartbeat") from None
    finally:
        if status is None or status.ended is None:
            _withdraw_quietly(session, reason)


def set_withdrawal(reason: str | None) -> Path:
    """Have all requests of this user's fleet withdrawn within a heartbeat, and refuse new ones; None allows them."""
    path = _withdrawal_path()
    if reason is None:
        path.unlink(missing_ok=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"reason": reason, "user": getpass.getuser(), "time": time.time()}))
    fields = {"withdrawal": reason} if reason is not None else {"withdrawal_ended": True}
    write_audit(path.parent / "audit.jsonl", [fields])
    return path


def find_withdrawal() -> str | None:
    """Return why an operator wants no requests; None if there may be some. A file that cannot be read counts."""
    path = _withdrawal_path()
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
        return f"withdrawn by {found['user']}: {found['reason']} (`phalanx thermal withdraw --end` allows requests)"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"withdrawn: {path} cannot be read ({error}); `phalanx thermal withdraw --end` allows requests"


def _withdrawal_path() -> Path:
    return thermal_state_dir() / "withdrawn.json"


def _withdraw_quietly(session: RequestSession, reason: str) -> None:
    """A controller that cannot be reached any more drops the request when it misses the heartbeat."""
    try:
        session.withdraw(reason)
    except (OSError, ModbusError):
        return


def _open_channel(path: Path, file: NodesFile, cdu: CduEntry) -> RequestChannel:
    if cdu.modbus is not None:
        assert cdu.modbus.request is not None  # the file is checked
        client = PymodbusClient(cdu.modbus)
        return ModbusRequestChannel(client, cdu.modbus.request, cdu.modbus.points["set_point_c"])
    if file.mqtt is None or file.mqtt.integration is None:
        raise UsageError(f"{path}: mqtt: add integration: NAME, as the building has given it to Phalanx")
    requests, bus = open_bus_requests(MqttOptions(**file.mqtt.model_dump()))
    return BmsRequestChannel(requests, cdu.id, bus.stop)


def open_bus_requests(options: MqttOptions) -> tuple[BmsRequests, AiomqttSubscriber]:
    """Join the bus as the integration that `options` names. Raises SourceUnavailableError or UsageError."""
    bus = open_subscriber(options)
    requests = BmsRequests(options.integration or "", bus)
    bus.start(REQUEST_TOPIC_FILTERS, requests.receive)
    return requests, bus
