"""`phalanx jobs` as people type it, on a queue that starts nothing."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.cli import main
from phalanx.jobs.backends import base
from phalanx.jobs.backends.local import LocalBackend
from phalanx.jobs.spec import JobState

Type = Callable[..., str]


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Type:
    """Types a command of `phalanx jobs` and returns what it prints; it must end with this code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        base, "open_backend", lambda name: LocalBackend(tmp_path / "state" / "queue", ensure_daemon=lambda *_: None)
    )
    (tmp_path / "exp").mkdir()
    for name in ("one", "two"):
        (tmp_path / "exp" / f"{name}.yaml").write_text(
            f"name: {name}\nmodel: {{}}\ndata: {{source: {{text: '*.txt'}}}}\n"
        )

    def typed(*words: str, code: int = 0) -> str:
        assert main.main(["jobs", *words]) == code
        said = capsys.readouterr()
        return said.err if code else said.out

    return typed


def names(typed: Type) -> list[tuple[str, str]]:
    return [(job["name"], job["state"]) for job in json.loads(typed("ls", "--json"))]


def test_a_dry_run_shows_what_would_travel_and_submits_nothing(typed: Type, tmp_path: Path) -> None:
    said = typed("submit", "exp/one.yaml", "--snapshot", "workdir", "--dry-run")
    assert "phalanx train one.yaml --run" in said
    assert "# code that travels: 2 files, 104 B, sha256 " in said
    assert names(typed) == []


def test_several_recipes_are_an_array_that_is_listed_and_stopped_by_its_name(typed: Type, tmp_path: Path) -> None:
    said = typed("submit", "exp/one.yaml", "exp/two.yaml", "steps=3", "--name", "both", "--max-parallel", "1")
    assert said.splitlines() == [
        f"job 1 (both.0) submitted to local, run {tmp_path}/runs/one",
        f"job 2 (both.1) submitted to local, run {tmp_path}/runs/two",
        "cancel all: phalanx jobs cancel both --on local",
    ]
    typed("submit", "exp/one.yaml", "--name", "other")
    assert [line.split()[1] for line in typed("ls", "both").splitlines()] == ["NAME", "both.0", "both.1"]
    typed("cancel", "both")
    assert names(typed) == [("both.0", "cancelled"), ("both.1", "cancelled"), ("other", "queued")]


def test_a_pause_and_a_resume_tell_what_they_did(typed: Type) -> None:
    typed("submit", "exp/one.yaml")
    assert typed("pause", "1") == "pausing job 1\n"
    assert typed("pause", "1") == "job 1 is paused already\n"
    assert typed("resume", "1") == "resumed job 1\n"
    assert "job 1 is not paused" in typed("resume", "1", code=64)


def test_values_that_vary_make_a_job_each(typed: Type) -> None:
    typed("submit", "exp/one.yaml", "--sweep", "optimizer.lr=1e-3,3e-4", "--sweep", "seed=1,2")
    assert [name for name, _ in names(typed)] == ["one.0", "one.1", "one.2", "one.3"]
    assert "run_dir       " in typed("status", "4")
    assert typed("status", "4").splitlines()[-1].endswith("runs/one-optimizer.lr=3e-4-seed=2")
    assert re.search(r"^submitted_at +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d$", typed("status", "4"), re.M)


def test_when_one_recipe_of_three_is_wrong_none_is_submitted(typed: Type, tmp_path: Path) -> None:
    (tmp_path / "exp" / "three.yaml").write_text("stpes: 3\n")
    said = typed("submit", "exp/one.yaml", "exp/two.yaml", "exp/three.yaml", code=78)
    assert "three.yaml:1: stpes" in said
    assert names(typed) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("submit", "exp/one.yaml", "--max-parallel", "2"), "--max-parallel is for arrays"),
        (("submit", "--framework", "torch", "--sweep", "a=1,2", "--", "python", "x.py"), "--sweep is for recipes"),
        (("submit", "--framework", "torch", "--run", "x", "--", "python", "x.py"), "--run is for recipes"),
        (("submit", "--framework", "torch", "--force", "--", "python", "x.py"), "--force is for recipes"),
        (("submit", "exp/one.yaml", "--snapshot", "v1"), "--snapshot v1: "),
        (("ls", "nobody"), "has no array of this name"),
        (("cancel", "nobody"), "has no such job"),
        (("status", "99999999999999999999"), "has no such job"),
    ],
)
def test_what_cannot_be_is_told(typed: Type, words: tuple[str, ...], told: str) -> None:
    assert told in typed(*words, code=64)
    assert names(typed) == []


@pytest.fixture
def own(typed: Type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Type:
    """`typed`, where `forget` finds the same queue."""
    monkeypatch.setenv("PHALANX_STATE_DIR", str(tmp_path / "state"))
    return typed


def test_a_job_that_is_over_is_forgotten_with_its_folder(own: Type, tmp_path: Path) -> None:
    own("submit", "exp/one.yaml")
    own("submit", "exp/two.yaml")
    own("cancel", "1")
    assert own("prune", "1") == "removed 1 job\n"
    assert names(own) == [("two", "queued")]
    assert [path.name for path in (tmp_path / "state" / "queue" / "jobs").iterdir()] == ["2"]


def test_a_job_that_is_not_over_is_not_forgotten(own: Type, tmp_path: Path) -> None:
    own("submit", "exp/one.yaml")
    said = own("prune", "1", code=64)
    assert said == "error: job 1 (one) is queued: only ended jobs can be pruned\n"
    assert names(own) == [("one", "queued")]
    assert (tmp_path / "state" / "queue" / "jobs" / "1").is_dir()


def test_what_ended_long_ago_is_forgotten_and_nothing_else(own: Type, tmp_path: Path) -> None:
    for job in ("1", "2"):
        own("submit", "exp/one.yaml")
        own("cancel", job)
    own("submit", "exp/two.yaml")
    store = LocalBackend(tmp_path / "state" / "queue", ensure_daemon=lambda *_: None).database
    assert store.update_if(1, JobState.CANCELLED, ended=store.clock() - 8 * 86400)
    assert own("prune", "--older-than", "7d") == "removed 1 job\n"
    assert names(own) == [("one", "cancelled"), ("two", "queued")]


def test_to_forget_everything_must_be_said(own: Type) -> None:
    assert "nothing to prune" in own("prune", code=64)
