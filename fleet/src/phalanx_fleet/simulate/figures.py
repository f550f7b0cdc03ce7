"""Figures of simulated variants and their differences to the file as it is, over equal seeds, as the tables of the
terminal and of the page have them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.formatting import format_duration, format_plural, format_significant
from phalanx_fleet.simulate.fleet_simulation import SimulationResult
from phalanx_fleet.simulate.variants import SeedSpread, SimulatedVariant, spread_over_seeds

STATE_TITLES = {
    "productive": "productive",
    "blocked": "blocked by saves",
    "wasted": "wasted progress",
    "unavailable": "unavailable (starting)",
    "throttled": "lost to throttling",
    "idle": "idle",
    "spare": "spare",
    "repair": "in repair",
}
CONFIDENCE_SHARE = 0.95
"""That all intervals of a table have what they are of."""
NUM_STUDENT_ANGLES = 20_001
ROUNDING_SHARE = 1e-9
"""Relative difference below which two figures are equal."""


@dataclass(frozen=True)
class FigureRow:
    """A row of the table: a figure of a result, and how it is written."""

    title: str
    read: Callable[[SimulationResult], float]
    write: Callable[[float], str]


def _write_percent(value: float) -> str:
    return f"{100 * value:.2f}%"


def _write_count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _write_celsius(value: float) -> str:
    return f"{value:.1f} °C"


def _write_scaled(unit: str, divisor: float) -> Callable[[float], str]:
    return lambda value: f"{format_significant(value / divisor)} {unit}"


def list_rows(variant: SimulatedVariant) -> list[FigureRow]:
    rows = [
        FigureRow(title, lambda result, state=state: result.shares.get(state, math.nan), _write_percent)  # type: ignore[misc]
        for state, title in STATE_TITLES.items()
    ]
    rows += [
        FigureRow("ETTR", lambda result: result.ettr, _write_percent),
        FigureRow("jobs done", lambda result: result.num_done, _write_count),
        FigureRow("stops of jobs", lambda result: result.num_stops, _write_count),
    ]
    rows += [
        FigureRow(f"  by {cause}", lambda result, cause=cause: result.stops_by_cause.get(cause, 0), _write_count)  # type: ignore[misc]
        for cause in variant.results[0].stops_by_cause
    ]
    rows += [
        FigureRow(f"interval of saves, {name}", lambda result, name=name: result.intervals_s[name], format_duration)  # type: ignore[misc]
        for name, interval_s in variant.results[0].intervals_s.items()
        if math.isfinite(interval_s)
    ]
    currency = variant.settings.site.currency
    return [
        *rows,
        FigureRow("wait, mean", lambda result: result.wait_mean_s, format_duration),
        FigureRow("wait, p99", lambda result: result.wait_p99_s, format_duration),
        FigureRow("completion, mean", lambda result: result.completion_mean_s, format_duration),
        FigureRow("IT power, mean", lambda result: result.it_mean_w, _write_scaled("kW", 1e3)),
        FigureRow("IT power, peak", lambda result: result.it_peak_w, _write_scaled("kW", 1e3)),
        FigureRow("  swing of hours", lambda result: result.it_hourly_swing_w, _write_scaled("kW", 1e3)),
        FigureRow("  step of a save", lambda result: result.save_step_w, _write_scaled("kW", 1e3)),
        FigureRow("speed under the cap", lambda result: result.cap_speed, _write_percent),
        *_list_site_rows(currency),
    ]


def _list_site_rows(currency: str) -> list[FigureRow]:
    return [
        FigureRow("energy of the site", lambda result: result.site.site_energy_kwh, _write_scaled("MWh", 1e3)),
        FigureRow("  of cooling", lambda result: result.site.cooling_energy_kwh, _write_scaled("MWh", 1e3)),
        FigureRow("PUE", lambda result: result.site.pue, lambda value: f"{value:.3f}"),
        FigureRow("WUE", lambda result: result.site.wue_l_per_kwh, lambda value: f"{value:.2f} L/kWh"),
        FigureRow("water", lambda result: result.site.water_l, _write_scaled("m3", 1e3)),
        FigureRow("supply, highest", lambda result: result.site.supply_max_c, _write_celsius),
        FigureRow("  hours above limit", lambda result: result.site.hours_above_supply, _write_count),
        FigureRow("  hours with chiller", lambda result: result.site.chiller_hours, _write_count),
        FigureRow("  hours above design IT", lambda result: result.site.hours_above_design, _write_count),
        FigureRow("hottest core", lambda result: result.site.core_max_c, _write_celsius),
        FigureRow("  hours with throttling", lambda result: result.site.throttled_hours, _write_count),
        FigureRow("  device-hours throttled", lambda result: result.site.throttled_device_hours, _write_count),
        FigureRow("carbon", lambda result: result.site.carbon_kg, _write_scaled("t", 1e3)),
        FigureRow("cost of energy", lambda result: result.site.energy_cost, _write_scaled(f"k{currency}", 1e3)),
    ]


@dataclass(frozen=True)
class ComparisonTable:
    """Variants, or their differences, in columns, as texts; the first cell of a row is its title."""

    head: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str]
    problems: Sequence[str] = ()
    """What exceeds its budget."""


def compare_variants(variants: Sequence[SimulatedVariant]) -> ComparisonTable:
    """Return the table: a row for each figure that a variant has, definitions, and what exceeds its budget."""
    base = variants[0]
    rows = []
    for row in list_rows(base):
        spreads = [spread_over_seeds(variant, row.read) for variant in variants]
        if not all(math.isnan(spread.mean) for spread in spreads):
            rows.append([row.title, *(_format_cell(spread, row.write) for spread in spreads)])
    head = (
        f"{base.num_nodes} nodes with {base.num_devices} accelerators, {base.settings.days:g} days, policy "
        f"{base.settings.policy}, {format_plural(len(base.results), 'seed')}: mean (.05 to .95)"
    )
    problems = [
        f"{variant.label}: {each.level.label} may draw {each.committed_w / 1e3:,.0f} kW, its budget is "
        f"{(each.level.budget_w or 0) / 1e3:,.0f} kW: lower `power_cap`, or raise the budget"
        for variant in variants
        for each in variant.exceeded
    ]
    problems += [
        f"{variant.label}: IT draws up to {max(result.it_peak_w for result in variant.results) / 1e3:,.0f} kW, the "
        f"plant is built for {plant.design_it / 1e3:,.0f} kW: figures beyond it mean little; raise `design_it`"
        for variant in variants
        if (plant := variant.site_hours.plant) is not None
        and any(result.site.hours_above_design > 0 for result in variant.results)
    ]
    return ComparisonTable(head, [each.label for each in variants], rows, _list_notes(variants), problems)


def _list_notes(variants: Sequence[SimulatedVariant]) -> list[str]:
    notes = ["ETTR: productive over all device time of jobs from their first start, waits after failures included."]
    fixed = next((each for each in variants if each.site_hours.plant is None), None)
    if fixed is not None:
        site = fixed.settings.site
        notes.append(
            f"Site: PUE {site.pue:g} and WUE {site.water_l_per_kwh:g} L/kWh, fixed, over IT energy at the feed."
        )
    with_plant = [each for each in variants if each.site_hours.plant is not None]
    if with_plant:
        limits = dict.fromkeys(_find_supply_limit(each) for each in with_plant)
        error = max(result.site.balance_error for each in with_plant for result in each.results)
        notes += [
            "Site: plant and weather by hour. PUE: energy of the site over that of IT behind the conversion (ISO/IEC "
            "30134-2, for the time simulated). WUE: make-up water of the site per kWh of IT (ISO/IEC 30134-9). "
            f"Energy is in balance to {error:.0e} in every hour.",
            f"Supply limit: {', '.join(f'{limit:g} °C' for limit in limits)}. Throttling: accelerators of jobs that "
            "would be above the plant's `core_limit_c`; they draw less power, and their jobs end later.",
        ]
    for series in (with_plant or variants)[0].site_hours.list_series():
        if series.num_filled:
            notes.append(f"{series.path}: {series.num_filled} missing hours have the value of the hour before.")
    return notes


def _find_supply_limit(variant: SimulatedVariant) -> float:
    plant, limit_c = variant.site_hours.plant, variant.settings.site.supply_limit_c
    return limit_c if limit_c is not None else plant.supply_c if plant is not None else math.nan


def _format_cell(spread: SeedSpread, write: Callable[[float], str]) -> str:
    if math.isnan(spread.mean):
        return "-"
    mean, low, high = write(spread.mean), write(spread.p05), write(spread.p95)
    return mean if low == high else f"{mean} ({low} to {high})"


@dataclass(frozen=True)
class PairedDifference:
    """Mean over seeds of a figure of one variant less that of another, with its interval."""

    mean: float
    low: float
    high: float
    num_seeds: int

    @property
    def is_noise(self) -> bool:
        """Whether a difference of 0 is in the interval, or the interval is not known, with a single seed."""
        return math.isnan(self.low) or self.low <= 0.0 <= self.high


@dataclass(frozen=True)
class FigureDifference:
    """A figure, and for each variant its difference to the file as it is."""

    row: FigureRow
    differences: list[PairedDifference]


def list_differences(variants: Sequence[SimulatedVariant]) -> list[FigureDifference]:
    """Return the differences of all variants to the first, of figures that differ in one seed of one of them."""
    base, others = variants[0], variants[1:]

    def compare(row: FigureRow, num_compared: int) -> list[PairedDifference]:
        before = [row.read(result) for result in base.results]
        return [compare_paired(before, [row.read(each) for each in other.results], num_compared) for other in others]

    differing = [
        row
        for row in list_rows(base)
        if any(each.low < each.high or abs(each.mean) > 0 for each in compare(row, num_compared=1))
    ]
    return [FigureDifference(row, compare(row, len(differing) * len(others))) for row in differing]


def describe_differences(variants: Sequence[SimulatedVariant]) -> ComparisonTable | None:
    """Return the table of differences to the first variant; None where there is only that."""
    if len(variants) < 2:
        return None
    found = list_differences(variants)
    number = len(variants[0].results)
    head = f"Difference to the file, {format_plural(number, 'seed')}: mean (95 % for all intervals together)"
    rows = [[each.row.title, *(format_difference(d, each.row.write) for d in each.differences)] for each in found]
    if number < 2:
        notes = ["One seed has no interval: add --seeds 20 to know which differences are more than noise."]
    else:
        notes = ["noise: 0 is in the interval, so that these seeds show no difference; more --seeds narrow it."]
    for index, variant in enumerate(variants[1:]):
        differences = [each.differences[index] for each in found]
        if all(each.low == each.high == 0 or (each.num_seeds == 1 and each.mean == 0) for each in differences):
            notes.append(f"{variant.label}: no figure differs from the file.")
        elif number > 1 and all(each.is_noise for each in differences):
            notes.append(f"{variant.label}: no figure differs from the file by more than noise.")
    return ComparisonTable(head, [each.label for each in variants[1:]], rows, notes)


def format_difference(difference: PairedDifference, write: Callable[[float], str]) -> str:
    """Return the mean with its interval, or `noise` with the interval."""
    if math.isnan(difference.mean):
        return "-"

    def signed(value: float) -> str:
        return ("-" if value < 0 else "+") + write(abs(value))

    if math.isnan(difference.low):
        return signed(difference.mean)
    if difference.low == difference.high:
        return "0" if difference.mean == 0 else signed(difference.mean)
    interval = f"({signed(difference.low)} to {signed(difference.high)})"
    return f"noise {interval}" if difference.is_noise else f"{signed(difference.mean)} {interval}"


def compare_paired(base: Sequence[float], other: Sequence[float], num_compared: int = 1) -> PairedDifference:
    """Return `other` less `base`, of equal seeds. Seeds without a figure in one of them are left out.

    `num_compared`: differences that are looked at together. Their intervals are as wide as Bonferroni has it: with a
    probability of 95 % each of them has its mean, so that no figure is called different by chance.
    """
    before, after = np.array(base, dtype=float), np.array(other, dtype=float)
    differences = np.where(np.isclose(before, after, rtol=ROUNDING_SHARE, atol=0.0), 0.0, after - before)
    differences = differences[np.isfinite(differences)]
    number = len(differences)
    if number == 0:
        return PairedDifference(math.nan, math.nan, math.nan, 0)
    mean = float(differences.mean())
    if number == 1:
        return PairedDifference(mean, math.nan, math.nan, 1)
    quantile = find_student_quantile(1.0 - (1.0 - CONFIDENCE_SHARE) / num_compared, number - 1)
    half = quantile * float(differences.std(ddof=1)) / math.sqrt(number)
    return PairedDifference(mean, mean - half, mean + half, number)


def find_student_quantile(confidence: float, freedom: int) -> float:
    """Return t of which Student's distribution has a share `confidence` between -t and t."""
    angles = np.linspace(0.0, np.pi / 2, NUM_STUDENT_ANGLES)  # t is tan(angle) times the root of the degrees of freedom
    density = np.cos(angles) ** (freedom - 1)
    shares = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.tan(float(np.interp(confidence, shares / shares[-1], angles))) * math.sqrt(freedom)
