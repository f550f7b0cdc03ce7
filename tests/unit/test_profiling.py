"""A model that is followed in a process beside ours, each time from a fresh interpreter, which has neither threads nor
torch."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLLOW = """
import sys
from pathlib import Path

import psutil

from phalanx.errors import RecipeError
from phalanx.profiling import followed_beside
from phalanx.recipe import load_recipe

loaded = load_recipe(Path("recipe.yaml"))
try:
    with followed_beside(loaded) as profiled:
        assert len(psutil.Process().children()) == 1
        if sys.argv[1] == "fail":
            raise RecipeError("something else is wrong")
        from phalanx.data.foretold import foretold

        print(len(profiled(loaded, foretold(loaded.recipe.data, loaded.folder)).segments))
except RecipeError as error:
    print(error)
print("torch" in sys.modules, len(psutil.Process().children()))
"""
RECIPE = """
model: {build: %s, args: {layers: 3, width: 32, heads: 2}}
data: {source: {text: text.txt}, sequence: 16}
"""


def follow(folder: Path, build: str, what: str = "follow") -> list[str]:
    """What the script above prints."""
    (folder / "text.txt").write_text("some text")
    (folder / "recipe.yaml").write_text(RECIPE % build)
    environment = {"PHALANX_CACHE": str(folder / "cache"), "PATH": ""}
    command = [sys.executable, "-c", FOLLOW, what]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_model_is_followed_without_torch_in_our_process(tmp_path: Path) -> None:
    segments, rest = follow(tmp_path, "phalanx.models:transformer")
    assert int(segments) >= 2
    assert rest == "False 0"


@pytest.mark.parametrize("what", ["follow", "fail"])
def test_what_is_wrong_is_told_and_no_process_is_left(tmp_path: Path, what: str) -> None:
    told, rest = follow(tmp_path, "nowhere:model", what)
    assert ("nowhere" if what == "follow" else "something else") in told
    assert rest.endswith(" 0")
