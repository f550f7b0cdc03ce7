"""A recipe read from a copy: its code is the copy's, its data stay where they are."""

import sys
from pathlib import Path

import pytest

from phalanx.recipe import load_recipe
from phalanx.recipe.imports import import_object
from phalanx.recipe.snapshot_paths import resolve_code_dir, resolve_data_dir


@pytest.fixture
def original(tmp_path: Path) -> Path:
    (tmp_path / "original" / "deep").mkdir(parents=True)
    return tmp_path / "original"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    (tmp_path / "copy" / "deep").mkdir(parents=True)
    return tmp_path / "copy"


def test_places_in_the_copy_and_in_the_original_belong_together(original: Path, copy: Path) -> None:
    told = {"PHALANX_SNAPSHOT_DIR": str(copy), "PHALANX_SNAPSHOT_SOURCE": str(original)}
    assert (resolve_data_dir(copy / "deep", told), resolve_code_dir(original / "deep", told)) == (
        original / "deep",
        copy / "deep",
    )
    assert (resolve_data_dir(copy, told), resolve_code_dir(original, told)) == (original, copy)


def test_other_folders_are_what_they_are(original: Path, copy: Path, tmp_path: Path) -> None:
    told = {"PHALANX_SNAPSHOT_DIR": str(copy), "PHALANX_SNAPSHOT_SOURCE": str(original)}
    for folder in (tmp_path, tmp_path / "copy-2", tmp_path / "else"):
        assert (resolve_data_dir(folder, told), resolve_code_dir(folder, told)) == (folder, folder)
    for environ in ({}, {"PHALANX_SNAPSHOT_DIR": str(copy)}, {"PHALANX_SNAPSHOT_SOURCE": str(original)}):
        assert (resolve_data_dir(copy, environ), resolve_code_dir(original, environ)) == (copy, original)


def test_where_the_original_cannot_be_seen_the_copy_is_the_home(copy: Path, tmp_path: Path) -> None:
    assert (
        resolve_data_dir(
            copy, {"PHALANX_SNAPSHOT_DIR": str(copy), "PHALANX_SNAPSHOT_SOURCE": str(tmp_path / "elsewhere")}
        )
        == copy
    )


def test_a_link_to_the_copy_is_the_copy(original: Path, copy: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(copy)
    told = {"PHALANX_SNAPSHOT_DIR": str(tmp_path / "link"), "PHALANX_SNAPSHOT_SOURCE": str(original)}
    assert resolve_data_dir(copy.resolve(), told) == original


def test_a_recipe_of_a_copy_keeps_its_data_and_takes_its_modules_from_the_copy(
    original: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, said in ((original, "edited since"), (copy, "as it was")):
        (folder / "travelled_module.py").write_text(f"def said(): return {said!r}")
    (copy / "recipe.yaml").write_text("data: {source: {text: '${recipe.dir}/x.txt'}}")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PHALANX_SNAPSHOT_DIR", str(copy))
    monkeypatch.setenv("PHALANX_SNAPSHOT_SOURCE", str(original))
    loaded = load_recipe(copy / "recipe.yaml")
    assert loaded.recipe_dir == original
    assert loaded.given["data"]["source"]["text"] == str(original / "x.txt")
    assert import_object("travelled_module:said", loaded.recipe_dir)() == "as it was"
