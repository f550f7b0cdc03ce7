"""`phalanx train` from end to end, on recipes, data and run directories in other bytes: an exit code of ours and a
sentence, or the digest of what was not touched. Never a traceback, a hang, twice the memory, or a file elsewhere."""

import json
import os
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mutations import SEED, STRANGE, flipped, hand, mutated, place, put, spliced
from phalanx.cli import main
from phalanx.errors import ExitCode
from phalanx.recipe.yaml_loader import to_yaml
from small_data import prepare

RECIPE = {
    "name": "tiny",
    "model": {"args": {"layers": 1, "hidden_size": 16, "num_heads": 2}},
    "data": {"source": {"text": "a.txt"}, "seq_len": 8},
    "evaluation": {"every": "2 steps", "max_samples": 4},
    "batch": {"global_size": 4, "micro_size": 4},
    "precision": "fp32",
    "compile": False,
    "parallelism": {},
    "num_threads": 1,
    "steps": 3,
    "checkpoint": {"every": "2 steps", "in_memory_every": None},
    "optimizer": {"lr": 0.01, "schedule": {"warmup_steps": 1}},
}
OURS = {ExitCode.DONE, ExitCode.USAGE, ExitCode.DATA, ExitCode.RECIPE}
TRIED = 2 if SEED == 0 else 6
FILES = (
    *("resolved.yaml", "recipe.yaml", "events.jsonl", "plan.json", "cluster.json", "environment.json"),
    *("checkpoints/best.json", "checkpoints/step-000000002/MANIFEST.json", "checkpoints/step-000000002/MANIFEST.xxh3"),
    "checkpoints/step-000000002/rank-00000.safetensors",
)
Run = Callable[..., int]
pytestmark = pytest.mark.timeout(300 if SEED == 0 else 3600)


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Not of address space, of which torch takes as it likes, but of what was really used, in the end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= 2 * max(before, 1 << 19)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, its text, a dataset of it, and a run that goes on at step 2 of 3; `digest` is its end's."""
    top = tmp_path_factory.mktemp("training")
    for name in ("home", "state", "cache", "here"):
        (top / name).mkdir(mode=0o700)
    (top / "here" / "a.txt").write_text("fuzzing finds what nobody thinks of\n" * 60)
    (top / "here" / "recipe.yaml").write_text(to_yaml(RECIPE, flow=False))
    prepare(top / "here", top / "here" / "dataset", {"text": "a.txt"})
    with pytest.MonkeyPatch.context() as patch:
        at_home(patch, top)
        assert main.main(["train", "recipe.yaml", "--run", "run"]) == ExitCode.DONE
        (top / "digest").write_text(digest(top / "here" / "run"))
        shutil.rmtree(top / "here" / "run" / "checkpoints" / "step-000000003")
        (top / "here" / "run" / "result.json").unlink()
    return top


def at_home(patch: pytest.MonkeyPatch, top: Path) -> None:
    """As a user for whom everything lies below `top`."""
    for variable, name in {"HOME": "home", "PHALANX_STATE_DIR": "state", "PHALANX_CACHE_DIR": "cache"}.items():
        patch.setenv(variable, str(top / name))
    patch.delenv("PYTHONPATH", raising=False)
    patch.chdir(top / "here")


@pytest.fixture
def train(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Train in a copy of all that; the exit code is ours, and what was said no traceback."""
    top = tmp_path / "top"
    shutil.copytree(whole, top)
    at_home(monkeypatch, top)

    def run(*words: str, about: Any) -> int:
        capfd.readouterr()
        code = main.main(["train", *words])
        said = capfd.readouterr()
        assert code in OURS, (about, code, said.err)
        assert "Traceback" not in said.err + said.out, (about, said.err)
        assert "\x1b" not in said.err + said.out, about
        assert code == 0 or "error: " in said.err, (about, said.err)
        assert {path.name for path in top.iterdir()} == {path.name for path in whole.iterdir()}, about
        assert not list((top / "home").iterdir()), about
        assert {path.name for path in (top / "here").iterdir()} <= {*os.listdir(whole / "here"), "runs", "new"}, about
        return code

    return run


def digest(run: Path) -> str:
    return str(json.loads((run / "result.json").read_text())["digest"])


def other_recipe(rng: random.Random) -> str:
    """Other values and other bytes; never so many steps that they do not end."""
    if rng.random() < 0.3:
        return mutated(to_yaml(RECIPE, flow=False).encode(), rng).decode(errors="surrogateescape")
    value: Any = RECIPE
    for _ in range(rng.randrange(1, 3)):
        where = place(value, rng)
        value = put(value, where, rng.choice([*STRANGE, "auto", 2, 1e9, "1e9", 10**12, "hf:.", "a:b", [1, 2]]))
    return to_yaml(value, flow=False)


def test_another_recipe_trains_or_is_refused(train: Run) -> None:
    rng = hand("train recipe")
    for _ in range(4 * TRIED):
        text = other_recipe(rng)
        Path("recipe.yaml").write_bytes(text.encode(errors="surrogateescape"))
        place_of_run = ["--run", "new"] if rng.random() < 0.5 else []
        train("recipe.yaml", "steps=2", *place_of_run, about=text)
        for made in ("new", "runs"):
            shutil.rmtree(made, ignore_errors=True)


@pytest.mark.parametrize("name", FILES if SEED else FILES[SEED::5])
def test_a_run_in_other_bytes_goes_on_to_the_same_digest_or_not_at_all(train: Run, whole: Path, name: str) -> None:
    rng, right = hand(f"train {name}"), (whole / "digest").read_text()
    content = (Path("run") / name).read_bytes()
    for _ in range(TRIED):
        bad = rng.choice([flipped, mutated, spliced])(content, rng)
        (Path("run") / name).write_bytes(bad)
        if train("recipe.yaml", "--run", "run", about=(name, bad)) == 0:
            assert digest(Path("run")) == right, (name, bad)
        shutil.rmtree("run")
        shutil.copytree(whole / "here" / "run", "run")


def test_data_in_other_bytes_give_the_same_digest_or_none(train: Run, whole: Path) -> None:
    rng, right = hand("train data"), (whole / "digest").read_text()
    names = sorted(path.name for path in Path("dataset").iterdir())
    for _ in range(TRIED):
        path = Path("dataset") / rng.choice(names)
        content = path.read_bytes()
        bad = rng.choice([flipped, mutated, spliced])(content, rng)
        path.write_bytes(bad)
        if train("recipe.yaml", "data.source={prepared: dataset}", "--run", "new", about=(path.name, bad)) == 0:
            assert digest(Path("new")) == right, (path.name, bad)
        shutil.rmtree("new", ignore_errors=True)
        path.write_bytes(content)
