"""Bars of the fleet's models with other data than ours: fewer files, other rows, other names."""

from pathlib import Path

import fleet_thermal
import fleet_twin
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


def test_a_trace_of_any_name_is_compared_with_what_is_published_of_it(tmp_path: Path) -> None:
    jobs = "trace,job,gpus,submit_s,iterations,iteration_ms\n"
    jobs += "trace9,1,8,100,1000,1000\ntrace9,0,64,0,1000,1000\ntrace8,1,1,0,1000,1000\n"
    (tmp_path / "jobs_muri_philly.csv").write_text(jobs)
    (tmp_path / "policy_results_muri.csv").write_text(
        "gpus_in_cluster,trace,policy,mean_jct_s,p99_jct_s,makespan_s\n"
        + "".join(f"64,{trace},SRTF,1479,1934,2044\n" for trace in ("trace8", "trace9"))
    )
    bars = {bar.measure: bar for bar in fleet_twin._measure_muri(tmp_path)}
    assert bars["SRTF, Muri trace9: mean completion"].is_met
    assert bars["SRTF, Muri trace9: makespan"].is_met
    assert bars["SRTF, Muri trace8"].reached.startswith("jobs_muri_philly.csv: 1 of 2 jobs")
    assert bars["SRSF, Muri trace9"].is_met is None
