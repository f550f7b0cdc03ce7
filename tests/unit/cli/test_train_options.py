"""Options of `phalanx train` are obeyed or refused, whoever starts it; nothing is trained here."""

from pathlib import Path

import pytest

from phalanx.app.train import train
from phalanx.app.train_arguments import TrainArguments
from phalanx.cli.main import main
from phalanx.errors import ExitCode, UsageError
from phalanx.recipe import load_recipe
from phalanx.recipe.load import dump_recipe
from phalanx.run import Run
from phalanx.run.directory import write_json
from phalanx.train.distributed.environment import dist_env_from_environment
from resolved_recipes import resolved_recipe

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1"}
RECIPE = "name: one\nsteps: 3\nmodel: {build: 'a:b'}\ndata: {source: {text: '*.txt'}}\n"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PHALANX_NUM_NODES", "PHALANX_NODE_RANK", "PHALANX_LEADER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "one.yaml"
    path.write_text(RECIPE)
    (tmp_path / "loop.py").write_text("raise SystemExit(0)\n")
    return path


@pytest.mark.parametrize(
    ("variables", "words", "told"),
    [
        (LAUNCHED, ["one.yaml", "--dry-run"], "--dry-run: RANK=0 and WORLD_SIZE=1 are set"),
        (LAUNCHED, ["one.yaml", "--nproc-per-node", "2"], "--nproc-per-node 2: RANK=0 and WORLD_SIZE=1 are set"),
        (LAUNCHED, ["loop.py", "--dry-run"], "--dry-run is for recipes"),
        (LAUNCHED, ["loop.py"], "this is a worker of torchrun or srun"),
        (LAUNCHED, ["one.yaml", "--nodes", "2"], "need --on slurm"),
        (LAUNCHED, ["one.yaml", "--time-limit", "2h"], "need --on slurm"),
        ({"PHALANX_NUM_NODES": "2", "PHALANX_LEADER_ADDR": "n1:5000"}, ["loop.py"], "a script runs on one node here"),
        ({}, ["loop.py", "--nproc-per-node", "99999"], "99,999 workers on a node with "),
        ({}, ["one.yaml", "--nproc-per-node", "99999"], "99,999 workers on a node with "),
        ({}, ["loop.py", "--on", "slurm", "--nodes", "2"], "--nodes 2: loop.py is a script, which runs on one node"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_before_anything_is_done(
    recipe: Path,
    variables: dict[str, str],
    words: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["train", *words]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1
    assert not (recipe.parent / "runs").exists()


def test_a_worker_without_the_recipes_device_waits_for_nobody(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(recipe), "device=cuda"]) == ExitCode.RECIPE
    assert "device: found cuda, but torch" in capsys.readouterr().err


def test_empty_variables_of_a_launcher_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "PHALANX_ATTEMPT", "TORCHELASTIC_RESTART_COUNT"), "")
    place = dist_env_from_environment(empty)
    assert (place.rank, place.world_size, place.local_rank, place.attempt) == (0, 1, 0, 0)


@pytest.mark.parametrize("variables", [{"RANK": "", "WORLD_SIZE": ""}, {**LAUNCHED, "PHALANX_NUM_NODES": "2"}])
def test_who_is_no_worker_of_a_launcher_takes_options(
    recipe: Path, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int | None, bool]] = []

    def here(arguments: TrainArguments, dry_run: bool, *_: object) -> int:
        seen.append((arguments.nproc_per_node, dry_run))
        return 0

    monkeypatch.setenv("PHALANX_LEADER_ADDR", "n1:5000")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("phalanx.cli.local_training.train_locally", here)
    assert main(["train", "one.yaml", "--dry-run", "--nproc-per-node", "2"]) == 0
    assert seen == [(2, True)]


def test_a_worker_of_a_launcher_cannot_start_workers_of_its_own(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="this process is one already"):
        train(recipe)


def test_a_node_that_does_not_lead_waits_for_nobody_where_nothing_is_left_to_do(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"NUM_NODES": "2", "NODE_RANK": "1", "LEADER_ADDR": "n1:5000", "TOKEN": "x" * 32}.items():
        monkeypatch.setenv(f"PHALANX_{name}", value)
    run = Run(recipe.parent / "runs" / "one")
    run.create()
    run.recipe.write_text(RECIPE)
    given = load_recipe(recipe).recipe
    run.resolved.write_text(dump_recipe(resolved_recipe(**given.model_dump(exclude_unset=True))))
    write_json(run.result, {"status": "done", "steps": 3})
    assert main(["train", "one.yaml"]) == ExitCode.DONE
    assert "finished at step 3" in capsys.readouterr().err
