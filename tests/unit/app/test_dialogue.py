"""Dialogues with a model that has a chat template, through the functions of app and the commands."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.app.evaluate import CheckpointSelection
from phalanx.app.generate import SamplingOptions, TextModel, answer_dialogue, fit_dialogue, load_text_model
from phalanx.app.train import train
from phalanx.cli import main
from phalanx.errors import UsageError
from phalanx.run import Run

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
tiny = pytest.importorskip("tiny_huggingface")

NEWEST = CheckpointSelection()
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
OWN_TEMPLATE = TEMPLATE.replace("<|start|>", "<|start|>the ")
RECIPE = """\
name: small
model: {build: "hf:base"}
task: chat
data: {source: {jsonl: chat.jsonl}, tokenizer: base, seq_len: 64, chat: {template: own.jinja}}
steps: 2
batch: {global_size: 2, micro_size: 2}
evaluation: {every: null, holdout_fraction: 0.2}
precision: fp32
num_threads: 1
compile: false
"""


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory of a tiny model whose end of turn is not its end of text, and conversations."""
    folder = tmp_path_factory.mktemp("chat")
    tiny.save_chat_model(folder / "base", TEMPLATE)
    rows = [{"messages": [*ask("Hi"), {"role": "assistant", "content": "ho"}]}] * 20
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own.jinja").write_text(OWN_TEMPLATE)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def base(folder: Path) -> TextModel:
    return load_text_model(str(folder / "base"), NEWEST, "cpu")


def test_a_prompt_is_rendered_as_transformers_does_with_one_bos(base: TextModel, folder: Path) -> None:
    reference = transformers.AutoTokenizer.from_pretrained(folder / "base")
    prompt = base.encode_messages(ask("What?"))
    assert prompt.text == reference.apply_chat_template(ask("What?"), tokenize=False, add_generation_prompt=True)
    assert prompt.tokens == reference(prompt.text, add_special_tokens=False)["input_ids"]
    assert prompt.tokens.count(0) == 1


def test_names_of_control_tokens_in_a_message_are_text(base: TextModel) -> None:
    prompt = base.encode_messages(ask("<|end|>\ufdd00\ufdd1\0"))
    assert "<|end|>\ufffd0\ufffd\ufffd<|end|>" in prompt.text
    assert prompt.tokens.count(3) == 1


def test_an_answer_ends_at_the_end_of_turn_token_of_the_template(
    base: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = [*base.tokenizer.encode("ho"), 3, *base.tokenizer.encode("lost")]
    monkeypatch.setattr("phalanx.app.generate.generate_tokens", lambda *_: iter(answer))
    dialogue = fit_dialogue(base, ask("Hi"), 9)
    assert base.ends == {1, 3}
    assert "".join(answer_dialogue(base, dialogue, SamplingOptions())) == "ho"


def test_the_oldest_turns_are_left_out_when_the_context_is_full(base: TextModel) -> None:
    system = {"role": "system", "content": "Be brief."}
    turns = [message for n in "abc" for message in (*ask(n * 9), {"role": "assistant", "content": n})]
    small = replace(base, window=110)
    fitted = fit_dialogue(small, [system, *turns, *ask("end")], 20)
    assert [message["content"] for message in fitted.messages] == ["Be brief.", "c" * 9, "c", "end"]
    notes: list[str] = []
    list(answer_dialogue(small, fitted, SamplingOptions(num_tokens=2), notes.append))
    assert notes[0] == "The context of 110 tokens is full: 4 old messages left out."
    with pytest.raises(UsageError, match="shorten it"):
        fit_dialogue(small, ask("long" * 50), 20)


def test_a_run_keeps_the_template_that_its_recipe_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(folder / "recipe.yaml", run=folder / "run")
    (folder / "own.jinja").unlink()
    assert main.main(["generate", str(folder / "run"), "--prompt", "Hi", "--tokens", "3", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["prompt"] == "<|bos|><|start|>the user\nHi<|end|>\n<|start|>the assistant\n"
    assert main.main(["checkpoint", "export", str(folder / "run"), str(folder / "exported")]) == 0
    assert (folder / "exported" / "chat_template.jinja").read_text() == OWN_TEMPLATE
    exported = load_text_model(str(folder / "exported"), NEWEST, "cpu")
    assert exported.encode_messages(ask("Hi")).text == printed["prompt"]
    capsys.readouterr()
    assert main.main(["evaluate", str(folder / "run")]) == 0
    assert {"perplexity", "token_accuracy"} <= {line.split()[0] for line in capsys.readouterr().out.splitlines()}


def test_chat_answers_with_the_turns_before_until_the_input_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def answer(text_model: TextModel, dialogue: object, *_: object) -> object:
        asked.append([message["content"] for message in dialogue.messages])  # type: ignore[attr-defined]
        yield from ("y", "es")
        if asked[-1][-1] == "stop":
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\nstop\nand\n/clear\nagain\n"))
    monkeypatch.setattr("phalanx.app.generate.answer_dialogue", answer)
    assert main.main(["chat", str(folder / "base"), "--system", "Be brief."]) == 0
    assert asked == [
        ["Be brief.", "Hi"],
        ["Be brief.", "Hi", "yes", "stop"],
        ["Be brief.", "Hi", "yes", "stop", "yes", "and"],
        ["Be brief.", "again"],
    ]
    assert "(stopped)" in capsys.readouterr().err


def test_a_model_without_a_template_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = shutil.copytree(folder / "base", folder / "bare")
    (bare / "chat_template.jinja").unlink()
    assert main.main(["chat", str(bare)]) == 64
    assert "has no chat template" in capsys.readouterr().err
    assert not Run(bare).has_started()
