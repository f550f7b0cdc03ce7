"""Fit thermal models of devices, and find those that run hot: the use cases of `phalanx thermal`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from phalanx.errors import DataError, UsageError
from phalanx.fleet.thermal.device_series import DeviceSeries
from phalanx.fleet.thermal.fit import fit_thermal_model
from phalanx.fleet.thermal.heat_check import HeatCheck, check_heat
from phalanx.fleet.thermal.model_file import ThermalModelFile, load_thermal_model, save_thermal_model
from phalanx.fleet.thermal.series_csv import make_series, parse_time, read_series_csv
from phalanx.fleet.thermal.series_runs import read_series_runs

__all__ = ["check_thermal", "fit_thermal", "parse_time", "read_device_series"]


def read_device_series(
    sources: Sequence[Path],
    columns: Mapping[str, str],
    kind: str | None = None,
    begin_s: float | None = None,
    end_s: float | None = None,
) -> list[DeviceSeries]:
    """Read power and temperature of devices from CSV files, run directories and folders of runs.

    Args:
        sources: A directory holds a run, or runs; anything else is a CSV file.
        columns: Columns of CSV files by the name that Phalanx has for them.
        kind: Kind of all devices.
        begin_s: Only samples from this time on, in seconds since the epoch.
        end_s: Only samples before this time.
    """
    parts: dict[tuple[str, str, str], list[DeviceSeries]] = {}
    for source in sources:
        found = read_series_runs(source, kind) if source.is_dir() else read_series_csv(source, columns, kind)
        for each in found:
            parts.setdefault((each.node, each.device, each.kind), []).append(each)
    series = [_join(each) for each in parts.values()]
    chosen = [_select_time(each, begin_s, end_s) for each in series]
    if not (filled := [each for each in chosen if len(each.time_s)]):
        raise DataError(f"{', '.join(map(str, sources))}: no sample in the chosen time")
    return filled


def fit_thermal(series: Sequence[DeviceSeries], out: Path | None) -> tuple[ThermalModelFile, list[str]]:
    """Fit the constants of each kind, write them to `out`, and return them and what could not be fitted."""
    model, problems = fit_thermal_model(series)
    if out is not None:
        save_thermal_model(model, out)
    return model, problems


def check_thermal(series: Sequence[DeviceSeries], model: Path, recent_s: float) -> HeatCheck:
    """Compare devices with the constants of their kind in the file `model`, and with their own past."""
    if not model.exists():
        raise UsageError(
            f"{model}: there is no such file; `phalanx thermal fit` writes one, of months without findings"
        )
    found = check_heat(series, load_thermal_model(model), recent_s)
    if not found.devices:
        raise DataError("; ".join(["no device was checked", *found.problems[:5]]))
    return found


def _join(parts: Sequence[DeviceSeries]) -> DeviceSeries:
    """One device of several files, in order of time."""
    if len(parts) == 1:
        return parts[0]
    columns = [
        (each.time_s, each.power_w, each.temperature_c, each.inlet_c, each.margin_k, each.failed_fans) for each in parts
    ]
    rows = np.concatenate([np.stack(each, axis=1) for each in columns])
    return make_series(parts[0].node, parts[0].device, parts[0].kind, rows)


def _select_time(series: DeviceSeries, begin_s: float | None, end_s: float | None) -> DeviceSeries:
    low = -np.inf if begin_s is None else begin_s
    high = np.inf if end_s is None else end_s
    return series.select((series.time_s >= low) & (series.time_s < high))
