"""Whether a run can be kept where its recipe says, before the first step, on each node."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from http_objects import serve_objects
from phalanx.app import nodes, prepare_run
from phalanx.app.prepare_run import check_free_space, check_node
from phalanx.app.train_arguments import TrainArguments
from phalanx.errors import RecipeError, UnfitNodeError, UsageError
from phalanx.recipe import Recipe
from phalanx.recipe.load import dump_recipe
from phalanx.run import Run
from phalanx.run.directory import write_json
from phalanx.run.node_env import NodeEnv
from resolved_recipes import resolved_recipe

PLAN = {"trainable_parameters": 10**9, "frozen_parameters": 10**9}
"""A checkpoint of 16 GB."""


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the GB that are free on every disk."""

    def set_free(gb: float) -> None:
        monkeypatch.setattr(prepare_run.shutil, "disk_usage", lambda path: SimpleNamespace(free=gb * 1e9))

    return set_free


def upload_to(url: str) -> dict[str, Any]:
    return {"checkpoint": {"in_memory_every": None, "upload": {"to": url}}}


def test_a_new_run_needs_space_for_two_checkpoints(tmp_path: Path, free: Any) -> None:
    free(33)
    check_free_space(Run(tmp_path / "run"), Recipe(), PLAN)
    free(31)
    with pytest.raises(
        UsageError, match=r"run: too little free space for checkpoints of 16.0 GB: 2 need 32.0 GB, and 31.0"
    ):
        check_free_space(Run(tmp_path / "run"), Recipe(), PLAN)


def test_a_run_with_checkpoints_needs_space_for_one_more(tmp_path: Path, free: Any) -> None:
    manifest = Run(tmp_path).checkpoints / "step-000000001/MANIFEST.json"
    manifest.parent.mkdir(parents=True)
    manifest.touch()
    free(17)
    check_free_space(Run(tmp_path), Recipe(), PLAN)


def test_a_directory_that_is_used_as_a_store_needs_space_and_other_stores_have_it(tmp_path: Path, free: Any) -> None:
    run = Run(tmp_path / "run")
    run.path.mkdir()
    write_json(run.store, {"url": "s3://bucket/run", "has_checkpoint": False})
    free(0)
    check_free_space(run, Recipe.model_validate(upload_to("gs://bucket/run")), PLAN)
    with pytest.raises(UsageError, match=f"file://{tmp_path}/store: too little free space"):
        check_free_space(run, Recipe.model_validate(upload_to(f"file://{tmp_path}/store")), PLAN)


def test_without_a_known_model_no_space_is_asked_for(tmp_path: Path, free: Any) -> None:
    free(0)
    check_free_space(Run(tmp_path), Recipe(), {})


def test_another_node_without_space_is_unfit(tmp_path: Path, free: Any) -> None:
    run = Run(tmp_path)
    run.resolved.write_text(dump_recipe(Recipe.model_validate(resolved_recipe().model_dump())))
    write_json(run.plan, PLAN)
    free(31)
    with pytest.raises(UnfitNodeError, match="too little free space"):
        check_node(run)


def test_another_node_that_cannot_upload_does_not_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_TOKEN", "0123456789abcdef" * 2)
    monkeypatch.setattr(nodes, "report_departure", lambda *_: None)
    monkeypatch.setattr(nodes, "NodeAgent", lambda *_, **__: pytest.fail("it joined"))
    with serve_objects(tmp_path) as (address, _):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(dump_recipe(Recipe.model_validate(upload_to(f"{address}/run"))))
        arguments = TrainArguments(recipe, (), str(tmp_path / "run"), 1, False)
        with pytest.raises(RecipeError, match=f"checkpoint.upload.to: {address}/run: nothing can be written there"):
            nodes.run_node_agent(arguments, False, io.StringIO(), NodeEnv(1, 2, ("127.0.0.1", 1)))
