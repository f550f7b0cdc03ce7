"""Bars of the fleet's models with other data than ours: fewer files, other rows, other names."""

from pathlib import Path

import fleet_thermal
from fleet_bars import Bar, MissingDataError, measure_all, to_table
from phalanx.errors import DataError


def test_a_measure_without_its_data_is_told_and_does_not_hide_the_others() -> None:
    def fail(error: Exception) -> list[Bar]:
        raise error

    bars = measure_all(
        "twin",
        {
            "first": lambda: fail(MissingDataError("a.csv: no such file")),
            "second": lambda: fail(DataError("b.csv:3: power")),
            "third": lambda: [Bar("twin", "third", "1", "1", True)],
        },
    )
    assert [bar.is_met for bar in bars] == [None, None, True]
    assert "| twin | first | data | a.csv: no such file | not measured |" in to_table(bars)


def test_an_empty_directory_measures_no_bar(tmp_path: Path) -> None:
    bars = fleet_thermal.measure_bars(tmp_path)
    assert all(bar.is_met is None and "no such file" in bar.reached for bar in bars)
