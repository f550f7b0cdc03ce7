"""Sources at `hf://`, read from a local stand-in that the real huggingface_hub talks to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fake_hub import serve_hub
from phalanx.data.manifest import read_manifest
from phalanx.data.source_files import find_files
from phalanx.errors import ExitCode, RecipeError
from small_data import prepare, write_texts

pytest.importorskip("huggingface_hub")
REPOSITORY = "datasets/acme/rows"
URL = f"hf://{REPOSITORY}"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_texts(
        tmp_path / "rows", {name: f"text of {name}\n" * 500 for name in ("a.txt", "sub/b.txt", "sub/c.txt")}
    )


def prepare_from(endpoint: str, tmp_path: Path, source: str) -> "subprocess.CompletedProcess[str]":
    """Prepare by a process of its own, since huggingface_hub reads HF_ENDPOINT when it is imported."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hub")}
    command = [sys.executable, "-m", "phalanx", "data", "prepare", source, "--out", str(tmp_path / "out")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_glob_of_a_hub_prepares_what_it_matches(rows: Path, tmp_path: Path) -> None:
    with serve_hub(rows, REPOSITORY) as (endpoint, requests):
        ended = prepare_from(endpoint, tmp_path, f"{URL}/sub/*.txt")
    assert ended.returncode == ExitCode.DONE, ended.stderr
    local = prepare(rows, tmp_path / "local", {"text": "sub/*.txt"})
    assert read_manifest(tmp_path / "out").fingerprint == read_manifest(local).fingerprint
    assert not any(each.endswith("a.txt") for each in requests)


@pytest.mark.parametrize(
    ("refusal", "place", "sentence"),
    [
        ((401, "GatedRepo"), URL, "access is gated; accept its terms on the hub, and set HF_TOKEN"),
        ((403, ""), URL, "access is denied (HTTP 403); set HF_TOKEN to a token that may read it"),
        ((401, "RepoNotFound"), URL, "not on the hub (RepositoryNotFoundError); check the name and revision"),
        (None, f"{URL}@none", "not on the hub (RevisionNotFoundError)"),
        (None, f"{URL}/none", "the repository has no none/sub"),
        (None, f"{URL}..x", "no name of a repository"),
    ],
)
def test_a_data_set_that_cannot_be_read_is_one_sentence(
    rows: Path, tmp_path: Path, refusal: tuple[int, str] | None, place: str, sentence: str
) -> None:
    with serve_hub(rows, REPOSITORY, refusal=refusal) as (endpoint, _):
        ended = prepare_from(endpoint, tmp_path, f"{place}/sub/*.txt")
    assert ended.returncode == ExitCode.RECIPE, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert f"data.source: {place}" in line
    assert sentence in line


def test_a_hub_that_fails_may_be_tried_again_and_one_that_is_not_reached_is_named(rows: Path, tmp_path: Path) -> None:
    with serve_hub(rows, REPOSITORY, refusal=(500, "")) as (endpoint, _):
        failed = prepare_from(endpoint, tmp_path, f"{URL}/sub/*.txt")
    assert failed.returncode == ExitCode.UNFINISHED
    assert "HTTP 500" in failed.stderr
    offline = prepare_from("http://127.0.0.1:9", tmp_path, f"{URL}/sub/*.txt")
    assert offline.returncode == ExitCode.RECIPE
    (line,) = offline.stderr.splitlines()
    assert f"data.source: {URL}/sub: the hub cannot be reached, and there is no local copy" in line


def test_what_is_left_out_of_a_hub_is_named_without_a_url(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"data\.source: exclude: found 'hf://datasets/acme/rows/old/\*'"):
        find_files(f"{URL}/*.txt", f"{URL}/old/*", tmp_path)
