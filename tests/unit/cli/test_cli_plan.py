"""`phalanx plan` on the example: what it prints and writes, and what it refuses with which code."""

import json
from pathlib import Path

import pytest

from phalanx.cli import main
from phalanx.recipe import load_recipe
from phalanx.recipe.schema import Parallelism

EXAMPLE = Path(__file__).parents[3] / "examples" / "gpt-python.yaml"
HERE = ["--cluster", "h100", "--num-gpus", "1024"]
"""The example has 16 samples a step: too few for so many devices."""
BATCH = "batch.global_size=1024"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder and a cache of our own, with the example in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "recipe.yaml").write_text(EXAMPLE.read_text())
    return tmp_path


def plan(*arguments: str) -> int:
    return main.main(["plan", "recipe.yaml", *arguments])


def test_the_best_layouts_are_printed_with_time_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(BATCH, *HERE, "--top", "3") == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].startswith("gpt-python: 788 k parameters, 1024 samples of 256 tokens")
    assert lines[1].startswith("1,024 x NVIDIA H100")
    assert [line[:2] for line in lines[4:7]] == ["1 ", "2 ", "3 "]
    assert "replicate 1024" in lines[4]
    assert all(" GiB" in line for line in lines[4:7])
    for word in ("step time  ", "speed", "memory", "run", "scaling"):
        assert any(line.startswith(word) for line in lines)


def test_the_planned_recipe_is_written_beside_it_with_the_layout(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(BATCH, *HERE) == 0
    assert capsys.readouterr().out.endswith("\nwrote recipe.planned.yaml\n")
    recipe = load_recipe(folder / "recipe.planned.yaml", []).recipe
    assert isinstance(recipe.parallelism, Parallelism)
    assert recipe.parallelism.world == 1024
    assert recipe.batch.global_size == 1024
    assert isinstance(recipe.batch.micro_size, int)


@pytest.mark.parametrize(
    ("device", "cluster"), [("cuda", "h100"), ("cuda", "mi300x:8"), ("cpu", "cpu"), ("auto", "cpu")]
)
def test_a_device_that_the_cluster_has_is_planned_for(
    device: str, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(f"device={device}", "--cluster", cluster) == 0
    assert load_recipe("recipe.planned.yaml", []).recipe.device == device


def test_the_planned_recipe_goes_where_it_shall(folder: Path) -> None:
    assert plan(BATCH, *HERE, "--out", "mine.yaml") == 0
    assert (folder / "mine.yaml").is_file()
    assert not (folder / "recipe.planned.yaml").exists()


def test_the_choice_goes_into_the_recipe_itself_when_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(BATCH, *HERE, "--in-place") == 0
    assert capsys.readouterr().out.endswith("\nwrote recipe.yaml\n")
    recipe = load_recipe(folder / "recipe.yaml", []).recipe
    assert isinstance(recipe.parallelism, Parallelism)
    assert recipe.parallelism.world == 1024
    assert not (folder / "recipe.planned.yaml").exists()


def test_a_power_cap_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "capped.yaml").write_text("name: capped\nnodes: 2\nnode: dgx-h100\nprices: {power_cap_w: 400}\n")
    assert plan("--cluster", "capped.yaml") == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("power cap"))
    assert "400 W a device: computing takes 1." in line


def test_json_tells_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(BATCH, *HERE, "--json", "--top", "4") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_devices"], len(found["candidates"])) == (1024, 4)
    for candidate in found["candidates"]:
        assert sum(candidate["breakdown_s"].values()) == pytest.approx(candidate["step_s"])
    best = found["candidates"][0]
    assert found["low_s"] < best["step_s"] < found["high_s"]
    assert sum(found["memory_bytes"].values()) == pytest.approx(best["peak_bytes"])
    assert isinstance(best["peak_bytes"], int)
    assert found["changes"]["parallelism"] == {"replicate": 1024}
    assert found["recipe"] == "recipe.planned.yaml"


def test_explaining_shows_time_memory_and_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(BATCH, *HERE, "--explain") == 0
    out = capsys.readouterr().out
    for text in (
        "step time of the best candidate",
        "matrix products",
        "100.0%",
        "memory of the fullest device",
        "total",
    ):
        assert text in out
    assert "rank 0  computing" in out


def test_a_trace_is_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(BATCH, *HERE, "--trace", "step.json") == 0
    assert any(each["ph"] == "X" for each in json.loads((folder / "step.json").read_text())["traceEvents"])
    assert "recipe.planned.yaml and step.json" in capsys.readouterr().out


def test_a_cluster_file_is_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "room.yaml").write_text(ROOM)
    assert plan("--cluster", "room.yaml") == 0
    assert "16 x Own on 2 nodes (room)" in capsys.readouterr().out


ROOM = """\
name: room
nodes: 2
node:
  count: 8
  accelerator: {name: Own, tflops: {bf16: 100}, memory_gib: 24, memory_gbps: 900}
  scale_up: {link: PCIe, gbps: 25, domain: 8}
  scale_out: {link: Ethernet, gbps: 12.5}
"""


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--cluster", "h10"], 78, "h10"),
        (["--cluster", "h100", "--num-gpus", "0"], 64, "--num-gpus"),
        (["--cluster", "h100:8", "--num-gpus", "64"], 64, "has 8 devices"),
        (["--cluster", "nowhere.yaml"], 78, "nowhere.yaml"),
        ([*HERE, "--out", "nowhere/x.yaml"], 64, "--out nowhere/x.yaml: there is no folder"),
        ([*HERE, "--trace", "nowhere/x.json"], 64, "--trace nowhere/x.json: there is no folder"),
        ([*HERE, "--trace", "."], 64, "--trace .: is a folder; expected a file"),
        ([*HERE, "--in-place", "--out", "x.yaml"], 64, "--in-place, --out x.yaml: give one of the two"),
        ([*HERE, "--top", "0"], 64, "--top"),
        (["batch.global_size=7", *HERE], 78, "a multiple of 1024 samples can"),
        (["stepz=3", *HERE], 78, "steps"),
        (
            ["device=cpu", "--cluster", "h100"],
            78,
            "device: found cpu, but h100 computes with NVIDIA H100 SXM; use device=",
        ),
        (
            ["device=cuda", "--cluster", "cpu"],
            78,
            "computes with generic CPU; use device=cpu or device=auto, or another",
        ),
        (
            ["device=cuda", "--cluster", "tpu v4:4"],
            78,
            "computes with Google TPU v4; use device=auto, or another --clus",
        ),
        (["device=xpu", "--cluster", "mi300x:8"], 78, "computes with AMD MI300X; use device=cuda or device=auto"),
        (["device=mps", "--cluster", "gaudi3"], 78, "computes with Intel Gaudi3; use device=auto"),
        ([], 64, "this machine has not been measured: run `phalanx calibrate` first"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused(
    arguments: list[str], code: int, text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*arguments) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert text in error
    assert not (folder / "recipe.planned.yaml").exists()


def test_a_cluster_that_is_nearly_right_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--cluster", "dgx-h10") == 78
    assert "dgx-h100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "key"),
    [("memory_gib: 24", "memory_gib"), ("gbps: 12.5", "scale_out.gbps"), ("count: 8", "count")],
)
def test_a_cluster_file_with_figures_that_cannot_be_names_the_key(
    wrong: str, key: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "room.yaml").write_text(ROOM.replace(wrong, wrong.split(":")[0] + ": -1"))
    assert plan("--cluster", "room.yaml") == 78
    error = capsys.readouterr().err
    assert "room.yaml" in error
    assert key in error


def test_a_model_that_fits_nowhere_says_by_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    huge = ["model.args.layers=200", "model.args.hidden_size=16384", "model.args.num_heads=128", "batch.global_size=8"]
    assert plan(*huge, "--cluster", "h100:8") == 78
    error = capsys.readouterr().err
    assert "nothing fits" in error
    assert "GiB" in error


def test_a_recipe_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["plan", "none.yaml", *HERE]) in (64, 78)
    assert "none.yaml" in capsys.readouterr().err
