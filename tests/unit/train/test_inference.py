"""A trained model out of a run: which checkpoint is taken, and what is said when there is none."""

import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import checkpoints
from phalanx.cli import main
from phalanx.data import DataInfo, open_data, prepare_source
from phalanx.errors import DataError, RecipeError, UsageError
from phalanx.recipe import Recipe
from phalanx.recipe.data_schema import DataConfig, DataSource
from phalanx.recipe.load import dump_recipe
from phalanx.run import Run
from phalanx.run.directory import write_json
from phalanx.train.checkpoint.durable import best_checkpoint_file
from phalanx.train.distributed.module_state import get_model_tensors
from phalanx.train.inference import check_data, given_device, load_trained_model
from phalanx.train.model_builder import build_model
from resolved_recipes import resolved_recipe
from small_train import SEQUENCE, VOCAB

CPU = torch.device("cpu")
FACTS = DataInfo("tokens", VOCAB, None, SEQUENCE, None)
RECIPE = resolved_recipe(
    model={"args": {"layers": 1, "hidden_size": 8, "num_heads": 2}},
    data={"source": {"prepared": "/nowhere"}},
    batch={"micro_size": 4},
)
OWN = resolved_recipe(model={"build": "os:system", "args": {"command": "exit"}})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with checkpoints of step 2 and 4, whose weights are all 2 and 4."""
    run = Run(tmp_path)
    run.create()
    run.resolved.write_text(dump_recipe(RECIPE))
    write_json(run.plan, {"data_info": asdict(FACTS)})
    write_json(run.environment, {"folder": str(tmp_path)})
    for step in (2, 4):
        save(run, step)
    return run


def save(run: Run, step: int, recipe: Recipe = RECIPE) -> None:
    """A checkpoint whose weights are all its step, with the recipe that it was trained with."""
    model = build_model(RECIPE.model, FACTS, run.path, 0, CPU)
    tensors = {name: torch.full_like(tensor, step) for name, tensor in get_model_tensors(model).items()}
    tensors["optimizer/embedding.weight/exp_avg"] = torch.zeros(3)
    meta = {"recipe": recipe.model_dump(mode="json"), "model": {"build": recipe.model.build}}
    checkpoints.save(run.checkpoints, step, tensors, meta)


def weight(run: Run, step: int | None = None, best: bool = False) -> float:
    """What all weights of the model that is chosen are."""
    model = load_trained_model(run, step, best, CPU).model
    (value,) = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).unique().tolist()
    return float(value)


def test_it_is_the_newest_the_named_or_the_recorded_best(run: Run) -> None:
    write_json(best_checkpoint_file(run), {"step": 2, "loss": 0.5})
    assert weight(run) == 4.0
    assert weight(run, step=2) == 2.0
    assert weight(run, best=True) == 2.0


def test_the_model_is_ready_to_be_used(run: Run) -> None:
    trained = load_trained_model(run, None, False, CPU)
    assert not trained.model.training
    assert trained.model(torch.zeros(1, SEQUENCE, dtype=torch.int64)).shape == (1, SEQUENCE, VOCAB)
    assert trained.checkpoint.name == "step-000000004"


def test_a_checkpoint_that_is_not_there_is_told_with_those_that_are(run: Run) -> None:
    with pytest.raises(UsageError, match="no checkpoint of step 3; there are: step-000000004, step-000000002"):
        load_trained_model(run, 3, False, CPU)
    with pytest.raises(UsageError, match="no best checkpoint is recorded"):
        load_trained_model(run, None, True, CPU)
    write_json(best_checkpoint_file(run), {"step": 3, "loss": 0.5})
    with pytest.raises(UsageError, match="the best checkpoint was that of step 3, which is gone; there are: step-0"):
        load_trained_model(run, None, True, CPU)


def test_a_run_without_any_checkpoint_is_told(run: Run) -> None:
    shutil.rmtree(run.checkpoints)
    run.checkpoints.mkdir()
    with pytest.raises(UsageError, match="no checkpoint yet"):
        load_trained_model(run, None, False, CPU)


def test_when_every_checkpoint_is_damaged_each_is_named(run: Run) -> None:
    for path in run.checkpoints.glob("*/MANIFEST.json"):
        path.write_text("{}")
    with pytest.raises(DataError) as caught:
        load_trained_model(run, None, False, CPU)
    assert all(f"step-00000000{step}" in str(caught.value) for step in (2, 4))


def test_the_recipe_is_that_of_the_checkpoint(run: Run) -> None:
    run.resolved.write_text(dump_recipe(RECIPE).replace("heads: 2", "heads: 4"))
    assert load_trained_model(run, None, False, CPU).recipe == RECIPE
    run.resolved.unlink()
    assert load_trained_model(run, None, False, CPU).recipe == RECIPE


def test_a_damaged_newest_is_named_beside_what_is_taken(run: Run) -> None:
    (run.checkpoints / "step-000000004" / "MANIFEST.json").write_text("{}")
    assert weight(run) == 2.0
    (note,) = load_trained_model(run, None, False, CPU).notes
    assert "step-000000004" in note
    assert note.endswith("; step-000000002 is taken")


@pytest.mark.parametrize("content", [None, "", "{}"])
def test_a_lost_plan_is_named(run: Run, content: str | None) -> None:
    run.plan.unlink() if content is None else run.plan.write_text(content)
    with pytest.raises(DataError, match=r"plan\.json: is .*; it says what the model was built for"):
        load_trained_model(run, None, False, CPU)


@pytest.mark.parametrize("content", [None, "{}"])
def test_without_code_of_ones_own_the_environment_may_be_lost(run: Run, content: str | None) -> None:
    run.environment.unlink() if content is None else run.environment.write_text(content)
    assert weight(run) == 4.0
    save(run, 6, OWN)
    run.resolved.unlink()
    with pytest.raises(DataError, match=r"environment\.json: .*; it names the folder with the model"):
        load_trained_model(run, None, False, CPU)


@pytest.mark.parametrize(
    ("given", "device"), [("device: cpu\n", "cpu"), ("steps: 3\n", "auto"), ("]", "auto"), (None, "auto")]
)
def test_scores_are_computed_where_the_recipe_says(run: Run, given: str | None, device: str) -> None:
    if given is not None:
        run.recipe.write_text(given)
    assert given_device(run) == device


def test_a_run_that_names_a_command_runs_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_STATE_DIR", str(tmp_path / "state"))
    command = {"build": "os:system", "args": {"command": f"touch {tmp_path}/ran"}}
    save(run, 6, resolved_recipe(model=command))
    with pytest.raises(UsageError, match="would run code that you have not trained with here: os:system"):
        load_trained_model(run, None, False, CPU)
    assert not (tmp_path / "ran").exists()


def test_modules_beside_a_received_run_are_not_imported(run: Run, tmp_path: Path) -> None:
    """Not even in the place of a library's own."""
    (tmp_path / "convnets.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    before = list(sys.path)
    assert weight(run) == 4.0
    assert sys.path == before


@pytest.mark.parametrize("facts", [[], {"x": 1}, {**asdict(FACTS), "kind": 1}, {**asdict(FACTS), "vocab_size": -1}])
def test_facts_that_no_data_have_are_refused(run: Run, facts: object) -> None:
    write_json(run.plan, {"data_info": facts})
    with pytest.raises(DataError, match=r"plan.json: facts is not what data have"):
        load_trained_model(run, None, False, CPU)


@pytest.mark.parametrize("step", ["x", 1.5])
def test_a_best_step_that_is_no_number_is_refused(run: Run, step: object) -> None:
    write_json(best_checkpoint_file(run), {"step": step})
    with pytest.raises(DataError, match=r"best.json: step is .*, expected a number"):
        load_trained_model(run, None, True, CPU)


@pytest.mark.parametrize("folder", [None, "logs"])
def test_a_folder_that_is_no_absolute_path_is_refused(run: Run, folder: object) -> None:
    write_json(run.environment, {"folder": folder})
    save(run, 6, OWN)
    with pytest.raises(DataError, match="expected an absolute path"):
        load_trained_model(run, None, False, CPU)


def test_text_is_not_made_without_the_tokenizer_that_the_model_was_trained_with(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["generate", str(run.path)]) == 65
    assert f"tokenizer.json: is missing, and the model was trained on {VOCAB:,} tokens" in capsys.readouterr().err


def test_scores_are_not_computed_elsewhere_than_the_recipe_says(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.recipe.write_text("device: cuda\n")
    assert main.main(["evaluate", str(run.path)]) == 78
    assert "device: found cuda, but torch" in capsys.readouterr().err
    assert main.main(["evaluate", str(run.path), "--device", "cpu"]) == 65  # its data are nowhere
    assert "device" not in capsys.readouterr().err


def test_prepared_data_that_are_gone_are_named_with_what_prepares_them_again(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("a few words of no meaning. " * 40)
    data = DataConfig(source=DataSource(text="*.txt"), seq_len=16)
    place = prepare_source(data.source, data, tmp_path, tmp_path / "dataset")
    recipe = RECIPE.model_copy(update={"data": DataConfig(source=DataSource(prepared=str(place)), seq_len=16)})
    check_data(recipe)
    shutil.rmtree(place)
    with pytest.raises(DataError, match=r"dataset: the run's prepared data are gone; `phalanx train RECIPE --dry-run`"):
        check_data(recipe)
    unresolved = RECIPE.model_copy(update={"data": DataConfig(source=DataSource(text="/etc/*"), seq_len=16)})
    with pytest.raises(DataError, match=r"^data\.source: the run's prepared data are gone"):
        check_data(unresolved)
    with pytest.raises(RecipeError, match=r"^data\.source: found text, expected `prepared`"):
        open_data(unresolved.data, unresolved.evaluation, 0)
