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


def table(*rows: dict[str, str]) -> None:
    """The file runs.csv with rows, each ROW with changes."""
    with Path("runs.csv").open("w", newline="") as file:
        lines = csv.DictWriter(file, list(dict.fromkeys([*ROW, *(key for row in rows for key in row)])), restval="")
        lines.writeheader()
        lines.writerows({**ROW, **row} for row in rows)


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


WITHOUT_TWO = {key: value for key, value in ROW.items() if key not in ("hidden", "vocab")}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([",".join(ROW), "a,b"], "runs.csv:2: has fewer cells"),
        ([], "runs.csv: has no rows"),
        ([",".join(WITHOUT_TWO), ",".join(WITHOUT_TWO.values())], "columns are missing: hidden, vocab;"),
    ],
    ids=["ragged line", "empty", "missing columns"],
)
def test_a_table_that_is_none_is_bad_data(lines: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs.csv").write_text("".join(f"{line}\n" for line in lines))
    assert replay() == 65
    assert words in capsys.readouterr().err
    assert not Path("out.csv").exists()
