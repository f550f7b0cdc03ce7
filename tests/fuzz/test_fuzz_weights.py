"""Checkpoints and safetensors directories in other bytes: the tensors that were saved, or a sentence. A manifest whose
hash fits, as from a stranger, and headers and indices of other files say what can be, and lead nowhere else."""

import json
import random
import shutil
import struct
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mutations import attempt, flipped, hand, mutated, put, spliced, strange
from phalanx.cli import main
from phalanx.errors import DataError
from phalanx.recipe import Recipe
from phalanx.recipe.schema import AdapterConfig
from phalanx.train.checkpoint.digest import digest_checkpoint
from phalanx.train.checkpoint.durable import DurableDirectory
from phalanx.train.checkpoint.format import _manifest_hash, read_manifest
from phalanx.train.checkpoint.load import find_newest_good, load_tensors, verify_checkpoint
from phalanx.train.checkpoint.save import CheckpointSaver
from phalanx.train.checkpoint.shard_file import TensorShard
from phalanx.train.hf.safetensors_reader import open_weight_reader
from phalanx.train.train_state import TrainState

TRIED = 120
pytestmark = pytest.mark.timeout(120)
TENSORS = {
    "weight": torch.arange(12.0).reshape(3, 4),
    "bias": torch.arange(4, dtype=torch.bfloat16),
    "counts": torch.arange(3),
    "scalar": torch.tensor(2.0),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "checkpoints"
    saver = CheckpointSaver(DurableDirectory(folder, 0, 1))
    saver.start(2, [TensorShard.full_tensor(name, value) for name, value in TENSORS.items()], {"step": 2, "samples": 2})
    saver.poll_when_idle()
    saver.commit()
    return folder / "step-000000002"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files and their index."""
    folder = tmp_path_factory.mktemp("fuzz") / "weights"
    folder.mkdir()
    names = list(TENSORS)
    files = {"one.safetensors": names[:2], "two.safetensors": names[2:]}
    for file, held in files.items():
        save_file({name: TENSORS[name] for name in held}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def same(found: dict[str, torch.Tensor]) -> bool:
    return found.keys() == TENSORS.keys() and all(found[name].equal(value) for name, value in TENSORS.items())


def copies(source: Path, place: Path) -> Iterator[Path]:
    """So many copies to be changed, one after the other."""
    for _ in range(TRIED):
        shutil.copytree(source, place)
        yield place
        shutil.rmtree(place)


def test_a_changed_file_of_a_checkpoint_is_found(checkpoint: Path, tmp_path: Path) -> None:
    rng = hand("checkpoint")
    for copy in copies(checkpoint, tmp_path / "checkpoints" / checkpoint.name):
        file = rng.choice(sorted(copy.iterdir()))
        content = file.read_bytes()
        file.write_bytes(rng.choice([flipped, spliced, mutated])(content, rng))
        found, _ = attempt(lambda copy=copy: load_tensors(copy))
        verified, _ = attempt(lambda copy=copy: verify_checkpoint(copy))
        rejected: list[Any] = []
        good = find_newest_good(copy.parent, lambda *why, rejected=rejected: rejected.append(why))
        assert (found is not None) == (verified is not None) == (good is not None) == (not rejected)
        assert found is None or (same(found) and file.read_bytes() == content), file


def test_a_strangers_manifest_is_read_within_its_folder_or_refused(checkpoint: Path, tmp_path: Path) -> None:
    manifest = json.loads((checkpoint / "MANIFEST.json").read_text())
    rng, read = hand("checkpoint manifest"), 0
    for copy in copies(checkpoint, tmp_path / checkpoint.name):
        content = json.dumps(strange(strange(manifest, rng) if rng.random() < 0.5 else manifest, rng)).encode()
        (copy / "MANIFEST.json").write_bytes(content)
        (copy / "MANIFEST.xxh3").write_bytes(_manifest_hash(content))
        for use in (read_manifest, verify_checkpoint, load_tensors, digest_checkpoint):
            found, _ = attempt(lambda use=use, copy=copy: use(copy))
            read += found is not None
    assert read > 0


def test_strange_numbers_of_a_checkpoint_are_refused() -> None:
    whole = asdict(TrainState(3, 36, 100, last_loss=1.5))
    assert asdict(TrainState.from_meta(whole)) == whole
    rng = hand("progress")
    for _ in range(4 * TRIED):
        bad = strange(whole, rng)
        if isinstance(bad, dict):
            found, refused = attempt(lambda bad=bad: TrainState.from_meta(bad))
            assert found is None or (isinstance(found.step, int) and found.step >= 0), bad
            assert found is not None or refused.startswith("a checkpoint"), refused


def test_a_number_of_samples_that_cannot_be_is_no_digest(checkpoint: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))
    manifest = json.loads((copy / "MANIFEST.json").read_text())
    for samples in (10**30, -1, True, "2", None):
        content = json.dumps(put(manifest, ("meta", "samples"), samples)).encode()
        (copy / "MANIFEST.json").write_bytes(content)
        (copy / "MANIFEST.xxh3").write_bytes(_manifest_hash(content))
        with pytest.raises(DataError, match=r"malformed manifest: meta.samples|not say how many samples were consumed"):
            digest_checkpoint(copy)


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, whole, and by half."""
    source = open_weight_reader(folder)
    found = {}
    for name in sorted(source.names):
        shape = source.shape(name)
        found[name] = source.read(name)
        assert tuple(found[name].shape) == shape
        if shape and shape[0] > 1:
            half = source.read(name, [0] * len(shape), [shape[0] // 2, *shape[1:]])
            assert half.view(torch.uint8).equal(found[name][: shape[0] // 2].contiguous().view(torch.uint8))
    return found


def test_changed_safetensors_are_tensors_or_refused(weights: Path, tmp_path: Path) -> None:
    rng = hand("safetensors")
    assert same(loaded(weights))
    for copy in copies(weights, tmp_path / "weights"):
        file = copy / rng.choice(["one.safetensors", "two.safetensors"])
        file.write_bytes(rng.choice([flipped, spliced, mutated, _another_header])(file.read_bytes(), rng))
        _, refused = attempt(lambda copy=copy: loaded(copy))
        assert not refused or str(copy) in refused, refused


def _another_header(content: bytes, rng: random.Random) -> bytes:
    """A header of the right length that says something else."""
    (length,) = struct.unpack_from("<Q", content)
    header = json.dumps(strange(json.loads(content[8 : 8 + length]), rng)).encode()
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def test_a_changed_index_names_its_own_files_or_is_refused(weights: Path, tmp_path: Path) -> None:
    rng = hand("index")
    for copy in copies(weights, tmp_path / "weights"):
        index = copy / "model.safetensors.index.json"
        content = index.read_bytes()
        restated = json.dumps(strange(json.loads(content), rng)).encode()
        index.write_bytes(rng.choice([mutated(content, rng), restated]))
        found, refused = attempt(lambda copy=copy: loaded(copy))
        assert found is None or all(found[name].equal(TENSORS[name]) for name in found)
        assert not refused or str(copy) in refused, refused


@pytest.mark.parametrize("name", ["../else/one.safetensors", "/proc/self/mem", ".", "sub/../one.safetensors", ""])
def test_an_index_that_leads_out_of_its_folder_is_refused(weights: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(weights, tmp_path / "weights")
    shutil.copytree(weights, tmp_path / "else")
    index = tmp_path / "weights" / "model.safetensors.index.json"
    index.write_text(json.dumps(put(json.loads(index.read_text()), ("weight_map", "weight"), name)))
    with pytest.raises(DataError, match=r"index\.json: expected a file of this folder for weight, found"):
        open_weight_reader(tmp_path / "weights")


def test_strange_words_of_a_checkpoint_do_not_reach_a_listing_or_an_export(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither its numbers, nor what model and recipe it says that it is of."""
    manifest = json.loads((checkpoint / "MANIFEST.json").read_text())
    recipe = Recipe(adapter=AdapterConfig()).model_dump(mode="json")
    origin = {"directory": "/nowhere", "config": {"model_type": "x"}, "tied": {}, "names": {}, "converted": []}
    model = {"build": "phalanx.models:transformer", "args": {"layers": 1}, "huggingface": origin}
    meta = {"step": 2, "samples": 2, "model": model, "recipe": recipe}
    rng = hand("words")
    for copy in copies(checkpoint, tmp_path / "run" / "checkpoints" / checkpoint.name):
        content = json.dumps({**manifest, "meta": strange(meta, rng)}).encode()
        (copy / "MANIFEST.json").write_bytes(content)
        (copy / "MANIFEST.xxh3").write_bytes(_manifest_hash(content))
        out = tmp_path / "out"
        export = ["export", str(copy), str(out)]
        for words in (["ls", str(copy)], export, [*export, "--no-verify"]):
            code = main.main(["checkpoint", *words])
            said = capsys.readouterr()
            assert code in (0, 64, 65, 78), said.err
            assert code == 0 or said.err.startswith("error: ") or "error: " in said.err
        shutil.rmtree(out, ignore_errors=True)
