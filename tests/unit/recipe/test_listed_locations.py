"""What a recipe names by path or URL."""

from pathlib import Path
from typing import Any

from phalanx.recipe import Recipe
from phalanx.recipe.locations import StorageLocation, list_locations


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
