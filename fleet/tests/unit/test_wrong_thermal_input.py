"""What is wrong in the files of `phalanx thermal` is said, and nothing is computed from it."""

from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx_fleet.nodes_file import load_nodes_file

HEADER = "time,node,kind,power_w,core_temperature_c"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleet.yaml").write_text("sites: {s: {}}\n")
    return tmp_path


def write_devices(path: Path, rise_k_per_w: float = 0.1, more: str = "", unit_s: int = 1) -> None:
    rows = [f"{3600 * hour * unit_s},n1,A,{watts},{50 + rise_k_per_w * watts:g}"
            for hour in range(100) for watts in [100 + 200 * (hour % 3)]]  # fmt: skip
    path.write_text("\n".join([HEADER, *rows, more]) + "\n")


def fails(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    assert main(["thermal", *command]) not in (0, 1)
    return capsys.readouterr().err


def test_rows_without_values_are_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_devices(folder / "fleet.csv", more=",,,,")
    assert main(["thermal", "fit", "fleet.csv"]) == 0
    assert "0.1 K/W" in capsys.readouterr().out


def test_times_in_milliseconds_and_a_falling_temperature_are_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_devices(folder / "fleet.csv", more="1764000000000,n1,A,300,50")
    assert "csv:102: time '1764000000000': expected seconds from 0 to 1e+11" in fails(capsys, "fit", "fleet.csv")
    write_devices(folder / "fleet.csv", rise_k_per_w=-0.1)
    assert "or temperature does not rise with power" in fails(capsys, "fit", "fleet.csv")
    assert not (folder / "thermal.yaml").exists()


def test_a_fit_overwrites_only_models(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_devices(folder / "fleet.csv")
    assert "was not written by this command" in fails(capsys, "fit", "fleet.csv", "--out", "fleet.yaml")
    assert "there is no folder" in fails(capsys, "fit", "fleet.csv", "--out", "none/thermal.yaml")
    assert [main(["thermal", "fit", "fleet.csv"]) for _ in range(2)] == [0, 0]


def test_a_check_of_nothing_is_no_all_clear(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_devices(folder / "fleet.csv")
    assert "thermal.yaml: there is no such file; `phalanx thermal fit` writes" in fails(capsys, "check", "fleet.csv")
    assert main(["thermal", "fit", "fleet.csv"]) == 0
    error = fails(capsys, "check", "fleet.csv", "--kind", "B")
    assert "no device was checked; n1 0: the model has no kind 'B' (it has A)" in error


NODES = """\
nodes: [{name: n1, rack: r1}]
cdus:
  - id: c1
    modbus:
      url: modbus://c1:502
      device_id: 1
      points: {set_point_c: {table: holding, address: 30, type: int16, scale: 0.1, unit: C}}
"""


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("scale: 0.1", "scale: 0", "set_point_c: scale: 0 makes every count 0"),
        ("cdus:", "cooling_response: {min_flow_share: 2}\ncdus:", "min_flow_share: found 2"),
    ],
)
def test_registers_and_heat_that_cannot_be_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, problem: str
) -> None:
    (folder / "nodes.yml").write_text(NODES)
    load_nodes_file(folder / "nodes.yml")
    (folder / "nodes.yml").write_text(NODES.replace(old, new, 1))
    assert problem in fails(capsys, "guard", "nodes.yml", "--for", "1")
