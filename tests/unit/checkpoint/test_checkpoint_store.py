"""Checkpoints in an object store: blocks, records and the manifest, last; here in a directory that is used as one."""

import random
from collections.abc import Callable
from pathlib import Path

import obstore
import pytest
import torch
from obstore.exceptions import GenericError
from torch import nn

import store_saves
from checkpoints import state
from phalanx.recipe.schema import AdapterConfig, OptimizerConfig, Parallelism
from phalanx.storage.store import Store
from phalanx.train.adapters.lora import add_adapters
from phalanx.train.checkpoint.checkpoint_store import CheckpointStore, StoredCheckpoint, StoreDestination
from phalanx.train.checkpoint.format import CorruptCheckpointError
from phalanx.train.checkpoint.load_plan import get_local_state
from phalanx.train.checkpoint.save import CheckpointSaver, OwnedTensors
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.mesh import build_mesh
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.optim.container import OptimizerContainer, trainable_parameters
from phalanx.train.precision import GradScaler
from phalanx.train.train_state import AppState
from store_saves import block_names, make_saver, named_blocks, open_checkpoints, save_to_store, whole_steps


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


def read_back(checkpoints: CheckpointStore, step: int) -> bytes:
    """The bytes of the files of a checkpoint."""
    return b"".join(checkpoints.read_block(block.name) for block in checkpoints.read(step).blocks)


def test_a_save_is_blocks_of_the_file_a_record_and_the_manifest(bucket: Path) -> None:
    checkpoints = open_checkpoints(bucket)
    status = save_to_store(make_saver(checkpoints), 60, state())
    assert status.phase == "committed"
    assert str(status.path) == f"file://{bucket}/checkpoints/step-000000060"
    stored: StoredCheckpoint = checkpoints.read(60)
    assert {path.name for path in (bucket / "checkpoints/step-000000060").iterdir()} == {
        "MANIFEST.json",
        "MANIFEST.xxh3",
        "rank-00000.json",
    }
    assert len(read_back(checkpoints, 60)) == stored.manifest.nbytes
    assert max(block.stop - block.start for block in stored.blocks) == store_saves.SMALL_BLOCK_BYTES


def test_blocks_that_did_not_change_are_written_once(bucket: Path) -> None:
    checkpoints, tensors = open_checkpoints(bucket), state()
    saver = make_saver(checkpoints)
    save_to_store(saver, 1, tensors)
    before = checkpoints.store.counters.bytes_written
    tensors["blocks.1.weight"] = tensors["blocks.1.weight"] + 1
    save_to_store(saver, 2, tensors)
    sent = checkpoints.store.counters.bytes_written - before
    assert sent < 0.5 * checkpoints.read(2).manifest.nbytes
    assert block_names(bucket) == named_blocks(checkpoints, 1, 2)


def test_a_new_process_does_not_write_the_blocks_of_the_step_it_resumed_from(bucket: Path) -> None:
    checkpoints, tensors = open_checkpoints(bucket), state()
    save_to_store(make_saver(checkpoints), 1, tensors)
    saver = make_saver(checkpoints, attempt=1)
    saver._destination.continue_from(1)  # type: ignore[attr-defined]
    before = checkpoints.store.counters.bytes_written
    save_to_store(saver, 2, tensors)
    assert checkpoints.store.counters.bytes_written - before < 0.02 * checkpoints.read(2).manifest.nbytes


def test_retention_keeps_the_newest_and_the_best_and_their_blocks(bucket: Path) -> None:
    checkpoints = open_checkpoints(bucket)
    saver = make_saver(checkpoints, keep=2)
    losses = [3.0, 1.0, 1.0, 1.0, 1.0]
    for step, loss in enumerate(losses, start=1):
        save_to_store(saver, step, state(seed=step), best_loss=loss)
    assert whole_steps(bucket) == [5, 4, 2]
    assert block_names(bucket) == named_blocks(checkpoints, 5, 4, 2)


def test_retention_keeps_the_checkpoint_in_use_and_its_blocks(bucket: Path) -> None:
    checkpoints, in_use = open_checkpoints(bucket), [1]
    saver = CheckpointSaver(StoreDestination(checkpoints, 0, 1, 0, 1, lambda: in_use))
    for step in (1, 2, 3):
        save_to_store(saver, step, state(seed=step))
    assert whole_steps(bucket) == [3, 1]
    assert block_names(bucket) == named_blocks(checkpoints, 3, 1)
    in_use.clear()
    save_to_store(saver, 4, state(seed=4))
    assert whole_steps(bucket) == [4]


def test_blocks_of_a_save_that_was_cut_are_used_and_those_left_are_removed(bucket: Path) -> None:
    checkpoints = open_checkpoints(bucket)
    save_to_store(make_saver(checkpoints), 1, state(seed=1))
    destination_of_dead = make_saver(checkpoints)
    destination_of_dead.start(2, [], {"step": 2})
    destination_of_dead.cancel()
    checkpoints.store.write(checkpoints.block_url("0" * 32).key, b"left")
    save_to_store(make_saver(checkpoints, keep=1, attempt=1), 3, state(seed=3))
    assert whole_steps(bucket) == [3]
    assert block_names(bucket) == named_blocks(checkpoints, 3)


def test_a_save_killed_after_any_request_leaves_nothing_listed_that_is_not_whole(
    bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies before one of its writes or deletes, at 20 of them; the next save is whole again."""
    rng, checkpoints = random.Random(0), open_checkpoints(bucket)
    save_to_store(make_saver(checkpoints, keep=2), 1, state(seed=1))
    for step in range(2, 22):
        with monkeypatch.context() as patch:
            die_after(patch, rng.randrange(110))
            save_to_store(make_saver(checkpoints, keep=2, attempt=step), step, state(seed=step % 3))
        for listed in whole_steps(bucket):
            digest_stored(checkpoints, listed)
    save_to_store(make_saver(checkpoints, keep=2, attempt=30), 30, state(seed=30))
    kept = whole_steps(bucket)
    assert kept[0] == 30
    assert len(kept) == 2
    assert block_names(bucket) == named_blocks(checkpoints, *kept)


def die_after(patch: pytest.MonkeyPatch, requests: int) -> None:
    """From the request of this number on, nothing reaches the store any more."""
    left = [requests]

    def wrap(name: str) -> None:
        original: Callable[..., None] = getattr(Store, name)

        def call(store: Store, *arguments: object, **options: object) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(5, "the process is dead")
            original(store, *arguments, **options)

        patch.setattr(Store, name, call)

    wrap("write")
    wrap("delete")


def digest_stored(checkpoints: CheckpointStore, step: int) -> None:
    stored = checkpoints.read(step)
    assert len(read_back(checkpoints, step)) == stored.manifest.nbytes


def test_a_store_that_fails_for_a_while_delays_a_save(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, failures = open_checkpoints(bucket), [5]
    monkeypatch.setattr(checkpoints.store, "_sleep", lambda seconds: None)
    put = obstore.put

    def failing_put(*arguments: object, **options: object) -> object:
        failures[0] -= 1
        if failures[0] >= 0:
            raise GenericError("503 SlowDown")
        return put(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(obstore, "put", failing_put)
    assert save_to_store(make_saver(checkpoints), 1, state()).phase == "committed"
    assert checkpoints.store.counters.retries.total() >= 5


def test_a_store_that_refuses_fails_the_save_and_not_the_run(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = open_checkpoints(bucket)
    saver = make_saver(checkpoints)
    save_to_store(saver, 1, state())

    def refusing_put(*arguments: object, **options: object) -> None:
        raise PermissionError("403 AccessDenied")

    monkeypatch.setattr(obstore, "put", refusing_put)
    monkeypatch.setattr("phalanx.storage.store.RETRY_S", 0.0)
    status = save_to_store(saver, 2, state(seed=2))
    assert status.phase == "failed"
    assert "access is denied" in status.reason
    assert whole_steps(bucket) == [1]


def test_a_flipped_byte_in_a_block_is_found(bucket: Path) -> None:
    checkpoints = open_checkpoints(bucket)
    save_to_store(make_saver(checkpoints), 1, state())
    block = checkpoints.read(1).blocks[7]
    store_saves.flip_byte(bucket / "blocks" / block.name)
    with pytest.raises(CorruptCheckpointError, match=f"blocks/{block.name}: damaged"):
        read_back(checkpoints, 1)


def test_a_record_of_another_save_of_the_step_does_not_pass(bucket: Path) -> None:
    """A step that is saved again is not listed from its first new record on."""
    checkpoints = open_checkpoints(bucket)
    save_to_store(make_saver(checkpoints), 1, state())
    again = make_saver(checkpoints, attempt=1)
    again.start(1, [], {"step": 1})
    again.poll_when_idle()
    assert whole_steps(bucket) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_save_of_an_adapter_run_writes_less_than_3_percent(bucket: Path, dtype: torch.dtype) -> None:
    """A frozen base of 12 layers with adapters of rank 1 and their optimizer state, saved after two updates."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024, dtype=dtype) for _ in range(12)))
    add_adapters(model, AdapterConfig(rank=1, target_modules=["*"]))
    optimizer = OptimizerContainer(model, OptimizerConfig())
    mesh = build_mesh(Parallelism(), DistEnv())
    live = AppState(ParallelModel(mesh, (model,)), optimizer, GradScaler())
    checkpoints = open_checkpoints(bucket, 32 << 10)
    saver, owned, sent = make_saver(checkpoints), OwnedTensors(mesh.index_along), []
    for step in (1, 2):
        for parameter in trainable_parameters(model).values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(0.1)
        tensors = get_local_state(live)
        owned.update(tensors)
        before = checkpoints.store.counters.bytes_written
        saver.start(step, owned.make_shards(tensors), {"step": step})
        saver.poll_when_idle()
        assert saver.commit().phase == "committed"
        saver.complete()
        sent.append(checkpoints.store.counters.bytes_written - before)
    assert sent[1] < 0.03 * sent[0]
