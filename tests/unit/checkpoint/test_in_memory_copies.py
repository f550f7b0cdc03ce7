"""Hot copies of one worker, and who copies what where there are many."""

import itertools
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import phalanx.train.trainer as trainer_module
from checkpointers import leave_like_a_killed_worker
from phalanx.errors import UsageError
from phalanx.run.event_types import InMemoryRestored, RunWarning
from phalanx.run.in_memory_checkpoint import create_node_dir, find_node_dir, history_path
from phalanx.train.checkpoint.format import list_checkpoints, parse_step
from phalanx.train.checkpoint.in_memory import node_copies as node_copies_module
from phalanx.train.checkpoint.in_memory.format import format_copy_name, list_copies, list_shard_records
from phalanx.train.checkpoint.in_memory.node_copies import (
    CopyNeeds,
    NodeHolders,
    explain_missing_space,
)
from phalanx.train.checkpoint.load_plan import get_state_tensors
from phalanx.train.checkpoint.save import OwnedTensors
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.object_collectives import NodeMap, count_nodes_from_environment
from phalanx.train.distributed.parallel_model import LocalTensor
from phalanx.train.distributed.shard_spec import GlobalBlocks
from phalanx.train.resume import resume_training
from phalanx.train.step_timer import HostStepTimer
from phalanx.train.train_state import TrainState
from phalanx.train.trainer import Trainer
from small_train import SmallParts, make_parts, mesh_of, steps_of

META = {"fingerprint": "f"}


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of this machine's memory."""
    monkeypatch.setenv("PHALANX_IN_MEMORY_DIR", str(tmp_path / "memory"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PHALANX_NODE_RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "memory"


def made(path: Path, hot: Any = 1, **changes: Any) -> SmallParts:
    return make_parts(
        path, checkpoint={"every": None, **changes.pop("checkpoint", {}), "in_memory_every": hot}, **changes
    )


def weights(parts: SmallParts) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in get_state_tensors(parts.model, parts.optimizer, parts.scaler).items()}


def wait_for_copy(trainer: Trainer) -> None:
    """Until the save that is in flight, if one is, is written."""
    trainer.checkpointer.wait_snapshot_copied()
    if trainer.checkpointer._in_flight is not None:
        trainer.checkpointer._in_flight.saver.poll_when_idle()


def train_and_die(parts: SmallParts, step: int, progress: TrainState | None = None) -> dict[int, dict[str, Tensor]]:
    """Train to a step and stop there as a worker that is killed; the state after each step."""
    trainer = Trainer(parts, progress or TrainState(), META)
    states = {}
    for _ in steps_of(trainer):
        states[trainer.train_state.step] = weights(parts)
        trainer.checkpointer.wait_until_saved()
        wait_for_copy(trainer)
        if trainer.train_state.step == step:
            break
    leave_like_a_killed_worker(trainer.checkpointer)
    return states


def train_to_the_end(parts: SmallParts, progress: TrainState | None = None) -> None:
    trainer = Trainer(parts, progress or TrainState(), META)
    for _ in steps_of(trainer):
        pass
    assert trainer.finish() == "done"


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return set(one) == set(other) and all(tensor.equal(other[name]) for name, tensor in one.items())


def folder_of(parts: SmallParts) -> Path:
    folder = find_node_dir(parts.run)
    assert folder is not None
    return folder


def test_a_killed_run_goes_on_from_its_newest_copy_with_the_same_bits(tmp_path: Path) -> None:
    states = train_and_die(made(tmp_path / "run"), 5)
    parts = made(tmp_path / "run")
    progress = resume_training(parts, "f", force=False)
    assert (progress.step, progress.last_saved_step, progress.samples_consumed) == (4, 0, 16)
    assert same(weights(parts), states[4])
    (restored,) = parts.events(InMemoryRestored)
    assert (restored.step, restored.fetched_bytes) == (4, 0)


def test_the_newest_two_copies_stay_and_one_while_the_next_is_written(tmp_path: Path) -> None:
    parts = made(tmp_path / "run")
    trainer = Trainer(parts, TrainState(), META)
    seen = []
    for _ in steps_of(trainer):
        wait_for_copy(trainer)
        seen.append([step for step, _ in list_copies(folder_of(parts))])
        if trainer.train_state.step == 5:
            break
    assert seen == [[1], [2, 1], [3, 2], [4, 3], [5, 4]]
    trainer.checkpointer.close()


def test_a_run_that_ends_leaves_no_copy(tmp_path: Path, memory: Path) -> None:
    parts = made(tmp_path / "run")
    train_to_the_end(parts)
    assert list(memory.iterdir()) == []
    assert not history_path(parts.run).exists()
    assert [parse_step(path) for path in list_checkpoints(parts.run.checkpoints)] == [6]


def test_a_run_that_goes_on_from_a_copy_of_its_last_step_still_saves_it(tmp_path: Path) -> None:
    train_and_die(made(tmp_path / "run", steps=7), 6)
    parts = made(tmp_path / "run", steps=5)
    progress = resume_training(parts, "f", force=False)
    assert progress.step == 5
    train_to_the_end(parts, progress)
    assert [parse_step(path) for path in list_checkpoints(parts.run.checkpoints)] == [5]


def test_a_newer_checkpoint_is_preferred(tmp_path: Path) -> None:
    train_and_die(made(tmp_path / "run", hot=2, checkpoint={"every": 3}), 5)
    parts = made(tmp_path / "run")
    steps = {step for step, _ in list_copies(folder_of(parts))}
    (newest, *_) = [parse_step(path) for path in list_checkpoints(parts.run.checkpoints)]
    assert (newest, max(steps)) == (3, 4)
    for step, token in list_copies(folder_of(parts)):
        if step > newest:
            for record in list_shard_records(folder_of(parts) / format_copy_name(step, token)):
                record.unlink()
    progress = resume_training(parts, "f", force=False)
    assert (progress.step, progress.last_saved_step) == (3, 3)
    assert parts.events(InMemoryRestored) == []
    assert list_copies(folder_of(parts)) == []


def test_a_copy_that_was_made_after_a_checkpoint_that_is_gone_is_not_used(tmp_path: Path) -> None:
    """Somebody went back by removing checkpoints."""
    train_and_die(made(tmp_path / "run", checkpoint={"every": 2}), 5)
    parts = made(tmp_path / "run")
    newest, before = list_checkpoints(parts.run.checkpoints)
    shutil.rmtree(newest)
    assert resume_training(parts, "f", force=False).step == parse_step(before)


def test_after_a_rollback_copies_of_what_was_undone_count_no_more(tmp_path: Path) -> None:
    parts = made(tmp_path / "run", checkpoint={"every": 2})
    trainer = Trainer(parts, TrainState(), META)
    for _ in steps_of(trainer):
        if trainer.train_state.step == 5:
            break
        wait_for_copy(trainer)  # else a checkpoint takes its place
    trainer.checkpointer.wait_snapshot_copied()
    trainer.checkpointer.wait_until_saved()
    undone = {token for _, token in list_copies(folder_of(parts))}
    assert undone
    trainer.checkpointer.roll_back(2)
    assert list_copies(folder_of(parts)) == []
    create_node_dir(parts.run).joinpath(
        format_copy_name(5, undone.pop())
    ).mkdir()  # a node that comes back has it still
    leave_like_a_killed_worker(trainer.checkpointer)
    for path in list_checkpoints(parts.run.checkpoints)[:-1]:
        shutil.rmtree(path)
    again = made(tmp_path / "run")
    assert resume_training(again, "f", force=False).step == 2
    assert list_copies(folder_of(again)) == []


def test_a_checkpoint_takes_the_place_of_a_copy_that_is_still_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are copied to the same buffer."""
    begun, write = threading.Event(), node_copies_module.write_with_checksums

    def never_done(path: Path, image: Any, cancelled: threading.Event) -> list[str]:
        begun.set()
        assert cancelled.wait(20)
        return write(path, image, cancelled)

    monkeypatch.setattr(node_copies_module, "write_with_checksums", never_done)
    parts = made(tmp_path / "run", checkpoint={"every": 3})
    trainer = Trainer(parts, TrainState(), META)
    for _ in steps_of(trainer):
        if trainer.train_state.step == 2:
            assert begun.wait(20)
        if trainer.train_state.step == 3:
            break
    assert trainer.checkpointer.durable_in_flight is not None
    assert trainer.checkpointer.durable_in_flight.step == 3
    state = weights(parts)
    trainer.checkpointer.wait_until_saved()
    assert list_copies(folder_of(parts)) == []
    leave_like_a_killed_worker(trainer.checkpointer)
    again = made(tmp_path / "run")
    assert resume_training(again, "f", force=False).step == 3
    assert same(weights(again), state)


@pytest.mark.parametrize(("lap", "copies"), [(0.001, False), (0.1, True)], ids=["short steps", "long steps"])
def test_short_runs_copy_nothing_by_default_unless_their_steps_are_long(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, lap: float, copies: bool
) -> None:
    parts = make_parts(tmp_path / "run", steps=30)
    assert parts.recipe.checkpoint.in_memory_every == "1%"
    laps = itertools.count()
    timer = HostStepTimer(lambda: lap * next(laps))  # however busy this machine is
    monkeypatch.setattr(trainer_module, "make_step_timer", lambda device: timer)
    train_to_the_end(parts)
    assert memory.exists() == copies
    kinds = [event.kind for event in parts.reporter.events if "in_memory" in event.kind]
    assert kinds[:1] == ["in_memory_interval"] * copies


def test_too_little_room_is_told_once_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_copies_module, "find_available_bytes", lambda folder: 1000)
    parts = made(tmp_path / "run")
    train_to_the_end(parts)
    (warning,) = [event.text for event in parts.events(RunWarning)]
    assert warning.startswith("in-memory checkpoints are off: they need ")
    assert "kB and may take 1.00 kB; training continues" in warning


def test_a_copy_that_cannot_be_written_is_told_once_and_training_goes_on(tmp_path: Path, memory: Path) -> None:
    parts = made(tmp_path / "run")
    trainer = Trainer(parts, TrainState(), META)
    for _ in steps_of(trainer):
        wait_for_copy(trainer)  # on a busy machine the run would end before a copy has failed
        if trainer.train_state.step == 2:
            shutil.rmtree(folder_of(parts))
            folder_of(parts).write_text("in the way")
    assert trainer.finish() == "done"
    (warning,) = [event.text for event in parts.events(RunWarning)]
    assert warning.startswith("in-memory checkpoints are off: ")
    assert not history_path(parts.run).exists()


def held(rows: int, *copies: str) -> LocalTensor:
    return LocalTensor(torch.zeros(rows), GlobalBlocks.full_tensor((rows,)), copies)


TWO_NODES = NodeMap((0, 0, 1, 1))
PARAMETERS = {"a": held(4, "replicate"), "b": held(2, "replicate")}


def owners(layout: dict[str, int], nodes: NodeMap, state: dict[str, LocalTensor]) -> list[tuple[list[str], bool]]:
    """Of each worker: the tensors that it copies, and whether its node alone has some of them."""
    found = []
    for rank in range(len(nodes.node_of_rank)):
        holders = NodeHolders(mesh_of(rank, **layout), nodes, rank)
        owned = OwnedTensors(holders.position)
        owned.update(state)
        found.append((sorted(owned.names), holders.is_exposed(state)))
    return found


@pytest.mark.parametrize(
    ("layout", "nodes", "expected"),
    [
        ({"replicate": 4}, TWO_NODES, [(["a"], False), (["b"], False)] * 2),
        ({"shard": 4}, TWO_NODES, [(["a", "b"], True)] * 4),
        ({"replicate": 2, "shard": 2}, TWO_NODES, [(["a", "b"], False)] * 4),
        ({"shard": 2}, NodeMap((0, 0)), [(["a", "b"], False)] * 2),
    ],
    ids=["replicas", "shards over two nodes", "replicas that are sharded inside a node", "one node"],
)
def test_each_node_keeps_the_whole_state_and_only_shards_over_nodes_are_sent(
    layout: dict[str, int], nodes: NodeMap, expected: list[tuple[list[str], bool]]
) -> None:
    assert owners(layout, nodes, PARAMETERS) == expected


def test_nodes_are_numbered_by_their_first_worker_and_may_differ_in_size() -> None:
    nodes = NodeMap.from_names(["x", "x", "x", "y", "z", "z"])
    assert nodes.node_of_rank == (0, 0, 0, 1, 2, 2)
    assert [nodes.replica_rank(rank) for rank in range(6)] == [3, 3, 3, 4, 0, 1]
    assert [nodes.is_node_leader(rank) for rank in range(6)] == [True, False, False, True, True, False]


@pytest.mark.parametrize(("local", "expected"), [({}, 1), ("4", 1), ("2", 2), ("3", 2)])
def test_a_launcher_tells_on_how_many_nodes_its_workers_are(local: Any, expected: int) -> None:
    assert count_nodes_from_environment(DistEnv(world_size=4), {"LOCAL_WORLD_SIZE": local} if local else {}) == expected


def test_a_number_that_is_none_is_told_before_anybody_meets() -> None:
    with pytest.raises(UsageError, match=r"LOCAL_WORLD_SIZE must be a number: .*'two'"):
        count_nodes_from_environment(DistEnv(world_size=4), {"LOCAL_WORLD_SIZE": "two"})


def test_room_is_looked_for_on_every_node_for_its_own_and_the_kept_parts() -> None:
    said = [CopyNeeds(10_000_000, is_exposed=True, available_bytes=50_000_000, in_memory=True)] * 4
    assert explain_missing_space(said, TWO_NODES) == "they need 100 MB on node 0 and may take 50.0 MB"
    said = [each._replace(available_bytes=100_000_000) for each in said]
    assert explain_missing_space(said, TWO_NODES) == ""
