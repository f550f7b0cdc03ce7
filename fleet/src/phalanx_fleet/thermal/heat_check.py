"""Find devices that run hotter than their kind or their own past: throttling, fouling, a dead fan, a dry plate."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from phalanx_fleet.thermal.device_series import DAY_S, DeviceSeries, Values, average_steady
from phalanx_fleet.thermal.fit import KindConstants, TemperaturePlateau, ThermalModelFile, find_plateau, fit_device

RECENT_S = 7 * DAY_S
PAST_S = 28 * DAY_S
"""Own past: the time before the recent days."""
LOADED_SHARE = 0.5
"""Of the kind's most power, from which a sample is at load."""
IDLE_SHARE = 0.3
MIN_LOADED_SAMPLES = 6
NEWEST_SAMPLES = 24
"""Samples at load, or at rest, of which the median is a device's excess now: a fault of today must not wait until it
is half of a week."""
MIN_POWER_SPAN_SHARE = 0.3
"""Of the kind's most power, between the 5 % and 95 % quantiles: below it a slope says nothing."""
HOT_K = 8.0
"""Excess at load that is a fault: more than two errors (3 K) of a model by kind and a warm inlet."""
MIN_RESISTANCE_RATIO = 1.25
"""Servers of one kind differ by up to 15 %."""


@dataclass(frozen=True)
class DeviceHeat:
    """A device over its recent samples. None: too few samples to say."""

    node: str
    device: str
    kind: str
    num_samples: int
    newest_s: float
    idle_s: float
    """Seconds at rest before its newest sample: it is judged by its newest days with load."""
    temperature_c: float
    """Most, recently."""
    power_w: float
    """At that sample."""
    excess_k: float | None
    """At load, above what the kind has at the same power (median)."""
    idle_excess_k: float | None
    """The same at rest."""
    change_k: float | None
    """At load, above its own past at the same power."""
    is_sudden: bool
    """Whether most of that change came within a day."""
    r_ratio: float | None
    """Its resistance over that of its kind."""
    inlet_change_k: float | None
    """Of the inlet against its own past, where it is measured."""
    plateau: TemperaturePlateau | None
    failed_fans: int

    @property
    def name(self) -> str:
        return f"{self.node} {self.device}"


def measure_heat(series: DeviceSeries, kind: KindConstants, recent_s: float = RECENT_S) -> DeviceHeat:
    """Measure a device's heat from hours or minutes (`average_steady`)."""
    newest = float(series.time_s[-1])
    end = _find_end_of_load(series, kind, recent_s)
    recent = series.select((series.time_s > end - recent_s) & (series.time_s <= end))
    past = series.select((series.time_s <= end - recent_s) & (series.time_s > end - recent_s - PAST_S))
    at_end = series.select(series.time_s > newest - recent_s)
    plateau, past_plateau = (find_plateau(each, kind.r_k_per_w) for each in (recent, past))
    free = recent if plateau is None else recent.select(~plateau.is_throttled)
    past = past if past_plateau is None else past.select(~past_plateau.is_throttled)
    excess = _median_excess(free, kind, at_load=True)
    past_excess = _median_excess(past, kind, at_load=True, newest=len(past.time_s))
    change = None if excess is None or past_excess is None else excess - past_excess
    hottest = int(np.argmax(recent.temperature_c))
    fans = at_end.failed_fans[~np.isnan(at_end.failed_fans)]
    return DeviceHeat(
        node=series.node,
        device=series.device,
        kind=series.kind,
        num_samples=len(recent.time_s),
        newest_s=newest,
        idle_s=newest - end,
        temperature_c=float(recent.temperature_c[hottest]),
        power_w=float(recent.power_w[hottest]),
        excess_k=excess,
        idle_excess_k=_median_excess(at_end, kind, at_load=False),
        change_k=change,
        is_sudden=change is not None and _is_sudden(past, free, kind, change),
        r_ratio=_find_resistance_ratio(free, kind),
        inlet_change_k=_find_inlet_change(recent, past),
        plateau=plateau,
        failed_fans=int(fans[-1]) if len(fans) else 0,  # the newest reading: a fan may have been replaced
    )


def find_t0(series: DeviceSeries, kind: KindConstants) -> Values:
    """Return T0 at each sample: over its inlet where kind and sample have one, else that of the kind."""
    fixed = np.full(len(series.time_s), kind.t0_c)
    if kind.t0_over_inlet_k is None:
        return fixed
    return np.where(np.isnan(series.inlet_c), fixed, series.inlet_c + kind.t0_over_inlet_k)


def _find_end_of_load(series: DeviceSeries, kind: KindConstants, recent_s: float) -> float:
    """The time up to which a device is judged: its newest sample, but the newest one at load where it has been at rest
    since, or nearly so. At rest neither throttling nor a resistance shows."""
    newest = float(series.time_s[-1])
    loaded = series.time_s[series.power_w >= LOADED_SHARE * kind.max_power_w]
    num_recent = np.count_nonzero(loaded > newest - recent_s)
    return float(loaded[-1]) if len(loaded) and num_recent < MIN_LOADED_SAMPLES else newest


def _excess(series: DeviceSeries, kind: KindConstants, at_load: bool) -> DeviceSeries:
    """The samples at load or at rest, with the excess over the kind as temperature."""
    share = series.power_w / kind.max_power_w
    chosen = series.select(share >= LOADED_SHARE if at_load else share <= IDLE_SHARE)
    excess = chosen.temperature_c - find_t0(chosen, kind) - kind.r_k_per_w * chosen.power_w
    return DeviceSeries(**{**chosen.__dict__, "temperature_c": excess})


def _median_excess(
    series: DeviceSeries, kind: KindConstants, at_load: bool, newest: int = NEWEST_SAMPLES
) -> float | None:
    excess = _excess(series, kind, at_load).temperature_c[-newest:]
    return float(np.median(excess)) if len(excess) >= MIN_LOADED_SAMPLES else None


def _is_sudden(past: DeviceSeries, recent: DeviceSeries, kind: KindConstants, change_k: float) -> bool:
    """Whether, between one sample at load and the next, the excess rose by more than half of the change and stayed."""
    before, after = _excess(past, kind, at_load=True), _excess(recent, kind, at_load=True)
    excess = np.concatenate([before.temperature_c, after.temperature_c])
    width = MIN_LOADED_SAMPLES
    if change_k <= 0 or len(excess) < 2 * width:
        return False
    medians = np.array([np.median(excess[index : index + width]) for index in range(len(excess) - width + 1)])
    return bool(np.max(medians[width:] - medians[:-width]) > 0.5 * change_k)


def _find_resistance_ratio(series: DeviceSeries, kind: KindConstants) -> float | None:
    if len(series.time_s) == 0:
        return None
    low, high = np.quantile(series.power_w, [0.05, 0.95])
    if high - low < MIN_POWER_SPAN_SHARE * kind.max_power_w:
        return None
    fit = fit_device(series)
    if fit is not None and kind.t0_over_inlet_k is not None:
        fit = fit.over_inlet or fit
    return None if fit is None else fit.r_k_per_w / kind.r_k_per_w


def _find_inlet_change(recent: DeviceSeries, past: DeviceSeries) -> float | None:
    now, before = recent.inlet_c[~np.isnan(recent.inlet_c)], past.inlet_c[~np.isnan(past.inlet_c)]
    return float(np.median(now) - np.median(before)) if len(now) and len(before) else None


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
