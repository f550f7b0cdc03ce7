"""Training that reads its data and its initial weights from a store ends in the digest of local files."""

import json
from pathlib import Path

import pytest

from phalanx.app.train import train
from phalanx.data.dataset_files import upload_dataset
from phalanx.storage.url import parse_url
from small_data import prepare, write_texts

RECIPE = """
name: urls
model: {build: "phalanx.models:transformer", args: {layers: 1, hidden_size: 32, num_heads: 2}}
data: {source: {SOURCE}, seq_len: 32}
INIT
evaluation: {every: 4, max_samples: 16}
batch: {global_size: 8, micro_size: 4}
steps: 8
precision: fp32
compile: false
num_threads: 1
checkpoint: {every: 4}
memory: {activation_checkpointing: none, chunked_loss: false}
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(tmp_path / "cache"))
    return write_texts(tmp_path / "root", {f"{number}.txt": f"some text {number}\n" * 900 for number in range(4)})


def train_recipe(root: Path, name: str, source: str, init: str = "", nproc: int = 1) -> dict[str, object]:
    recipe = root / f"{name}.yaml"
    recipe.write_text(RECIPE.replace("SOURCE", source).replace("INIT", init))
    return train(recipe, run=root / name, nproc_per_node=nproc)


def test_sources_prepared_data_and_initial_weights_at_urls_train_to_the_digest_of_local_files(root: Path) -> None:
    upload_dataset(prepare(root, root / "set", {"text": "*.txt"}), parse_url(f"file://{root}/store/set"))
    local = train_recipe(root, "local", 'text: "*.txt"', nproc=2)
    assert train_recipe(root, "source", f'text: "file://{root}/*.txt"', nproc=2)["digest"] == local["digest"]
    prepared = f'prepared: "file://{root}/store/set"'
    assert train_recipe(root, "prepared", prepared, nproc=2)["digest"] == local["digest"]
    from_path = train_recipe(root, "from-path", 'text: "*.txt"', "init_from: local")
    from_url = train_recipe(root, "from-url", 'text: "*.txt"', f'init_from: "file://{root}/local"')
    assert from_url["digest"] == from_path["digest"] != local["digest"]
    origin = json.loads((root / "from-url/environment.json").read_text())["origins"]["init_from"]
    assert origin["url"] == f"file://{root}/local/checkpoints/step-000000008"


def test_a_recipe_at_a_url_trains_to_the_digest_of_the_same_file(root: Path) -> None:
    local = train_recipe(root, "local", 'text: "*.txt"', nproc=2)
    at_url = train(f"file://{root}/local.yaml", run=root / "at-url", nproc_per_node=2)
    assert at_url["digest"] == local["digest"]
