"""`phalanx thermal`: from a CSV file or runs to a model file and findings, and errors for bad input."""

import json
from pathlib import Path

import numpy as np
import pytest

from fake_heat import find_hours_from, make_hours
from phalanx.cli.main import main
from phalanx.run import Run
from phalanx.run.telemetry_minutes import NodeMinute, Rollups, ValueRollup
from phalanx_fleet.thermal.device_series import DeviceSeries

DAYS = 42


def write_csv(
    path: Path, *series: DeviceSeries, header: str = "time,node,device,kind,power_w,core_temperature_c"
) -> None:
    rows = [
        f"{time},{each.node},{each.device},{each.kind},{power},{temperature}"
        for each in series
        for time, power, temperature in zip(each.time_s, each.power_w, each.temperature_c, strict=True)
    ]
    path.write_text("\n".join([header, *rows]) + "\n")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_fit_then_check_finds_the_hot_node(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fouled = make_hours(DAYS, 3, node="n3", extra_r_k_per_w=find_hours_from(DAYS, 38) * 0.05)
    write_csv(folder / "fleet.csv", make_hours(DAYS, 1), make_hours(DAYS, 2, node="n2"), fouled)
    assert main(["thermal", "fit", "fleet.csv", "--until", "2000000"]) == 0
    assert "0.1 K/W" in capsys.readouterr().out
    assert main(["thermal", "check", "fleet.csv"]) == 77
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if line.endswith("fan or flow lost")] == ["n3"]
    assert main(["thermal", "check", "fleet.csv", "--until", "3000000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["findings"] == []
    assert [each["node"] for each in found["devices"]] == ["n1", "n2", "n3"]


def test_columns_and_kind_can_be_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_csv(folder / "fleet.csv", make_hours(DAYS, 1), header="hour,server,gpu,model,watts,celsius")
    command = ["thermal", "fit", "fleet.csv", "--kind", "A"]
    assert main(command) == 64
    assert "no column time, found hour, server" in capsys.readouterr().err
    names = ("time=hour", "node=server", "device=gpu", "power_w=watts", "core_temperature_c=celsius")
    assert main([*command, *(part for name in names for part in ("--column", name)), "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["kinds"]) == ["A"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0,n1,0,GPU,0.3,40", "fleet.csv: power_w is 0.3 at most; expected watts, not kilowatts"),
        ("0,n1,0,,300,54", "fleet.csv:2: no kind in this row; expected a name"),
        ("0,n1,0,GPU,300000,40", "fleet.csv:2: power_w '300000': expected a number from 0 to 100000"),
        ("0,n1,0,GPU,300,313", "fleet.csv:2: core_temperature_c '313': expected a number from -40 to 200"),
        ("noon,n1,0,GPU,300,40", "fleet.csv:2: time 'noon': expected seconds or an ISO 8601 time"),
        ("0,n1,0", "fleet.csv:2: 3 values, expected 6 as in the header"),
        ("", "fleet.csv: no row with power and temperature"),
        ("0,n1,0,GPU,300,40", "GPU: power varies by less than 10 W"),
    ],
)
def test_bad_rows_are_refused_with_their_line(
    folder: Path, capsys: pytest.CaptureFixture[str], row: str, message: str
) -> None:
    (folder / "fleet.csv").write_text(f"time,node,device,kind,power_w,core_temperature_c\n{row}\n")
    assert main(["thermal", "fit", "fleet.csv"]) == 65
    assert message in capsys.readouterr().err
    assert not (folder / "thermal.yaml").exists()


def test_a_wrong_model_file_is_refused_with_its_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_csv(folder / "fleet.csv", make_hours(DAYS, 1))
    (folder / "thermal.yaml").write_text("kinds:\n  GPU: {t0_c: 28, r_k_per_watt: 0.1}\n")
    assert main(["thermal", "check", "fleet.csv"]) == 78
    assert "thermal.yaml:2: kinds.GPU.r_k_per_watt: unknown key" in capsys.readouterr().err


def test_telemetry_of_a_run_is_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(folder / "run")
    run.create()
    run.resolved.touch()
    run.telemetry.mkdir()
    rng = np.random.default_rng(0)
    with open(run.telemetry / "n1.jsonl", "wb") as file:
        for minute in range(120):
            power = float(rng.choice([100.0, 400.0]))
            values = {"power_mean_w": power, "core_temperature_c": 30 + 0.08 * power, "thermal_margin_c": 20.0}
            rollups = {name: ValueRollup(value, value, value, 60) for name, value in values.items()}
            device = Rollups(rollups)
            file.write(NodeMinute(minute * 60.0, 60.0, 60, "n1", Rollups(), {"GPU-a": device}).to_line())
    assert main(["thermal", "fit", "run"]) == 64
    assert "does not say which accelerators it has; add --kind NAME" in capsys.readouterr().err
    assert main(["thermal", "fit", "run", "--kind", "H100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kinds"]["H100"]["r_k_per_w"] == pytest.approx(0.08)
    assert main(["thermal", "check", "run", "--kind", "H100"]) == 0
