"""Every number that the command line takes has bounds, and what is out of them is wrong usage, before anything runs."""

import importlib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from phalanx.cli import main
from phalanx.errors import UsageError
from phalanx.run import Run


def commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each command's words and function."""
    for verb, (where, _) in main._COMMAND_MODULES.items():
        module, _, attribute = where.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        if isinstance(found, typer.Typer):
            for each in found.registered_commands:
                assert each.callback is not None
                yield (verb, each.name or each.callback.__name__), each.callback
        else:
            yield (verb,), found


def numeric_options() -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Each option of a single number: the words of its command, its name and what the parser knows of it."""
    for words, function in commands():
        for name, hint in typing.get_type_hints(function, include_extras=True).items():
            kind, *info = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (None,)
            if info and {int, float} & {kind, *typing.get_args(kind)} and typing.get_origin(kind) is not tuple:
                given = (info[0].default, *(info[0].param_decls or ()))  # typer takes the first word for a default
                spelled = (word for word in given if isinstance(word, str) and word.startswith("--"))
                yield words, next(spelled, f"--{name.replace('_', '-')}"), info[0]


OPTIONS = list(numeric_options())
LABELS = [" ".join((*words, name)) for words, name, _ in OPTIONS]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_numeric_options_are_found() -> None:
    assert {"train --nproc-per-node", "generate --temperature", "jobs submit --priority"} <= set(LABELS)
    assert len(LABELS) > 25


@pytest.mark.parametrize("number", range(len(OPTIONS)), ids=LABELS)
def test_a_number_has_a_bound_on_either_side(number: int) -> None:
    _, _, option = OPTIONS[number]
    assert option.min is not None
    assert option.max is not None


@pytest.mark.parametrize(
    "given", ["1000000000000000000000000", "-1000000000000000000000000", "nan", "inf", "1e308", ""]
)
@pytest.mark.parametrize("number", range(len(OPTIONS)), ids=LABELS)
def test_a_number_out_of_bounds_is_wrong_usage(number: int, given: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, name, _ = OPTIONS[number]
    assert main.main([*words, "a", "b", f"{name}={given}"]) == 64
    said = capsys.readouterr().err
    assert name in said
    assert "Traceback" not in said


@pytest.mark.parametrize("size", [("0", "5"), ("-1", "5"), ("5", "16385"), ("5", "9" * 25)])
def test_pictures_have_a_size_within_bounds(size: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["data", "prepare", "--out", "o", "--images", "i", "--image-size", *size]) == 64
    assert "1 to 16,384 pixels a side" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["0", "256", "10000001", "-5", "1e3", "9" * 5000])
def test_a_vocabulary_has_a_size_within_bounds(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["data", "prepare", "--out", "o", "*.txt", "--tokenizer", f"bpe:{size}"]) == 64
    assert "a BPE has 257 to 10,000,000 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["nan", "inf", "-1h", "1e400", "9" * 400 + ":00:00", "1h30", ""])
def test_a_time_limit_that_is_none_is_refused(text: str) -> None:
    from phalanx.app.submit import parse_duration
    from phalanx.jobs.spec import Job

    with pytest.raises(UsageError, match=r"time limit|duration"):
        Job("a", ("true",), Path("/"), time_limit_s=parse_duration(text))


PICTURES = ["--images", "i", "--image-size", "4", "4"]
IDX = ["--idx", "a", "b"]


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["*.txt", "--text-field", "body"], "--text-field is for jsonl, parquet, and the source is text"),
        (["*.txt", "--image-size", "4", "4"], "--image-size is for images, and the source is text"),
        ([*IDX, "--image-size", "4", "4"], "--image-size is for images, and the source is idx"),
        ([*IDX, "--text-field", "body"], "--text-field is for jsonl, parquet, and the source is idx"),
        ([*PICTURES, "--exclude", "x"], "--exclude is for text, jsonl, parquet, and the source is images"),
        ([*PICTURES, "--tokenizer", "bpe:300"], "--tokenizer is for text, and the source has images"),
    ],
)
def test_options_of_data_prepare_that_its_source_does_not_use_are_refused(
    words: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["data", "prepare", "--out", "o", *words]) == 64
    assert option in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["generate", "evaluate"])
def test_a_step_and_the_best_one_are_not_asked_for_at_once(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Run(tmp_path / "run").create()
    (tmp_path / "run" / "resolved.yaml").write_text("steps: 3\n")
    assert main.main([verb, str(tmp_path / "run"), "--step", "3", "--best"]) == 64
    assert "--step 3 and --best: give one of them" in capsys.readouterr().err


def test_a_word_instead_of_a_number_is_refused_in_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["calibrate", "--nproc-per-node", "abc"]) == 64
    assert "--nproc-per-node': expected a whole number" in capsys.readouterr().err
