"""The command line's frame: lazy verbs, and every way to fail ends in its own exit code without a traceback."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import phalanx
from phalanx.cli import main
from phalanx.errors import DataError
from phalanx.run import Run

VERBS = ["train", "report", "compare", "generate", "evaluate", "profile", "data", "checkpoint", "recipe"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def verb(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    """Put `function` in the place of `phalanx train`."""
    module = ModuleType("phalanx.cli.stand_in")
    module.train = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "phalanx.cli.stand_in", module)
    monkeypatch.setitem(main._COMMAND_MODULES, "train", ("phalanx.cli.stand_in:train", "A stand-in."))


def test_help_lists_every_verb_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from phalanx.cli.main import main; code = main(['--help']);"
        "heavy = {'torch', 'pydantic', 'numpy', 'yaml', 'rich'} & set(sys.modules); sys.exit(f'{code} {heavy}')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "0 set()\n"
    for name in VERBS:
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize("group", ["jobs", "data", "checkpoint", "recipe"])
def test_a_group_without_a_command_lists_its_commands_in_whole_sentences(
    group: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([group]) == 64
    listed = capsys.readouterr().err
    assert listed.startswith(f"Usage: phalanx {group}")
    assert "\nCommands:\n" in listed
    assert "..." not in listed.partition("\nCommands:\n")[2]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.args.layer=2", "model.args.layer: the builder takes no such argument; it takes vocab_size"),
        ("model.build=builtins:dict", "model.build: <class 'dict'> has no signature"),
    ],
)
def test_recipe_check_refuses_arguments_that_the_model_does_not_take(
    override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("r.yaml").write_text('model: {build: "phalanx.models:transformer"}\ndata: {source: {text: "*.txt"}}\n')
    assert main.main(["recipe", "check", "r.yaml"]) == 0
    assert main.main(["recipe", "check", "r.yaml", override]) == 78
    assert f"error: override {override}: {message}" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{name}-1.2")
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == "phalanx phalanx-1.2\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nope"], "No such option"),
        (["train", "r.yaml", "--steps", "5"], "Recipe keys are written without dashes, such as steps=50"),
        (["recipe", "check", "r.yaml", "steps"], "override 'steps': expected KEY=VALUE"),
    ],
)
def test_wrong_usage_exits_64(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("r.yaml").write_text("")
    assert main.main(arguments) == 64
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert said in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        ("name: x\nstepz: 3", [], "r.yaml:2: stepz: unknown key; did you mean steps?"),
        ("name: x\nsteps: soon", [], 'r.yaml:2: steps: found "soon", expected a whole number'),
        (
            "batch: {global_size: 16, micro_size: 4}",
            ["--world-size", "8"],
            "r.yaml:1: batch.micro_size: 4 x 8 workers = 32 does not divide",
        ),
        ("task: 'not_here:Task'\nmodel: {build: 'json:load'}", [], "r.yaml:1: task: 'not_here:Task'"),
        ("", [], "r.yaml: names no model and no data.source; a recipe must name its model and its data"),
        ("model: [", [], "r.yaml:2: not valid YAML"),
        (None, [], "r.yaml: there is no such file"),
    ],
)
def test_a_bad_recipe_exits_78_in_two_lines_and_leaves_nothing_behind(
    text: str | None, arguments: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        Path("r.yaml").write_text(text + "\n")
    before = sorted(folder.rglob("*"))
    assert main.main(["recipe", "check", "r.yaml", *arguments]) == 78
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert said in captured.err
    assert "Traceback" not in captured.err
    assert len(captured.err.splitlines()) <= 2
    assert sorted(folder.rglob("*")) == before


def test_a_good_recipe_is_ok_and_tells_what_is_auto(capsys: pytest.CaptureFixture[str]) -> None:
    Path("r.yaml").write_text("model: {build: 'json:load'}\nprecision: fp32\ndata: {source: {text: '*'}}\n")
    assert main.main(["recipe", "check", "r.yaml", "steps=7"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "ok  r.yaml: gpt-python, 7 steps of 16 samples"
    assert "batch.micro_size" in second
    assert "precision" not in second


def test_a_check_as_json_has_the_whole_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    Path("r.yaml").write_text("model: {build: 'json:load'}\ndata: {source: {text: '*'}}\n")
    assert main.main(["recipe", "check", "r.yaml", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["recipe"]["batch"] == {"global_size": 16, "micro_size": "auto", "scale_with_workers": False}
    assert "precision" in answer["auto"]


def fail_with(error: Exception) -> Callable[[], None]:
    def train() -> None:
        raise error

    return train


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()


@pytest.mark.parametrize(
    ("train", "code", "said"),
    [
        (fail_with(DataError("shard-3: block 7 is damaged")), 65, "shard-3: block 7 is damaged"),
        (fail_with(MemoryError()), 64, "out of memory"),
        (fail_with(MemoryError("Unable to allocate 7 TiB")), 64, "out of memory: Unable to allocate 7 TiB"),
        (fail_with(OverflowError("cannot fit 'int'")), 64, "a number is too large: cannot fit 'int'"),
        (lambda: Path("not/there").mkdir(), 64, "not/there: No such file or directory"),
        (lambda: os.listdir("lost"), 75, "storage fails: lost: Too many levels of symbolic links"),
        (interrupt, 75, "interrupted"),
    ],
)
def test_an_error_that_is_no_bug_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], train: Any, code: int, said: str
) -> None:
    Path("lost").symlink_to("lost")
    verb(monkeypatch, train)
    assert main.main(["train"]) == code
    assert capsys.readouterr().err == f"error: {said}\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    verb(monkeypatch, fail_with(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main.main(["train"])


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = (
        "import sys; from phalanx.cli.main import main; from phalanx.recipe import schema;"
        "input(); sys.exit(main(['recipe', 'schema']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    process.stdout.close()
    process.stdin.write("\n")
    process.stdin.close()
    process.stdin = process.stdout = None
    assert process.communicate()[1] == ""
    assert process.returncode == 75


def test_the_python_interface_is_imported_when_it_is_used() -> None:
    code = (
        "import sys, phalanx; before = 'pydantic' in sys.modules; phalanx.Recipe; phalanx.Run;"
        'sys.exit(f\'{before} {"pydantic" in sys.modules} {"torch" in sys.modules}\')'
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "False True False\n"
    with pytest.raises(AttributeError, match="no attribute 'Nope'"):
        _ = phalanx.Nope


@pytest.mark.parametrize("verb", ["generate", "evaluate"])
def test_a_step_and_the_best_one_are_not_asked_for_at_once(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Run(tmp_path / "run").create()
    (tmp_path / "run" / "resolved.yaml").write_text("steps: 3\n")
    assert main.main([verb, str(tmp_path / "run"), "--step", "3", "--best"]) == 64
    assert "--step 3 and --best: give one of them" in capsys.readouterr().err


def test_an_interrupt_while_the_command_is_imported_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    text = "import sys; sys.path.insert(0, '.')\nfrom phalanx.__main__ import main\nprint(main())"
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("75\n", "error: interrupted\n")
