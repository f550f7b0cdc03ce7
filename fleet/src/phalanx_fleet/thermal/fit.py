"""Fit the thermal model of all kinds of devices in a set of series.

Steady heat, T = T0 + R P, from hours or minutes: R comes from differences within weeks of one device, so that neither a
slow change of the inlet nor its place in the server or hall counts as resistance. T0 is the mean over these weeks and
devices: an inlet that is not measured drifts with the season. Where the inlet of all devices of a kind is measured,
T = T_inlet + dT0 + R P is fitted, too: dT0 does not drift.

Throttling: at its busy end a healthy device has its power pinned, by its cap, and its temperature floats with the
inlet. One that throttles has its temperature pinned, and its power floats below the cap.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from phalanx.cluster.spec import Figure, Measure, StrictModel
from phalanx.errors import DataError
from phalanx.recipe.field_types import NUMBER_NOT_BOOL, Count
from phalanx.recipe.load import to_plain_values
from phalanx.recipe.validation_errors import read_user_mapping, validate_value
from phalanx.recipe.yaml_loader import to_yaml
from phalanx.run.directory import write_output
from phalanx_fleet.thermal.device_series import DAY_S, DeviceSeries, Values, average_steady

Celsius = Annotated[float, Field(ge=-50, le=200), NUMBER_NOT_BOOL]
PLATEAU_WIDTH_K = 1.5
"""Control and rounding of a core temperature at its limit: 84 +- 1 C on an A100."""
MIN_PLATEAU_C = 75.0
"""No accelerator for servers slows down below."""
MIN_PLATEAU_SAMPLES = 12
MIN_IMPLIED_SPREAD_K = 4.0
"""What the spread of power on a plateau would do to the temperature. Devices at their cap: up to 2.2 K, since a cap is
held within 5 %; an A100 that throttles: 11 K."""
MAX_THROTTLED_MARGIN_K = 0.5
"""Margin as a whole number of kelvins: 0 is at the limit."""
FIT_WINDOW_S = 28 * DAY_S
MIN_POWER_SPREAD_W = 10.0
"""Standard deviation of power within windows, below which a device says nothing about R."""
MIN_FIT_SAMPLES = 24
MAX_T0_C = 70.0
"""Air comes in below 45 C, coolant below 60 C. The servers of the tests have 80 to 91 in degrees Fahrenheit."""
SIGNIFICANT_DIGITS = 4


class KindConstants(StrictModel):
    """A kind of device: T = t0_c + r_k_per_w P when steady; and how well this describes what it was fitted to."""

    t0_c: Celsius
    """Core temperature without power, as a mean: inlet and what other parts add."""
    t0_over_inlet_k: Annotated[float, Field(ge=-50, le=100), NUMBER_NOT_BOOL] | None = None
    """T0 over the measured inlet, which then replaces t0_c; None where the inlet was not measured."""
    r_k_per_w: Figure
    """Resistance from inlet to core."""
    rmse_k: Measure
    """Around T0 of each window of weeks."""
    max_power_w: Figure
    """Most power that was seen."""
    num_devices: Count
    num_samples: Count


class ThermalModelFile(StrictModel):
    """Kinds by name."""

    format: Literal[1] = 1
    kinds: dict[str, KindConstants]


def load_thermal_model(path: Path) -> ThermalModelFile:
    """Load the file at `path`. Raises RecipeError with a line for each problem."""
    value, locations = read_user_mapping(path, "`kinds:`; `phalanx thermal fit` writes such a file")
    return validate_value(value, locations, ThermalModelFile)


def save_thermal_model(model: ThermalModelFile, path: Path) -> None:
    """Write the file; whole, or not at all."""
    write_output(
        path,
        "# Thermal constants by kind of device: T = t0_c + r_k_per_w * P; `phalanx thermal fit` wrote them.\n"
        + to_yaml(to_plain_values(model, lambda name, field: False)),
    )


@dataclass(frozen=True)
class TemperaturePlateau:
    """The temperature at which a device is pinned, and the power that it gets there (median)."""

    temperature_c: float
    power_w: float
    num_samples: int
    is_throttled: NDArray[np.bool_]
    """By sample."""


def find_plateau(series: DeviceSeries, r_k_per_w: float) -> TemperaturePlateau | None:
    """Find the samples at which the device throttles; None without enough of them. Margins count where they are known,
    else the pattern of power and temperature."""
    if len(series.time_s) < MIN_PLATEAU_SAMPLES:
        return None
    at_limit = series.margin_k <= MAX_THROTTLED_MARGIN_K  # False where it is missing
    if np.count_nonzero(at_limit) >= MIN_PLATEAU_SAMPLES:
        return _make_plateau(series, at_limit)
    if np.all(~np.isnan(series.margin_k)):
        return None
    top_c = float(np.quantile(series.temperature_c, 0.998))
    at_top = series.temperature_c >= top_c - PLATEAU_WIDTH_K
    if top_c < MIN_PLATEAU_C or np.count_nonzero(at_top) < MIN_PLATEAU_SAMPLES:
        return None
    low_w, high_w = np.quantile(series.power_w[at_top], [0.1, 0.9])
    return _make_plateau(series, at_top) if r_k_per_w * (high_w - low_w) >= MIN_IMPLIED_SPREAD_K else None


def _make_plateau(series: DeviceSeries, chosen: NDArray[np.bool_]) -> TemperaturePlateau:
    return TemperaturePlateau(
        temperature_c=float(np.median(series.temperature_c[chosen])),
        power_w=float(np.median(series.power_w[chosen])),
        num_samples=int(np.count_nonzero(chosen)),
        is_throttled=chosen,
    )


def fit_steady(series: Sequence[DeviceSeries]) -> KindConstants:
    """Fit T0 and R of devices of one kind; hours in which one throttles are left out. R is the median of the devices',
    so that one that fouls does not change it. DataError where power varies too little."""
    fits = [found for each in series if (found := fit_device(each)) is not None]
    if not fits:
        kind = series[0].kind if series else "no device"
        raise DataError(
            f"{kind}: power varies by less than {MIN_POWER_SPREAD_W:g} W, there are less than {MIN_FIT_SAMPLES} "
            "samples, or temperature does not rise with power, so its resistance cannot be found; add samples at rest "
            "and under load"
        )
    over_inlet = [each.over_inlet for each in fits if each.over_inlet is not None]
    has_inlet = len(over_inlet) == len(fits)
    used = over_inlet if has_inlet else fits
    r_k_per_w = float(np.median([each.r_k_per_w for each in used]))
    errors = np.concatenate([each.errors_of(r_k_per_w) for each in used])
    if (t0_c := _find_t0(fits, r_k_per_w)) > MAX_T0_C:
        raise DataError(
            f"{series[0].kind}: without power a device would have {t0_c:.0f} °C; expected core temperatures in °C, not "
            "in °F, and the power of the device"
        )
    return KindConstants(
        t0_c=_round(t0_c),
        r_k_per_w=_round(r_k_per_w),
        rmse_k=_round(float(np.sqrt(np.mean(errors**2)))),
        t0_over_inlet_k=_round(_find_t0(over_inlet, r_k_per_w)) if has_inlet else None,
        max_power_w=_round(max(each.max_power_w for each in fits)),
        num_devices=len(fits),
        num_samples=len(errors),
    )


def _find_t0(fits: "Sequence[DeviceFit]", r_k_per_w: float) -> float:
    return float(np.median([np.mean(each.mean_temperature_c - r_k_per_w * each.mean_power_w) for each in fits]))


@dataclass(frozen=True)
class DeviceFit:
    """R of one device, with its samples as differences from the means of their windows."""

    r_k_per_w: float
    power_difference_w: Values
    temperature_difference_k: Values
    mean_power_w: Values
    """By window."""
    mean_temperature_c: Values
    max_power_w: float
    over_inlet: "DeviceFit | None" = None
    """The same of the temperature over the inlet, where that is measured."""

    def errors_of(self, r_k_per_w: float) -> Values:
        """Return the error of each sample in K for a resistance."""
        return self.temperature_difference_k - r_k_per_w * self.power_difference_w


def fit_device(series: DeviceSeries) -> DeviceFit | None:
    """Fit R of one device to hours or minutes; None where power varies too little."""
    first = _fit_within_windows(series)
    if first is None:
        return None
    plateau = find_plateau(series, first.r_k_per_w)
    free = series if plateau is None else series.select(~plateau.is_throttled)
    found = first if plateau is None else _fit_within_windows(free) or first
    return replace(found, over_inlet=_fit_within_windows(subtract_inlet(free)))


def subtract_inlet(series: DeviceSeries) -> DeviceSeries:
    """Return the samples of which the inlet is known, with the temperature over it."""
    known = series.select(~np.isnan(series.inlet_c))
    return replace(known, temperature_c=known.temperature_c - known.inlet_c)


def _fit_within_windows(series: DeviceSeries) -> DeviceFit | None:
    if len(series.time_s) < MIN_FIT_SAMPLES:
        return None
    window = np.floor((series.time_s - series.time_s[0]) / FIT_WINDOW_S).astype(np.int64)
    _, place, counts = np.unique(window, return_inverse=True, return_counts=True)
    mean_power = np.bincount(place, series.power_w) / counts
    mean_temperature = np.bincount(place, series.temperature_c) / counts
    power = series.power_w - mean_power[place]
    temperature = series.temperature_c - mean_temperature[place]
    if float(np.std(power)) < MIN_POWER_SPREAD_W:
        return None
    slope = float(power @ temperature / (power @ power))
    if slope <= 0:
        return None
    return DeviceFit(slope, power, temperature, mean_power, mean_temperature, float(np.quantile(series.power_w, 0.998)))


def fit_thermal_model(series: Sequence[DeviceSeries]) -> tuple[ThermalModelFile, list[str]]:
    """Fit each kind; return the model, and what could not be fitted. DataError if nothing could."""
    by_kind: dict[str, list[DeviceSeries]] = {}
    for each in series:
        by_kind.setdefault(each.kind, []).append(each)
    kinds: dict[str, KindConstants] = {}
    problems: list[str] = []
    for kind, members in sorted(by_kind.items()):
        try:
            kinds[kind] = fit_steady([average_steady(each) for each in members])
        except DataError as error:
            problems.append(str(error))
    if not kinds:
        raise DataError("; ".join(problems) or "no device")
    return ThermalModelFile(kinds=kinds), problems


def _round(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
