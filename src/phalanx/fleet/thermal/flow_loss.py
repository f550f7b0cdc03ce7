"""What happens when coolant is lost: how long devices have, and what to do in which order.

Without flow a device heats its own mass, C dT/dt = P: seconds, not minutes. So software reports, stops scheduling and
saves if there is time; the hardware protects itself. Nothing here acts: it returns events.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

DETECTION_S = 2.0
"""Two samples of a second: one alone may be an error of a sensor."""
POWER_OFF_S = 1.0
"""From the request to the backend until the node draws nothing."""
MARGIN_FOR_POWER_OFF_K = 2.0
"""Power is off this far below the limit of the hardware."""


class CoolingFault(StrEnum):
    """What a node's sensors report."""

    LEAK = "leak"
    NO_FLOW = "no flow"
    NO_MARGIN = "no margin"


class CoolingAction(StrEnum):
    """What follows, in this order."""

    REPORT = "report"
    STOP_SCHEDULING = "stop scheduling"
    REQUEST_ISOLATION = "request isolation"
    SAVE_CHECKPOINT = "save checkpoint"
    POWER_OFF = "power off"


@dataclass(frozen=True)
class HeatCapacity:
    """A device with its cold plate: 300 to 600 J/K for one of 1 kW."""

    heat_j_per_k: float
    power_w: float
    temperature_c: float
    limit_c: float
    """From which the hardware shuts down."""
    rise_k: float = 35.0
    """Core over coolant at this power and full flow."""

    def find_seconds(self, limit_c: float, flow_share: float = 0.0) -> float:
        """Return seconds until a temperature at constant power; infinity if it stays below. Flow that remains removes
        heat in proportion to it, and to how much warmer the core is than it was at full flow."""
        if self.temperature_c >= limit_c:
            return 0.0
        surplus_w = self.power_w * (1 - flow_share)
        conductance = flow_share * self.power_w / self.rise_k
        end_rise_k = surplus_w / conductance if conductance > 0 else math.inf
        target_k = limit_c - self.temperature_c
        if end_rise_k <= target_k:
            return math.inf
        if conductance == 0:
            return self.heat_j_per_k * target_k / self.power_w
        return -self.heat_j_per_k / conductance * math.log(1 - target_k / end_rise_k)

    def find_temperature(self, time_s: float, flow_share: float = 0.0) -> float:
        """Return the core temperature after a time at constant power."""
        surplus_w, conductance = self.power_w * (1 - flow_share), flow_share * self.power_w / self.rise_k
        if conductance == 0:
            return self.temperature_c + surplus_w * time_s / self.heat_j_per_k
        return self.temperature_c + surplus_w / conductance * -math.expm1(-conductance * time_s / self.heat_j_per_k)


@dataclass(frozen=True)
class CoolingEvent:
    """An action at `time_s` after the fault, and the core temperature then if nothing was done before."""

    time_s: float
    action: CoolingAction
    temperature_c: float
    text: str


@dataclass(frozen=True)
class ResponseWindow:
    """Seconds after a fault until power must be off, until it has to be asked for, and until the fault is known."""

    deadline_s: float
    latest_off_s: float
    detected_s: float

    @property
    def spare_s(self) -> float:
        """Between the detection and the last moment to ask for power off."""
        return self.latest_off_s - self.detected_s


def find_response_window(
    fault: CoolingFault, device: HeatCapacity, flow_share: float = 0.0, detection_s: float = DETECTION_S
) -> ResponseWindow:
    """Return the seconds that a fault leaves; arguments as of `plan_response`."""
    deadline = device.find_seconds(device.limit_c - MARGIN_FOR_POWER_OFF_K, flow_share)
    if fault is CoolingFault.NO_MARGIN:
        deadline = min(deadline, DETECTION_S)  # it is at its limit now
    latest_off = max(deadline - POWER_OFF_S, 0.0)
    return ResponseWindow(deadline, latest_off, min(detection_s, latest_off))


def plan_response(
    fault: CoolingFault,
    device: HeatCapacity,
    save_s: float | None,
    flow_share: float = 0.0,
    detection_s: float = DETECTION_S,
) -> list[CoolingEvent]:
    """Return what to do after a fault, in order and with times.

    Args:
        fault: A leak is isolated and powered off whatever the temperature; the others are a race with it.
        device: The hottest device of the node.
        save_s: Seconds that a checkpoint takes; None without a job. Without the time for it, the last one counts.
        flow_share: Flow that remains.
        detection_s: From the state of `device` until the fault is known; 0 for a state at that time.
    """
    window = find_response_window(fault, device, flow_share, detection_s)
    deadline, latest_off, detected = window.deadline_s, window.latest_off_s, window.detected_s
    actions = [
        (detected, CoolingAction.REPORT, f"{fault}: {_describe_deadline(deadline)}"),
        (detected, CoolingAction.STOP_SCHEDULING, "no job starts on this node"),
    ]
    if fault is CoolingFault.LEAK:
        actions.append((detected, CoolingAction.REQUEST_ISOLATION, "the building decides"))
    off = detected
    if save_s is not None and detected + save_s <= latest_off:
        actions.append((detected, CoolingAction.SAVE_CHECKPOINT, f"takes {save_s:.0f} s"))
        off = detected + save_s
    actions.append((off, CoolingAction.POWER_OFF, "through the backend"))
    return [
        CoolingEvent(time, action, device.find_temperature(time, flow_share), text) for time, action, text in actions
    ]


def _describe_deadline(seconds: float) -> str:
    return "temperature stays below its limit" if seconds == math.inf else f"{seconds:.0f} s until power must be off"
