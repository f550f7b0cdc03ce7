"""Hot copies on two nodes of two workers each: who keeps what, and what a lost node or a lost connection means."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from checkpointers import StepSaver, leave_like_a_killed_worker
from phalanx.recipe.schema import OptimizerConfig, Parallelism
from phalanx.run import Event, Run
from phalanx.run.event_types import RunWarning
from phalanx.run.in_memory_checkpoint import DIR_PREFIX, create_node_dir, read_epochs
from phalanx.train.checkpoint.in_memory.format import format_copy_name, list_copies, list_shard_records
from phalanx.train.checkpoint.in_memory.node_copies import NodeCopies
from phalanx.train.checkpoint.load_plan import get_local_state
from phalanx.train.checkpoint.restore import VerifiedCopies, find_verified_copies, restore_in_memory
from phalanx.train.checkpoint.save import SaveContext
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.mesh import Mesh, build_mesh
from phalanx.train.distributed.object_collectives import all_gather_json, broadcast_json_from_rank_zero
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.optim.container import OptimizerContainer
from phalanx.train.precision import GradScaler
from phalanx.train.step_metrics import StepFlags
from phalanx.train.train_state import AppState
from process_worlds import ProcessWorlds

LAYOUTS = {"shards": {"shard": 4}, "replicas of shards": {"replicate": 2, "shard": 2}, "replicas": {"replicate": 4}}


class Worker:
    """One of four workers, on one of two nodes, with a model whose weights say by whom and when they were made."""

    def __init__(self, rank: int, world: int, folder: str, layout: dict[str, int]):
        self.place = DistEnv(rank, world, rank % 2)
        self.environment = {"PHALANX_NODE_RANK": str(rank // 2), "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": str(world)}
        self.environment |= {
            "PHALANX_IN_MEMORY_DIR": str(Path(folder) / f"node-{rank // 2}"),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self.environment |= {"MASTER_ADDR": "127.0.0.1"}
        self.run = Run(Path(folder) / "run")
        self.run.create()
        self.mesh: Mesh = build_mesh(Parallelism(**layout), self.place)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
        self.divided = ParallelModel(self.mesh, (self.model,))
        if self.mesh.fsdp_mesh is not None:
            for module in (*self.model, self.model):
                fully_shard(module, mesh=self.mesh.fsdp_mesh)
        self.optimizer = OptimizerContainer(self.divided.merged_module, OptimizerConfig())
        self.scale = GradScaler()
        self.told: list[Event] = []
        self.hot = StepSaver(
            SaveContext(self.run, self.place, self.mesh, {}, self.told.append, environment=self.environment),
            AppState(self.divided, self.optimizer, self.scale),
            in_memory_every=1,
        )

    def learn(self, step: int) -> None:
        """Change the weights and the optimizer's state."""
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, float(step))
        self.optimizer.step(0.1)

    def copy(self, step: int) -> None:
        """Copy the state, and settle it with the others."""
        self.hot.copy(step)
        self.hot.wait_snapshot_copied()
        assert self.hot._in_flight is not None
        self.hot._in_flight.saver.poll_when_idle()
        counts = torch.tensor(self.hot.own_flags().counts())
        dist.all_reduce(counts)
        self.hot.step_done(StepFlags(*counts.tolist()))

    def state(self) -> dict[str, Tensor]:
        held = get_local_state(AppState(self.divided, self.optimizer, self.scale))
        return {name: each.tensor.detach().clone() for name, each in held.items()}

    def found(self) -> VerifiedCopies | None:
        return find_verified_copies(self.run, self.place, lambda *_: None, self.environment)


def copies_of(worker: Worker) -> NodeCopies:
    assert worker.hot._copies is not None
    return worker.hot._copies


def parts_here(folder: str, node: int) -> dict[int, list[int]]:
    (own,) = (Path(folder) / f"node-{node}").glob(f"{DIR_PREFIX}-*")
    return {
        step: [int(record.stem[5:]) for record in list_shard_records(own / f"step-{step:09d}-{token}")]
        for step, token in list_copies(own)
    }


def kept_and_lost(rank: int, world: int, *, folder: str, layout: dict[str, int]) -> dict[str, Any]:
    """Two copies; node 1 loses its memory; the state is changed, and comes back."""
    worker = Worker(rank, world, folder, layout)
    for step in (1, 2):
        worker.learn(step)
        worker.copy(step)
    before, kept = worker.state(), parts_here(folder, rank // 2)
    leave_like_a_killed_worker(worker.hot)
    dist.barrier()
    if rank == 2:
        shutil.rmtree(Path(folder) / "node-1")
    dist.barrier()
    worker.learn(9)
    found = worker.found()
    assert found is not None
    held = AppState(worker.divided, worker.optimizer, worker.scale)
    recalled = restore_in_memory(worker.run, found, worker.place, held, lambda *_: None, worker.environment)
    assert recalled is not None
    after = worker.state()
    assert {name: tensor.equal(after[name]) for name, tensor in before.items()} == dict.fromkeys(before, True)
    meta = recalled.manifest.meta
    return {
        "kept": kept,
        "fetched": recalled.fetched_bytes,
        "step": meta["step"],
        "told": [event.kind for event in worker.told],
    }


def test_the_share_of_a_node_that_is_lost_comes_from_the_other(world: ProcessWorlds, tmp_path: Path) -> None:
    found = world.run(4, kept_and_lost, folder=str(tmp_path), layout=LAYOUTS["shards"])
    assert [each["kept"] for each in found] == [{1: [0, 1, 2, 3], 2: [0, 1, 2, 3]}] * 4
    assert [each["step"] for each in found] == [2] * 4
    assert found[0]["fetched"] == found[3]["fetched"] > 0
    assert found[1]["told"] == ["in_memory_checkpoint_saved"] * 2


def test_where_both_nodes_hold_all_nothing_is_sent_and_either_may_be_lost(world: ProcessWorlds, tmp_path: Path) -> None:
    for number, layout in enumerate(("replicas of shards", "replicas")):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = world.run(4, kept_and_lost, folder=str(folder), layout=LAYOUTS[layout])
        assert [each["kept"] for each in found] == [{1: [0, 1], 2: [0, 1]}] * 2 + [{1: [2, 3], 2: [2, 3]}] * 2
        assert found[2]["fetched"] > 0


def said_of_all(rank: int, world: int, *, folder: str) -> dict[str, Any]:
    """Elements received where one worker says much, by all and by the leading one; of each layout how many names are
    said when a copy begins, how many tensors it counts, and how many there are."""
    received: list[int] = []
    spoken: list[Any] = []

    def gather(outputs: list[Tensor], value: Tensor, gather: Any = dist.all_gather) -> None:
        received.append(sum(each.numel() for each in outputs))
        gather(outputs, value)

    def broadcast(value: Tensor, broadcast: Any = dist.broadcast, **more: Any) -> None:
        received.append(value.numel())
        broadcast(value, **more)

    def speak(place: DistEnv, value: Any) -> list[Any]:
        spoken.append(value)
        return all_gather_json(place, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", gather)
        patch.setattr(dist, "broadcast", broadcast)
        place, long = DistEnv(rank, world), ["x" * 1_000_000]
        said = all_gather_json(place, long if rank == 2 else rank)
        by_all = sum(received)
        led = broadcast_json_from_rank_zero(place, long if rank == 0 else None)
        by_leader = sum(received) - by_all
    copies = {}
    for name, layout in LAYOUTS.items():
        worker = Worker(rank, world, f"{folder}/{name}", layout)
        spoken.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("phalanx.train.checkpoint.in_memory.node_copies.all_gather_json", speak)
            worker.learn(1)
            worker.copy(1)
        names = [value for value in spoken if isinstance(value, list)]
        copies[name] = (len(names[0]), copies_of(worker).num_tensors, len(worker.state()))
        leave_like_a_killed_worker(worker.hot)
    whole = said == [0, 1, long, 3] and led == long
    return {"whole": whole, "by all": by_all, "by leader": by_leader, "copies": copies}


def test_what_one_worker_says_at_length_costs_the_others_its_length_once(world: ProcessWorlds, tmp_path: Path) -> None:
    found = world.run(4, said_of_all, folder=str(tmp_path))
    for each in found:
        assert each["whole"]
        assert each["by all"] < 1_100_000
        assert each["by leader"] < 1_100_000
    for layout in LAYOUTS:
        names, counted, there = zip(*(each["copies"][layout] for each in found), strict=True)
        assert set(counted) == set(there)
        assert sum(names) == there[0]  # each name is said by one worker


FAILURES = ("missing", "damaged", "no room", "no folder")


def failing_on_one(rank: int, world: int, *, folder: str, how: str) -> list[tuple[str, str]]:
    """A copy that all have found good, and that node 1 cannot read after all; what was reported."""
    worker = Worker(rank, world, folder, LAYOUTS["shards"])
    worker.learn(1)
    worker.copy(1)
    leave_like_a_killed_worker(worker.hot)
    dist.barrier()
    base = Path(folder) / "node-1"
    if rank == 2 and how == "no room":
        shutil.rmtree(base)
    dist.barrier()
    worker.learn(9)
    before, found, told = worker.state(), worker.found(), list[tuple[str, str]]()
    assert found is not None
    dist.barrier()
    if rank == 2:
        (copy,) = (path for path in base.glob(f"{DIR_PREFIX}-*/step-*")) if how != "no room" else (None,)
        if copy is None:  # where the folder is to come is a file
            step, token = next(iter(found.readers_by_copy))
            own = create_node_dir(worker.run, worker.environment)
            (own / format_copy_name(step, token)).write_text("")
        elif how == "missing":
            (copy / "rank-00003.safetensors").unlink()
        elif how == "damaged":
            damaged = copy / "rank-00003.safetensors"
            damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
        else:
            shutil.move(copy.parent, base / "elsewhere")
            copy.parent.write_text("")
    dist.barrier()
    held = AppState(worker.divided, worker.optimizer, worker.scale)

    def on_reject(path: Path, file: str, reason: str) -> None:
        told.append((file, reason))

    assert restore_in_memory(worker.run, found, worker.place, held, on_reject, worker.environment) is None
    after = worker.state()
    assert {name: tensor.equal(after[name]) for name, tensor in before.items()} == dict.fromkeys(before, True)
    return told


def test_a_copy_that_one_worker_cannot_read_changes_nothing_on_any_and_is_reported_by_all(
    world: ProcessWorlds, tmp_path: Path
) -> None:
    for how in FAILURES:
        folder = tmp_path / how
        folder.mkdir()
        told = world.run(4, failing_on_one, folder=str(folder), how=how)
        assert told == [told[0]] * 4
        assert told[0], how


def left_alone(rank: int, world: int, *, folder: str) -> float:
    """Worker 3 is gone while the others copy; how long they take to leave."""
    worker = Worker(rank, world, folder, LAYOUTS["shards"])
    worker.learn(1)
    worker.copy(1)
    if rank == 3:
        leave_like_a_killed_worker(worker.hot)
        dist.barrier()
        return 0.0
    dist.barrier()
    worker.learn(2)
    worker.hot.copy(2)
    worker.hot.wait_snapshot_copied()
    begun = time.monotonic()
    leave_like_a_killed_worker(worker.hot)
    return time.monotonic() - begun


def test_who_lost_a_peer_leaves_without_waiting_and_whole_copies_stay(world: ProcessWorlds, tmp_path: Path) -> None:
    seconds = world.run(4, left_alone, folder=str(tmp_path))
    assert max(seconds) < 5.0
    for node in (0, 1):
        assert parts_here(str(tmp_path), node)[1] == [0, 1, 2, 3]
    assert len(read_epochs(Run(tmp_path / "run"))[0]) == 1


def broken(rank: int, world: int, *, folder: str) -> list[str]:
    """The connection of worker 0 to its keeper breaks."""
    worker = Worker(rank, world, folder, LAYOUTS["shards"])
    worker.learn(1)
    worker.copy(1)
    if rank == 0:
        copies_of(worker)._peers.shut_down()
    worker.copy(2)
    assert not worker.hot.copy_interval.is_due(3)
    return [event.text for event in worker.told if isinstance(event, RunWarning)]


def test_a_second_copy_that_cannot_be_kept_is_told_alike_and_ends_copying(world: ProcessWorlds, tmp_path: Path) -> None:
    texts = world.run(4, broken, folder=str(tmp_path))
    assert texts == [texts[0]] * 4
    assert texts[0][0].startswith("in-memory checkpoints are off: ")
    assert [list((tmp_path / f"node-{node}").iterdir()) for node in (0, 1)] == [[], []]
    assert "in_memory.json" not in os.listdir(tmp_path / "run")
