"""Evaluation and generation from a run's checkpoint, through the functions of app and the commands."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from phalanx.app.evaluate import CheckpointSelection, evaluate_run
from phalanx.app.generate import SamplingOptions, decode_incrementally, generate_text, load_text_model
from phalanx.cli import main
from phalanx.data import load_tokenizer, open_data, prepare_source
from phalanx.errors import UsageError
from phalanx.recipe import Recipe
from phalanx.recipe.data_schema import DataConfig, DataSource
from phalanx.recipe.load import dump_recipe
from phalanx.run import Run
from phalanx.run.directory import write_json
from phalanx.train.checkpoint.durable import DurableDirectory
from phalanx.train.checkpoint.save import CheckpointSaver
from phalanx.train.checkpoint.shard_file import TensorShard
from phalanx.train.distributed.module_state import get_model_tensors
from phalanx.train.inference import set_threads
from phalanx.train.model_builder import build_model
from resolved_recipes import resolved_recipe

NEWEST = CheckpointSelection()


def save_run(folder: Path, recipe: Recipe) -> Run:
    """A run of a recipe with its data and one checkpoint of initial weights."""
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
    return save_run(folder, recipe)


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
    newest = run.checkpoints / "step-000000009"
    shutil.copytree(next(run.checkpoints.glob("step-*")), newest)
    (newest / "MANIFEST.json").write_text("{}")
    warnings: list[str] = []
    evaluate_run(run, NEWEST, max_samples=4, warn=warnings.append)
    assert len(warnings) == 1
    assert "step-000000002 is taken" in warnings[0]


def test_generate_returns_pieces_that_the_command_prints(trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    sampling = SamplingOptions(num_tokens=6, temperature=0.0)
    text_model = load_text_model(str(trained.path), NEWEST)
    text = "".join(generate_text(text_model, text_model.encode_text("words"), sampling))
    assert text
    arguments = ["--prompt", "words", "--tokens", "6", "--temperature", "0"]
    assert main.main(["generate", str(trained.path), *arguments]) == 0
    assert capsys.readouterr().out == f"words{text}\n"


def test_an_empty_prompt_is_refused_before_anything_is_generated(trained: Run) -> None:
    with pytest.raises(UsageError, match="give at least one character"):
        load_text_model(str(trained.path), NEWEST).encode_text("")


def test_a_character_of_several_bytes_is_decoded_when_it_is_whole() -> None:
    tokens = iter("aé€".encode())
    assert list(decode_incrementally(load_tokenizer("bytes"), tokens)) == ["a", "", "é", "", "", "€"]


def test_an_unfinished_character_at_the_end_is_written() -> None:
    assert "".join(decode_incrementally(load_tokenizer("bytes"), iter(b"a\xe2\x82"))) == "a\ufffd"


def test_generation_stops_at_the_end_of_a_text_and_says_so(
    trained: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("phalanx.app.generate.generate_tokens", lambda *_: iter(b"one.\0two."))
    assert main.main(["generate", str(trained.path), "--prompt", "", "--tokens", "9"]) == 64
    capsys.readouterr()
    assert main.main(["generate", str(trained.path), "--prompt", ">", "--tokens", "9"]) == 0
    printed = capsys.readouterr()
    assert printed.out == ">one.\n"
    assert "the text ended with byte 0 after 5 tokens; --ignore-eos continues behind it" in printed.err
    assert main.main(["generate", str(trained.path), "--prompt", ">", "--tokens", "9", "--ignore-eos"]) == 0
    printed = capsys.readouterr()
    assert printed.out == ">one.\u27e6byte 0\u27e7two.\n"
    assert "ended" not in printed.err


def test_further_ends_of_a_text_stop_generation(trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(shutil.copytree(trained.path, tmp_path / "run"))
    described = {"name": "bytes", "separator": 0, "stops": [33, 63]}
    write_json(run.plan, {**run.read_json_or_empty(run.plan), "tokenizer": described})
    monkeypatch.setattr("phalanx.app.generate.generate_tokens", lambda *_: iter(b"is it? yes"))
    text_model = load_text_model(str(run.path), NEWEST)
    assert "".join(generate_text(text_model, text_model.encode_text(">"), SamplingOptions())) == "is it"


def test_evaluation_takes_the_threads_of_training_and_no_more_than_there_are(
    trained: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr("phalanx.train.inference.count_free_cores", lambda: 3)
    for threads, variable in ((2, ""), (8, ""), (8, "1,4")):
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
        set_threads(threads)
    assert chosen == [2, 3, 1]
    monkeypatch.setattr("phalanx.train.inference.set_threads", lambda threads: chosen.append(threads + 100))
    evaluate_run(trained, NEWEST, max_samples=4)
    assert chosen[3:] == [101]


def test_the_loss_of_one_document_is_that_of_the_tokenizers_own_call(tmp_path: Path) -> None:
    tiny = pytest.importorskip("tiny_huggingface")
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    model = tiny.save_random_model(tmp_path / "origin", "llama")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}, "<unk>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.add_special_tokens(["<unk>", "<s>", "</s>"])
    words.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(tmp_path / "origin")
    text = "a b b a a b " * 5
    (tmp_path / "words.txt").write_text(text)
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path / "origin")(text, return_tensors="pt")["input_ids"]
    data = DataConfig(source=DataSource(text="words.txt"), tokenizer="origin")
    prepared = prepare_source(data.source, data, tmp_path, tmp_path / "data", num_workers=1)  # type: ignore[arg-type]
    source = {"prepared": str(prepared)}
    recipe = resolved_recipe(
        name="small",
        model={"build": "hf:origin"},
        data={"source": source, "seq_len": tokens.numel() - 1},
        evaluation={"source": source},
        batch={"micro_size": 1},
        precision="fp32",
        device="cpu",
    )
    run = save_run(tmp_path, recipe)
    with torch.no_grad():
        expected = float(model(input_ids=tokens, labels=tokens).loss)
    assert evaluate_run(run, NEWEST).result.loss == pytest.approx(expected, abs=1e-5)
