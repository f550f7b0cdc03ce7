"""Evaluation and generation from a run's checkpoint, through the functions of app and the commands."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from phalanx.app.evaluate import evaluate_run
from phalanx.app.generate import SamplingOptions, decode_incrementally, generate_text
from phalanx.app.trained_model import CheckpointSelection
from phalanx.cli import main
from phalanx.data import load_tokenizer, open_data, prepare_source
from phalanx.errors import UsageError
from phalanx.recipe import dump_recipe
from phalanx.recipe.data_schema import DataConfig, DataSource
from phalanx.run import Run
from phalanx.run.directory import write_json
from phalanx.train.checkpoint import CheckpointSaver, DurableDirectory, TensorShard
from phalanx.train.distributed.module_state import get_model_tensors
from phalanx.train.model_builder import build_model
from resolved_recipes import resolved_recipe

NEWEST = CheckpointSelection()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of a small language model with its data and one checkpoint of random weights."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "words.txt").write_text("a few words of no meaning. " * 400)
    source = DataConfig(source=DataSource(text="*.txt"))
    prepared = prepare_source(source.source, source, folder, folder / "data", num_workers=1)  # type: ignore[arg-type]
    recipe = resolved_recipe(
        name="small",
        model={"build": "phalanx.models:transformer", "args": {"layers": 1, "hidden_size": 8, "num_heads": 2}},
        data={"source": {"prepared": str(prepared)}, "seq_len": 16},
        evaluation={"holdout_fraction": 0.2},
        batch={"micro_size": 4},
        precision="fp32",
        device="cpu",
    )
    run = Run(folder / "run")
    run.create()
    run.recipe.write_text(dump_recipe(recipe))
    run.resolved.write_text(dump_recipe(recipe))
    facts = open_data(recipe.data, recipe.evaluation, recipe.seed).info
    write_json(run.plan, {"data_info": asdict(facts)})
    write_json(run.environment, {"folder": str(folder)})
    tensors = get_model_tensors(build_model(recipe.model, facts, folder, 0, torch.device("cpu")))
    saver = CheckpointSaver(DurableDirectory(run.checkpoints, 0, 1))
    meta = {"step": 2, "recipe": recipe.model_dump(mode="json"), "model": {"build": recipe.model.build}}
    saver.start(2, [TensorShard.full_tensor(*item) for item in tensors.items()], meta)
    saver.poll_when_idle()
    saver.commit()
    return run


def test_evaluate_returns_scores_and_prints_them(trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    scores = evaluate_run(trained, NEWEST, max_samples=8)
    assert (scores.checkpoint, scores.task) == ("step-000000002", "language-modeling")
    assert scores.result.num_samples == 8
    assert main.main(["evaluate", str(trained.path), "--samples", "8", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("duration_s") > 0
    assert printed == {"checkpoint": "step-000000002", "loss": scores.result.loss, "num_samples": 8}
    assert main.main(["evaluate", str(trained.path), "--samples", "8"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in lines] == ["checkpoint", "loss", "samples", "perplexity"]


def test_warnings_of_a_damaged_run_reach_the_caller(trained: Run, tmp_path: Path) -> None:
    run = Run(shutil.copytree(trained.path, tmp_path / "run"))
    run.resolved.unlink()
    warnings: list[str] = []
    evaluate_run(run, NEWEST, max_samples=4, warn=warnings.append)
    assert len(warnings) == 1
    assert "the recipe is taken from step-000000002" in warnings[0]


def test_generate_returns_pieces_that_the_command_prints(trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    sampling = SamplingOptions(num_tokens=6, temperature=0.0)
    text = "".join(generate_text(trained, NEWEST, "words", sampling))
    assert text
    arguments = ["--prompt", "words", "--tokens", "6", "--temperature", "0"]
    assert main.main(["generate", str(trained.path), *arguments]) == 0
    assert capsys.readouterr().out == f"words{text}\n"


def test_an_empty_prompt_is_refused_before_anything_is_generated(trained: Run) -> None:
    with pytest.raises(UsageError, match="give at least one character"):
        generate_text(trained, NEWEST, "", SamplingOptions())


def test_a_character_of_several_bytes_is_decoded_when_it_is_whole() -> None:
    tokens = iter("aé€".encode())
    assert list(decode_incrementally(load_tokenizer("bytes"), tokens)) == ["a", "", "é", "", "", "€"]
