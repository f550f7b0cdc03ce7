"""`phalanx plan` on the example: what it prints and writes, and what it refuses with which code."""

import json
from pathlib import Path

import numpy as np
import pytest

from phalanx.app.plan import plan as make_plan
from phalanx.app.plan import rank_candidates
from phalanx.autoconfig.plan import RunPlan
from phalanx.cli import main
from phalanx.cli.plan import to_json
from phalanx.recipe import load_recipe
from phalanx.recipe.schema import Parallelism
from small_data import dataset

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


def test_data_rate_and_saving_are_printed_with_the_requests_to_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(BATCH, *HERE, "checkpoint.upload.to=s3://team/run") == 0
    lines = capsys.readouterr().out.splitlines()
    (data,) = [line for line in lines if line.startswith("data  ")]
    (saving,) = [line for line in lines if line.startswith("saving")]
    (store,) = [line for line in lines if line.startswith("store")]
    assert data.startswith("data       needs ")
    assert data.endswith("/s; storage not measured")
    assert saving.startswith("saving     9.45 MB: memory ")
    assert saving.endswith("disk not measured, store not measured")
    assert store == "store      s3://team/run: 3,076 requests a save, 0.0154 USD"


@pytest.mark.parametrize(("options", "name"), [([], "recipe.planned.yaml"), (["--in-place"], "recipe.yaml")])
def test_the_planned_recipe_is_written_with_the_layout(
    options: list[str], name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(BATCH, *HERE, *options) == 0
    assert capsys.readouterr().out.endswith(f"\nwrote {name}\n")
    assert {path.name for path in folder.glob("*.yaml")} == {"recipe.yaml", name}
    recipe = load_recipe(folder / name, []).recipe
    assert isinstance(recipe.parallelism, Parallelism)
    assert recipe.parallelism.world == 1024
    assert recipe.batch.global_size == 1024
    assert isinstance(recipe.batch.micro_size, int)


def test_epochs_of_prepared_sources_are_predicted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2):
        dataset(folder / f"data-{number}", [np.zeros(256_000 * number + 1, np.uint8)])
    sources = "data.source=[{prepared: data-1, weight: 3}, {prepared: data-2}]"
    assert plan(BATCH, *HERE, sources, "evaluation.holdout_fraction=0", "steps=100") == 0
    assert "\nepochs     76.8 of source 0, 12.8 of source 1\n" in capsys.readouterr().out


def test_the_plan_of_a_recipe_at_a_url_is_written_here(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bucket").mkdir()
    url = f"file://{(folder / 'recipe.yaml').rename(folder / 'bucket/recipe.yaml')}"
    assert main.main(["plan", url, BATCH, *HERE]) == 0
    assert (folder / "recipe.planned.yaml").is_file()
    assert main.main(["plan", url, BATCH, *HERE, "--in-place"]) == 64
    assert f"--in-place: {url} is not a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "cluster"), [("cuda", "h100"), ("cuda", "mi300x:8"), ("cpu", "cpu"), ("auto", "cpu")]
)
def test_a_device_that_the_cluster_has_is_planned_for(
    device: str, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(f"device={device}", "--cluster", cluster) == 0
    assert load_recipe("recipe.planned.yaml", []).recipe.device == device


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
        (["--cluster", "h100:8", "--num-gpus", "64"], 64, "has 8 devices"),
        ([*HERE, "--out", "nowhere/x.yaml"], 64, "--out nowhere/x.yaml: there is no folder"),
        ([*HERE, "--in-place", "--out", "x.yaml"], 64, "--in-place, --out x.yaml: give one of the two"),
        (["batch.global_size=7", *HERE], 78, "a multiple of 1024 samples can"),
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


def test_a_model_that_fits_nowhere_says_by_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    huge = ["model.args.layers=200", "model.args.hidden_size=16384", "model.args.num_heads=128", "batch.global_size=8"]
    assert plan(*huge, "--cluster", "h100:8") == 78
    error = capsys.readouterr().err
    assert "nothing fits" in error
    assert "GiB" in error


@pytest.fixture
def run_plan() -> RunPlan:
    return make_plan(EXAMPLE, "h100:8")


def test_candidates_are_ranked_and_the_others_say_what_costs_more(run_plan: RunPlan) -> None:
    first, *others = rank_candidates(run_plan, 3)
    assert first == (run_plan.best, "")
    assert len(others) == 2
    assert all(reason for _, reason in others)


def test_the_parts_of_memory_sum_to_the_total(run_plan: RunPlan) -> None:
    assert sum(to_json(run_plan, 1, EXAMPLE)["memory_bytes"].values()) == pytest.approx(run_plan.footprint.total)
