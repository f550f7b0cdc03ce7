"""Fit the thermal model of all kinds of devices in a set of series."""

from collections.abc import Sequence

from phalanx.errors import DataError
from phalanx.fleet.thermal.device_series import DeviceSeries, average_steady
from phalanx.fleet.thermal.model_file import KindConstants, StepConstants, ThermalModelFile
from phalanx.fleet.thermal.steady_fit import fit_steady
from phalanx.fleet.thermal.step_fit import StepFit, fit_steps, has_steps

SIGNIFICANT_DIGITS = 4


def fit_thermal_model(series: Sequence[DeviceSeries]) -> tuple[ThermalModelFile, list[str]]:
    """Fit each kind; return the model, and what could not be fitted. DataError if nothing could."""
    by_kind: dict[str, list[DeviceSeries]] = {}
    for each in series:
        by_kind.setdefault(each.kind, []).append(each)
    kinds: dict[str, KindConstants] = {}
    problems: list[str] = []
    for kind, members in sorted(by_kind.items()):
        try:
            kinds[kind] = _fit_kind(members)
        except DataError as error:
            problems.append(str(error))
    if not kinds:
        raise DataError("; ".join(problems) or "no device")
    return ThermalModelFile(kinds=kinds), problems


def _fit_kind(series: Sequence[DeviceSeries]) -> KindConstants:
    steady = fit_steady([average_steady(each) for each in series])
    steps = fit_steps(series) if any(map(has_steps, series)) else None
    return KindConstants(
        t0_c=_round(steady.t0_c),
        t0_over_inlet_k=None if steady.t0_over_inlet_k is None else _round(steady.t0_over_inlet_k),
        r_k_per_w=_round(steady.r_k_per_w),
        rmse_k=_round(steady.rmse_k),
        max_power_w=_round(steady.max_power_w),
        num_devices=steady.num_devices,
        num_samples=steady.num_samples,
        steps=None if steps is None else _make_constants(steps),
    )


def _make_constants(fit: StepFit) -> StepConstants:
    return StepConstants(
        r_fast_k_per_w=_round(fit.r_fast_k_per_w),
        tau_fast_s=fit.tau_fast_s,
        r_slow_k_per_w=_round(fit.r_slow_k_per_w),
        tau_slow_s=fit.tau_slow_s,
        rmse_k=_round(fit.rmse_k),
        period_s=_round(fit.period_s),
    )


def _round(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
