"""The last day of a node by hour, from the samples that its agents keep on it. Pure, but for reading the file."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from phalanx.fleet.latest_reading import LatestReading, reading_from_sample
from phalanx.fleet.telemetry.ring_file import read_ring

DAY_S, HOUR_S = 24 * 3600.0, 3600.0
SUMMARY_INTERVAL_S = 60
"""Seconds between two of the samples that are summarized: one a minute, since a day has 86,400."""


@dataclass(frozen=True)
class HourSummary:
    """An hour from `time` (seconds since the epoch) on, of `num_samples` samples. None: no sample has the value."""

    time: float
    num_samples: int
    mean_draw_w: float | None
    max_draw_w: float | None
    min_margin_k: float | None
    slow_fraction: float
    """Share of the samples in which an accelerator was slower than it could be."""


def read_last_day(path: Path, now: float) -> list[HourSummary]:
    """Return the hours of the last day that have samples, the oldest first. Raises DataError for a file that is no ring
    of this format."""
    samples = read_ring(path, now - DAY_S, now, SUMMARY_INTERVAL_S)
    return summarize_hours(reading_from_sample(sample, SUMMARY_INTERVAL_S) for sample in samples)


def summarize_hours(readings: Iterable[LatestReading]) -> list[HourSummary]:
    """Group readings by hours of the clock."""
    hours: dict[float, list[LatestReading]] = {}
    for reading in readings:
        hours.setdefault(reading.time // HOUR_S * HOUR_S, []).append(reading)
    return [_summarize(time, hours[time]) for time in sorted(hours)]


def _summarize(time: float, readings: list[LatestReading]) -> HourSummary:
    draws = [reading.draw_w for reading in readings if reading.draw_w is not None]
    margins = [reading.margin_k for reading in readings if reading.margin_k is not None]
    return HourSummary(
        time,
        len(readings),
        fmean(draws) if draws else None,
        max(draws, default=None),
        min(margins, default=None),
        sum(reading.slow_because is not None for reading in readings) / len(readings),
    )
