"""Bars of the fleet's models with other data than ours: fewer files, other rows, other names."""

import random
from pathlib import Path

import numpy as np
import pytest

import fleet_plant
import fleet_thermal
import fleet_twin
from fleet_bars import Bar, MissingDataError, measure_all, read_rows, to_table
from fleet_power import read_zeus_jobs
from phalanx.errors import DataError
from phalanx.fleet.thermal.weather import Weather


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t.csv: no column gpu, found none"),
        ("gpu,watts\n", "t.csv: no row"),
        ("gpu,power\na,1\n", "t.csv: no column watts, found gpu, power"),
        ("gpu,watts\na,1\nb,x\n", "t.csv:3: watts 'x': expected a number"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(MissingDataError) as caught:
        read_rows(tmp_path / "t.csv", ("gpu",), ("watts",))
    assert str(caught.value) == message


def test_rows_with_an_empty_number_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("gpu,watts\na,1\nb,\n")
    assert read_rows(tmp_path / "t.csv", ("gpu",), ("watts",)) == [{"gpu": "a", "watts": "1"}]


def test_sweeps_of_any_gpu_are_read_in_any_order_with_repeated_and_missing_caps(tmp_path: Path) -> None:
    rows = [("new", "x", "net", 8, "adam", cap, 300 / cap, 0.9 * cap) for cap in (100, 150, 200, 250, 300, 350)]
    rows += [("new", "x", "net", 16, "adam", *row[5:]) for row in rows if row[5] != 100]
    rows += [("new", "x", "net", 8, "adam", 350, 600 / 350, 0.9 * 350)]
    random.Random(0).shuffle(rows)
    lines = ["gpu,dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power"]
    lines += [",".join(map(str, row)) for row in rows]
    (tmp_path / "zeus_powerlimit.csv").write_text("\n".join(lines))
    (job,) = read_zeus_jobs(tmp_path)["new"]
    assert [point.cap_w for point in job.points] == [100, 150, 200, 250, 300, 350]
    assert job.points[-1].rate == pytest.approx(350 / 450)


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


def test_another_year_of_a_site_has_its_own_figures_in_order_of_time(tmp_path: Path) -> None:
    header = "site,hour_utc,dry_bulb_c,relative_humidity_pct,wet_bulb_c_computed"
    rows = [
        f"Dallas,2022-{1 + day // 28:02d}-{1 + day % 28:02d}T{hour:02d},{hour + 10},80,{hour + 5}"
        for day in range(12 * 28)
        for hour in range(24)
    ]
    random.Random(0).shuffle(rows)
    (tmp_path / "site_hourly_2022.csv").write_text("\n".join([header, *rows]))
    (tmp_path / "published_results.csv").write_text(
        f"system,quantity,value\nDallas 2022,hours with wet bulb + 7 K over 32 C,{3 * 336}\n"
    )
    (name,), (each,) = zip(*fleet_plant._find_sites(tmp_path).items(), strict=True)
    weather = each.read()
    assert name == "Dallas 2022"
    assert np.array_equal(weather.dry_bulb_c[:24], np.arange(10.0, 34.0))
    goals = fleet_plant._find_published_hours(tmp_path, name)
    assert goals == (3 * 336, None, None)
    assert fleet_plant._measure_site_hours(name, weather, goals).is_met is None  # 8,064 hours are no year
    year = Weather(weather.times * 2, np.tile(weather.dry_bulb_c, 2), np.tile(weather.wet_bulb_c, 2))
    assert fleet_plant._measure_site_hours(name, year, (6 * 336, None, None)).is_met


def test_daly_intervals_of_published_results_are_compared_too(tmp_path: Path) -> None:
    (tmp_path / "published_results.csv").write_text(
        'system,quantity,value\n"d = 1 min, R = 2 min, M = 100 min",Daly interval,13.5\nx,Daly interval,3\n'
    )
    bars = fleet_twin._measure_daly(tmp_path)
    assert [(bar.measure, bar.is_met) for bar in bars[3:]] == [("Daly interval, M = 100 min, d = 1 min", True)]
