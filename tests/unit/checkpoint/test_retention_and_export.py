"""Which checkpoints are kept, and what leaves them for other tools."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import same_bits, save, state
from full_disk import full_disk
from phalanx.errors import DataError, UsageError
from phalanx.train.checkpoint.durable import apply_retention, discard_abandoned
from phalanx.train.checkpoint.export import export_huggingface
from phalanx.train.checkpoint.format import CorruptCheckpointError, list_checkpoints, parse_step


def steps_in(directory: Path) -> list[int]:
    return [parse_step(path) for path in list_checkpoints(directory)]


@pytest.fixture
def five(tmp_path: Path) -> Path:
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step, {"w": torch.ones(3)})
    return tmp_path


def test_the_newest_and_the_protected_ones_are_kept(five: Path) -> None:
    apply_retention(five, keep=2, protect={20})
    assert steps_in(five) == [50, 40, 20]
    assert len(list(five.iterdir())) == 3


def test_a_damaged_newest_one_does_not_count_as_kept(five: Path) -> None:
    (five / "step-000000050" / "MANIFEST.json").write_text("{}")
    apply_retention(five, keep=1)
    assert steps_in(five) == [50, 40]


def test_nothing_is_removed_while_there_are_not_enough_whole_ones(five: Path) -> None:
    for path in list_checkpoints(five):
        (path / "MANIFEST.xxh3").unlink()
    apply_retention(five, keep=1)
    assert steps_in(five) == [50, 40, 30, 20, 10]


WEIGHTS = {"blocks.0.w": torch.arange(300.0).reshape(10, 30), "blocks.1.w": torch.ones(40, dtype=torch.bfloat16)}
STATE = {
    "optimizer/blocks.0.w/exp_avg": torch.ones(10, 30),
    "scaler/scale": torch.ones(()),
    "grad_sync/e": torch.ones(2),
}


def test_what_a_failed_save_left_is_removed_with_the_next_commit(five: Path) -> None:
    """Storage that fails refuses to remove it, too."""
    committed_at = (five / "step-000000050" / "MANIFEST.json").stat().st_mtime
    for name, age_s in (("step-000000045.tmp-0", 5), ("step-000000060.tmp-1", -5), ("step-000000040.old", 5)):
        (five / name).mkdir()
        os.utime(five / name, (committed_at - age_s,) * 2)
    discard_abandoned(five, 50)
    left = sorted(path.name for path in five.iterdir() if "." in path.name)
    assert left == ["step-000000040.old", "step-000000060.tmp-1"]


def test_the_export_is_the_model_and_nothing_else(tmp_path: Path) -> None:
    model = {"build": "phalanx.models:transformer", "args": {"layers": 2}}
    path = save(tmp_path, 1, WEIGHTS | STATE, {"model": model})
    out = export_huggingface(path, tmp_path / "new" / "out")
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((out / "config.json").read_text()) == model
    loaded = load_file(out / "model.safetensors")
    assert loaded.keys() == WEIGHTS.keys()
    assert all(same_bits(loaded[name], WEIGHTS[name]) for name in WEIGHTS)


def test_a_large_export_is_split_and_indexed(tmp_path: Path) -> None:
    out = export_huggingface(save(tmp_path, 1, WEIGHTS | STATE), tmp_path / "out", file_bytes=1000)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert sorted(file.name for file in out.iterdir()) == names
    index = json.loads((out / names[2]).read_text())
    assert index["metadata"] == {"total_size": 300 * 4 + 40 * 2}
    for name, file in index["weight_map"].items():
        assert same_bits(load_file(out / file)[name], WEIGHTS[name])


def test_every_dtype_and_shape_can_be_exported(tmp_path: Path) -> None:
    tensors = state(big=10)
    loaded = load_file(export_huggingface(save(tmp_path, 1, tensors), tmp_path / "out") / "model.safetensors")
    assert all(same_bits(loaded[name], tensors[name]) for name in loaded)
    assert tensors.keys() - loaded.keys() == {"optimizer/blocks.0.weight/step", "scaler/scale"}


def test_an_export_does_not_overwrite_and_leaves_nothing_when_it_fails(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 1, WEIGHTS)
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").touch()
    with pytest.raises(UsageError, match="exists already"):
        export_huggingface(path, out)
    (path / "rank-00000.safetensors").write_bytes(b"")
    with pytest.raises(CorruptCheckpointError):
        export_huggingface(path, tmp_path / "other")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoints", "out"]


@pytest.mark.parametrize("limit", [10, 1000], ids=["config.json", "model.safetensors"])
def test_an_export_to_a_full_disk_names_where_it_cannot_be_written(tmp_path: Path, limit: int) -> None:
    path = save(tmp_path / "checkpoints", 1, WEIGHTS | STATE, {"model": {"build": "phalanx.models:transformer"}})
    with full_disk(limit), pytest.raises(UsageError, match=f"^{tmp_path / 'out'}: cannot be written: File too large$"):
        export_huggingface(path, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoints"]


def test_a_checkpoint_without_weights_has_nothing_to_export(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no model weights"):
        export_huggingface(save(tmp_path, 1, STATE), tmp_path / "out")


def test_whoever_may_read_the_folder_may_read_the_export(tmp_path: Path) -> None:
    out = export_huggingface(save(tmp_path, 1, WEIGHTS | STATE, {"model": {}}), tmp_path / "out")
    modes = {file.stat().st_mode & 0o777 for file in out.iterdir()}
    assert modes == {out.stat().st_mode & 0o666}
