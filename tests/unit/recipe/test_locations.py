"""What `model.build` and `init_from` name by URL: local copies, commits, newest checkpoints, errors."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fake_hub import COMMIT, serve_hub
from phalanx.errors import RecipeError
from phalanx.recipe import Recipe
from phalanx.recipe.locations import (
    StorageLocation,
    huggingface_directory,
    list_locations,
    localize_named,
    pin_location,
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("phalanx.storage.store.FIRST_CONTACT_S", 0.0)


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "store" / "model"
    directory.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin", "model.gguf"):
        (directory / name).write_text(name)
    return directory


def names(path):
    return sorted(each.name for each in path.iterdir())


WANTED = ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_model_directory_at_a_url_is_copied_without_other_formats(model):
    path = huggingface_directory(f"hf:file://{model}", None)
    assert names(path) == WANTED
    assert huggingface_directory(f"hf:file://{model}", None) == path


def test_relative_paths_are_those_of_the_recipe(model):
    assert huggingface_directory("hf:model", model.parent) == model
    assert huggingface_directory("phalanx.models:transformer", model.parent) is None


def test_a_model_at_a_url_without_a_config_is_refused(model):
    (model / "config.json").unlink()
    with pytest.raises(RecipeError, match=r"^model\.build: file://.*/model has no config\.json"):
        huggingface_directory(f"hf:file://{model}", None)


@pytest.mark.parametrize("key", ["model.build", "init_from"])
def test_a_url_of_nothing_is_refused_with_its_key(tmp_path, key):
    with pytest.raises(RecipeError, match=rf"^{key}: file://.*/none: no object has this key"):
        localize_named(f"file://{tmp_path}/none", None, key)


def test_the_newest_whole_checkpoint_of_a_run_is_pinned(tmp_path):
    for step in (5, 10, 15):
        (tmp_path / f"run/checkpoints/step-{step:09d}").mkdir(parents=True)
        (tmp_path / f"run/checkpoints/step-{step:09d}/part").write_text("x")
    for step in (5, 10):
        (tmp_path / f"run/checkpoints/step-{step:09d}/MANIFEST.json").write_text("{}")
    newest = f"file://{tmp_path}/run/checkpoints/step-000000010"
    for location in (f"file://{tmp_path}/run", f"file://{tmp_path}/run/checkpoints", newest):
        assert pin_location(location, "init_from") == newest
    assert pin_location("runs/old", "init_from") == "runs/old"


HUB_READER = """
import json, sys
from phalanx.errors import PhalanxError
from phalanx.recipe.locations import describe_version, huggingface_directory, pin_location
answers = []
for build in sys.argv[1:]:
    try:
        path = huggingface_directory(build, None)
        names = sorted(each.name for each in path.iterdir())
        answers.append([names, describe_version(path), pin_location(build, "model.build")])
    except PhalanxError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""


def read_from_hub(tmp_path, endpoint, *builds):
    """What a process of its own, since huggingface_hub reads HF_ENDPOINT when it is imported, answers to each."""
    pytest.importorskip("huggingface_hub")
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hub")}
    output = subprocess.run(
        [sys.executable, "-c", HUB_READER, *builds], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(output.stdout)


def test_a_model_of_the_hub_is_downloaded_and_pinned_to_its_commit(model, tmp_path):
    builds = ["hf://acme/tiny", "hf:hf://acme/tiny", f"hf://acme/tiny@{COMMIT}"]
    with serve_hub(model) as (endpoint, requests):
        answers = read_from_hub(tmp_path, endpoint, *builds)
    assert answers == [[WANTED, COMMIT, f"hf://acme/tiny@{COMMIT}"]] * 3
    assert not any(each.endswith((".bin", ".gguf")) for each in requests)


def test_what_the_hub_does_not_have_is_refused_with_its_key(model, tmp_path):
    builds = ["hf://acme/other", "hf://acme/tiny@other", "hf://acme"]
    with serve_hub(model) as (endpoint, _):
        other, revision, owner = read_from_hub(tmp_path, endpoint, *builds)
    assert other.startswith("model.build: hf://acme/other: not on the hub")
    assert revision.startswith("model.build: hf://acme/tiny@other: not on the hub")
    assert owner.startswith("model.build: hf://acme: expected hf://OWNER/NAME")


def test_a_hub_that_cannot_be_reached_is_named(tmp_path):
    (answer,) = read_from_hub(tmp_path, "http://127.0.0.1:9", "hf://acme/offline")
    assert answer.startswith("model.build: hf://acme/offline: the hub cannot be reached")


def locations(run: str, **values: Any) -> list[StorageLocation]:
    return list_locations(Recipe.model_validate(values), Path("/recipes"), run)


def test_what_is_written_comes_first_and_globs_are_named_by_their_directory() -> None:
    found = locations(
        "s3://bucket/run",
        data={"source": [{"text": ["a/*.txt", "s3://b/c/**/*.txt"]}, {"idx": {"images": "/i", "labels": "/l"}}]},
        evaluation={"source": {"prepared": "gs://set"}},
        checkpoint={"upload": {"to": "az://store/run"}},
        init_from="hf:s3://bucket/model",
        adapter={"init_from": "my-adapter"},
    )
    assert found == [
        StorageLocation("run", "s3://bucket/run", True),
        StorageLocation("checkpoint.upload.to", "az://store/run", True),
        StorageLocation("data.source", "/recipes/a"),
        StorageLocation("data.source", "s3://b/c"),
        StorageLocation("data.source", "/i"),
        StorageLocation("data.source", "/l"),
        StorageLocation("data.source", "gs://set"),
        StorageLocation("init_from", "s3://bucket/model"),
        StorageLocation("adapter.init_from", "/recipes/my-adapter"),
    ]


def test_a_location_is_listed_once_a_hub_never_and_a_run_is_relative_to_here() -> None:
    text = ["a/*.txt", "a/*.md", "hf://owner/name/*.txt"]
    (run, source) = locations("runs/x", data={"source": {"text": text}}, init_from="a")
    assert run.location == str(Path.cwd() / "runs/x")
    assert source == StorageLocation("data.source", "/recipes/a")
