"""Training on data sets of a Hugging Face hub, served by a local stand-in that the real huggingface_hub talks to."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from fake_hub import COMMIT, serve_hub
from phalanx.errors import ExitCode
from phalanx.run import Run
from train_harness import TrainHarness, Values, random_words

REPOSITORY, MOVED_COMMIT = "datasets/acme/rows", "f" * 40
URL = f"hf://{REPOSITORY}"


def recipe_of(place: str) -> Values:
    sources = [{"parquet": f"{place}/data/*.parquet"}, {"jsonl": f"{place}/data/b.jsonl"}]
    return {"data": {"source": sources}, "steps": 4, "callbacks": [], "evaluation": {"every": None}}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """The files of a data set: a Parquet file and JSON lines."""
    pytest.importorskip("huggingface_hub")
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "rows/data").mkdir(parents=True)
    texts = [random_words(seed, 100) for seed in range(20)]
    parquet.write_table(pyarrow.table({"text": texts[:10]}), tmp_path / "rows/data/a.parquet")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[10:])
    (tmp_path / "rows/data/b.jsonl").write_text(lines)
    return tmp_path / "rows"


def train(
    lab: TrainHarness, tmp_path: Path, endpoint: str, run: Run, *overrides: str
) -> "subprocess.CompletedProcess[str]":
    """Train by the command line, since huggingface_hub reads HF_ENDPOINT when it is imported."""
    variables = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "hub"),
        "PHALANX_CACHE_DIR": str(tmp_path / "cache"),
    }
    command = ("train", lab.recipe_file(recipe_of(URL), "hub"), *overrides, "--run", run.path)
    with lab.start(*command, variables={**os.environ, **variables}) as process:
        out, errors = process.communicate(timeout=100)
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def test_parquet_and_json_lines_of_a_hub_train_to_the_digest_of_the_files_and_stay_at_their_commit(
    lab: TrainHarness, rows: Path, tmp_path: Path
) -> None:
    run = lab.new_run()
    with serve_hub(rows, REPOSITORY) as (endpoint, _):
        ended = train(lab, tmp_path, endpoint, run)
    assert ended.returncode == ExitCode.DONE, ended.stderr
    assert run.read_json_or_empty(run.result)["digest"] == lab.train(recipe_of(str(rows))).digest
    commits = run.read_json_or_empty(run.environment)["origins"]["data.source"]
    assert commits == {f"{URL}/data/*.parquet": COMMIT, f"{URL}/data/b.jsonl": COMMIT}
    (rows / "data/b.jsonl").write_text('{"text": "other rows"}\n')
    with serve_hub(rows, REPOSITORY, MOVED_COMMIT) as (endpoint, requests):
        resumed = train(lab, tmp_path, endpoint, run, "steps=6")
    assert resumed.returncode == ExitCode.DONE, resumed.stderr
    assert run.read_json_or_empty(run.environment)["origins"]["data.source"] == commits
    assert not any(MOVED_COMMIT in each for each in requests)
