"""replay.py: a table with predictions beside it, the errors by source, and what is refused with which code."""

import csv
from pathlib import Path

import pytest

from planner_validation.replay import main

ROW = {
    "source": "torchtitan benchmarks",
    "model": "tiny",
    "layers": "2",
    "hidden": "256",
    "heads": "4",
    "ffn_hidden": "1024",
    "vocab": "1000",
    "seq_len": "256",
    "global_batch_seqs": "64",
    "gpu": "H100-80GB-SXM",
    "n_gpus": "8",
    "tp": "1",
    "fsdp": "zero3",
    "step_time_s": "0.1",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder and a cache of our own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def table(*rows: dict[str, str], without: tuple[str, ...] = ()) -> None:
    """The file runs.csv with rows, each ROW with changes."""
    whole = [{key: value for key, value in {**ROW, **row}.items() if key not in without} for row in rows]
    with Path("runs.csv").open("w", newline="") as file:
        lines = csv.DictWriter(file, list(dict.fromkeys(key for row in whole for key in row)), restval="")
        lines.writeheader()
        lines.writerows(whole)


def replay(*options: str) -> int:
    return main(["runs.csv", "--out", "out.csv", *options])


def test_predictions_are_written_beside_what_the_table_says() -> None:
    table({}, {"layers": ""})
    assert replay() == 0
    with Path("out.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert first["model"] == "tiny"
    assert float(first["predicted_low_s"]) < float(first["predicted_step_time_s"]) < float(first["predicted_high_s"])
    assert second["why_not"] == "layers is empty"


def test_errors_are_printed_by_source_and_accelerator(capsys: pytest.CaptureFixture[str]) -> None:
    table({}, {}, {"source": "another", "step_time_s": ""})
    assert replay() == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].split()[:2] == ["another", "H100-80GB-SXM"]
    assert out[2].startswith("torchtitan benchmarks")
    assert out[2].count("%") == 2
    assert out[-2:] == ["3 rows, 2 compared with what was measured; errors of the step time", "wrote out.csv"]


def test_a_row_for_calibration_moves_the_others() -> None:
    predicted = []
    for mark in ("", "1"):
        table({"calibrate": mark, "step_time_s": "9"}, {"calibrate": ""})
        assert replay() == 0
        with Path("out.csv").open(newline="") as file:
            predicted.append(float(list(csv.DictReader(file))[1]["predicted_step_time_s"]))
    assert predicted[1] > 1.2 * predicted[0]


def test_a_table_of_convolutions_is_predicted_too() -> None:
    head = "source,model,gpu,n_gpus,interconnect,comm_scheme,global_batch"
    Path("runs.csv").write_text(f"{head}\nsome benchmark,ResNet-50,P100,8,DGX-1 NVLink,ring,512\n")
    assert replay() == 0
    with Path("out.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert float(row["predicted_step_time_s"]) > 0


def test_missing_columns_are_bad_data(capsys: pytest.CaptureFixture[str]) -> None:
    table({}, without=("hidden", "vocab"))
    assert replay() == 65
    assert capsys.readouterr().err.startswith("error: runs.csv: columns are missing: hidden, vocab;")
    assert not Path("out.csv").exists()


def test_a_ragged_line_is_bad_data(capsys: pytest.CaptureFixture[str]) -> None:
    table({})
    Path("runs.csv").write_text(Path("runs.csv").read_text() + "a,b\n")
    assert replay() == 65
    assert "runs.csv:3: has fewer cells" in capsys.readouterr().err


def test_an_empty_table_is_bad_data(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs.csv").write_text("")
    assert replay() == 65
    assert "runs.csv: has no rows" in capsys.readouterr().err
