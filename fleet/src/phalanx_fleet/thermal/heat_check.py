"""Find devices that run hotter than their kind or their own past: throttling, fouling, a dead fan, a dry plate."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from phalanx_fleet.thermal.device_heat import RECENT_S, DeviceHeat, measure_heat
from phalanx_fleet.thermal.device_series import DAY_S, DeviceSeries, average_steady
from phalanx_fleet.thermal.fit import ThermalModelFile

HOT_K = 8.0
"""Excess at load that is a fault: more than two errors (3 K) of a model by kind and a warm inlet."""
MIN_RESISTANCE_RATIO = 1.25
"""Servers of one kind differ by up to 15 %."""


class HeatCause(StrEnum):
    """What most likely makes a device hot."""

    THROTTLING = "throttling"
    FAILED_FAN = "failed fan"
    LOST_COOLING = "fan or flow lost"
    FOULING = "fouling"
    DRY_PLATE = "dry plate"
    WARM_INLET = "warm inlet"


ADVICE_BY_CAUSE = {
    HeatCause.THROTTLING: "lower its power cap, or its inlet temperature; look for blocked air or a loose heat sink",
    HeatCause.FAILED_FAN: "replace the fan",
    HeatCause.LOST_COOLING: "it came within a day: look for a dead fan, a closed valve or a missing blanking panel",
    HeatCause.FOULING: "it came slowly: clean filters and fins, or flush the cold plates",
    HeatCause.DRY_PLATE: "other devices of the node are as cool as their kind: seat the heat sink or cold plate again",
    HeatCause.WARM_INLET: "it is hot at rest, too: measure the inlet; look for recirculated air or a warm supply",
}


@dataclass(frozen=True)
class HeatFinding:
    """A device that is not as it was, or not as its kind. `loses_speed`: it throttles now."""

    node: str
    device: str
    cause: HeatCause
    text: str
    loses_speed: bool

    @property
    def advice(self) -> str:
        """What to do."""
        return ADVICE_BY_CAUSE[self.cause]


@dataclass(frozen=True)
class HeatCheck:
    """All devices, the findings, and what could not be checked."""

    devices: list[DeviceHeat]
    findings: list[HeatFinding]
    problems: list[str]


def check_heat(series: Sequence[DeviceSeries], model: ThermalModelFile, recent_s: float = RECENT_S) -> HeatCheck:
    """Compare the recent samples of each device with its kind and with its own past."""
    devices, problems = [], []
    newest = max((float(each.time_s[-1]) for each in series), default=0.0)
    for each in series:
        kind = model.kinds.get(each.kind)
        if kind is None:
            known = ", ".join(model.kinds) or "none"
            problems.append(f"{each.name}: the model has no kind {each.kind!r} (it has {known})")
            continue
        if newest - each.time_s[-1] > DAY_S:
            days = (newest - each.time_s[-1]) / DAY_S
            problems.append(f"{each.name}: its newest sample is {days:.0f} days older than those of others")
        devices.append(measure_heat(average_steady(each), kind, recent_s))
    findings = []
    for device in devices:
        peers = [each for each in devices if each.node == device.node and each is not device]
        found = judge_heat(device, peers)
        if found is not None:
            findings.append(found)
    return HeatCheck(devices, findings, problems)


def judge_heat(device: DeviceHeat, peers: Iterable[DeviceHeat]) -> HeatFinding | None:
    """Return what is wrong with a device; None for one that is as its kind and its past. `peers`: the other devices of
    its node."""
    cause = _find_cause(device, [each for each in peers if each.excess_k is not None])
    if device.plateau is not None:
        plateau = device.plateau
        text = (
            f"is pinned at {plateau.temperature_c:.0f} °C in {plateau.num_samples} samples while its power floats "
            f"around {plateau.power_w:.0f} W"
        )
        if cause is not None and device.excess_k is not None and cause is not HeatCause.FAILED_FAN:
            text += f"; below that it is {device.excess_k:.0f} K hotter than its kind ({cause})"
        if device.idle_s > 0:
            days = device.idle_s / DAY_S
            text += f"; it has had no load since, for {f'{days:.0f} days' if days >= 1.5 else f'{24 * days:.0f} hours'}"
        return HeatFinding(device.node, device.device, HeatCause.THROTTLING, text, loses_speed=device.idle_s == 0)
    if cause is None:
        return None
    if cause is HeatCause.FAILED_FAN:
        text = f"reports {device.failed_fans} failed fans"
    else:
        text = ", ".join(_describe(device))
    return HeatFinding(device.node, device.device, cause, text, loses_speed=False)


def _find_cause(device: DeviceHeat, peers: Sequence[DeviceHeat]) -> HeatCause | None:
    if device.failed_fans > 0:
        return HeatCause.FAILED_FAN
    if _is_hot(device):
        if _has_warm_inlet(device):
            return HeatCause.WARM_INLET
        if peers and not any(map(_is_hot, peers)):
            return HeatCause.DRY_PLATE
        return HeatCause.LOST_COOLING if device.is_sudden else HeatCause.FOULING
    if device.inlet_change_k is not None and device.inlet_change_k >= HOT_K:
        return HeatCause.WARM_INLET  # by its sensor; with a T0 over the inlet there is no excess
    is_hot_at_rest = device.idle_excess_k is not None and device.idle_excess_k >= HOT_K
    return HeatCause.WARM_INLET if is_hot_at_rest and device.excess_k is None else None


def _is_hot(device: DeviceHeat) -> bool:
    above_kind = device.excess_k is not None and device.excess_k >= HOT_K
    above_past = device.change_k is not None and device.change_k >= HOT_K
    return above_kind or above_past


def _has_warm_inlet(device: DeviceHeat) -> bool:
    """Whether a rise comes from what enters the node, not from its own resistance."""
    if device.inlet_change_k is not None and device.change_k is not None:
        return device.inlet_change_k >= 0.5 * device.change_k
    if device.r_ratio is not None:
        rest_k = 0.0 if device.idle_excess_k is None else device.idle_excess_k
        is_hot_at_rest = rest_k >= max(HOT_K, device.excess_k or 0.0) / 2  # an inlet warms both by as much
        return device.r_ratio < MIN_RESISTANCE_RATIO and is_hot_at_rest
    return False


def _describe(device: DeviceHeat) -> Iterable[str]:
    if device.excess_k is not None:
        yield f"is {device.excess_k:+.0f} K against its kind at the same power"
    if device.change_k is not None:
        yield f"{device.change_k:+.0f} K against its own past"
    if device.excess_k is None and device.idle_excess_k is not None:
        yield f"is {device.idle_excess_k:+.0f} K against its kind at rest"
    if device.inlet_change_k is not None and device.inlet_change_k >= HOT_K:
        yield f"its inlet is {device.inlet_change_k:+.0f} K against its own past"
    if device.r_ratio is not None:
        yield f"resistance {device.r_ratio:.2f} of its kind's"
