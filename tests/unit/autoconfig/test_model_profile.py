"""A model that is followed in a process beside ours, each time from a fresh interpreter, which has neither threads nor
torch."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLLOW = """
import sys

import psutil

from phalanx.beside import preload_torch

with preload_torch() as beside:
    from pathlib import Path

    from phalanx.data.expected_info import expect_data_info
    from phalanx.errors import RecipeError
    from phalanx.autoconfig.model_profile import profile_model
    from phalanx.recipe import load_recipe

    assert len(psutil.Process().children()) == 1
    try:
        loaded = load_recipe(Path("recipe.yaml"))
        if sys.argv[1] == "fail":
            raise RecipeError("something else is wrong")
        info = expect_data_info(loaded.recipe.data, loaded.recipe_dir)
        print(len(profile_model(loaded, info, subprocess_call=beside).segments))
    except RecipeError as error:
        print(error)
print("torch" in sys.modules, len(psutil.Process().children()))
"""
RECIPE = """
model: {build: %s, args: {layers: 3, hidden_size: 32, num_heads: 2}}
data: {source: {text: text.txt}, seq_len: 16}
"""


def script(text: str, folder: Path, *words: str) -> list[str]:
    """What it prints."""
    environment = {"PHALANX_CACHE_DIR": str(folder / "cache"), "PATH": ""}
    command = [sys.executable, "-c", text, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def follow(folder: Path, build: str, what: str = "follow") -> list[str]:
    """What the first script above prints."""
    (folder / "text.txt").write_text("some text")
    (folder / "recipe.yaml").write_text(RECIPE % build)
    return script(FOLLOW, folder, what)


def test_a_model_is_followed_without_torch_in_our_process(tmp_path: Path) -> None:
    segments, rest = follow(tmp_path, "phalanx.models:transformer")
    assert int(segments) >= 2
    assert rest == "False 0"


@pytest.mark.parametrize("what", ["follow", "fail"])
def test_what_is_wrong_is_told_and_no_process_is_left(tmp_path: Path, what: str) -> None:
    told, rest = follow(tmp_path, "nowhere:model", what)
    assert ("nowhere" if what == "follow" else "something else") in told
    assert rest.endswith(" 0")


def test_what_is_called_beside_us_returns_what_it_found(tmp_path: Path) -> None:
    text = "from phalanx.beside import preload_torch\nwith preload_torch() as call: print(call('operator:neg', 5))"
    assert script(text, tmp_path) == ["-5"]


@pytest.mark.parametrize(
    "how", ["call('os:_exit', 0)", "call('builtins:int', 'x'), call('builtins:int', 5)"], ids=["dies", "raises"]
)
def test_what_did_not_return_there_is_none(tmp_path: Path, how: str) -> None:
    text = f"from phalanx.beside import preload_torch\nimport os\nwith preload_torch() as call: print({how})"
    (told,) = script(text, tmp_path)
    assert told in ("None", "None None")


@pytest.mark.parametrize("how", ["SIGSTOP", "never"])
def test_what_is_stopped_or_hangs_beside_us_is_not_waited_for_without_end(tmp_path: Path, how: str) -> None:
    (tmp_path / "torch.py").write_text("import signal\nsignal.pause()\n")
    stop = (
        "[child.suspend() for child in psutil.Process().children()]"
        if how == "SIGSTOP"
        else "beside.ANSWER_TIMEOUT_S = 0.2"
    )
    text = (
        "import psutil, phalanx.beside as beside\n"
        f"beside.POLL_INTERVAL_S = 0.05\nwith beside.preload_torch() as call:\n  {stop}\n  print(call('operator:neg', "
        f"5))\n"
    )
    assert script(text, tmp_path) == ["None"]


def test_where_torch_is_imported_already_nothing_is_called_beside_it(tmp_path: Path) -> None:
    text = "from phalanx.beside import preload_torch as t\nimport numpy\nwith t() as call: print(call('math:sqrt', 4))"
    assert script(text, tmp_path) == ["None"]


def test_a_first_plan_is_followed_by_the_process_that_the_command_begins_with(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "recipe.yaml").write_text(RECIPE % "phalanx.models:transformer")
    text = (
        "import sys; sys.argv[1:] = ['plan', 'recipe.yaml', '--cluster', 'h100:1']\n"
        "from phalanx.__main__ import main\n"
        "code = main()\n"
        "print(code, 'torch' in sys.modules)"
    )
    assert script(text, tmp_path)[-1] == "0 False"


def test_an_interrupt_while_the_command_is_imported_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    text = "import sys; sys.path.insert(0, '.')\nfrom phalanx.__main__ import main\nprint(main())"
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("75\n", "error: interrupted\n")
