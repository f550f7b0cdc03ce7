"""Going back to a checkpoint that not every worker can read: all read the same, or nothing changes anywhere."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from checkpoints import save
from phalanx.compat import observe_operations
from phalanx.recipe.schema import OptimizerConfig, Parallelism
from phalanx.run import Run
from phalanx.train.checkpoint.format import format_checkpoint_name
from phalanx.train.checkpoint.load_plan import get_local_state, get_state_tensors
from phalanx.train.checkpoint.restore import restore_newest
from phalanx.train.distributed.dtensor_utils import to_local
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.mesh import build_mesh
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.optim.container import OptimizerContainer
from phalanx.train.precision import GradScaler
from phalanx.train.train_state import AppState, TrainState
from process_worlds import ProcessWorlds


def trained(steps: int) -> tuple[nn.Module, OptimizerContainer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    return model, learn(model, OptimizerContainer(model, OptimizerConfig()), steps)


def learn(model: nn.Module, optimizer: OptimizerContainer, steps: int) -> OptimizerContainer:
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(0.1)
    return optimizer


def written(run: Run, *steps: int) -> None:
    """Checkpoints of a single worker after these steps."""
    run.create()
    for step in steps:
        tensors = get_state_tensors(*trained(step), GradScaler())
        save(run.checkpoints, step, tensors, asdict(TrainState(step=step)))


def damage(path: Path) -> None:
    file = path / "rank-00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-2000] + bytes(1000) + content[-1000:])


def unlink(path: Path) -> None:
    (path / "rank-00000.safetensors").unlink()


def worker(rank: int, world: int, layout: dict[str, int]) -> tuple[DistEnv, nn.Module, AppState]:
    """A worker whose state is that after five steps."""
    place = DistEnv(rank, world, rank)
    mesh = build_mesh(Parallelism(**layout), place)
    model, _ = trained(0)
    if mesh.fsdp_mesh is not None:
        fully_shard(model, mesh=mesh.fsdp_mesh)
    divided, optimizer = ParallelModel(mesh, (model,)), OptimizerContainer(model, OptimizerConfig())
    learn(model, optimizer, 5)
    return place, model, AppState(divided, optimizer, GradScaler())


def state(held: AppState) -> dict[str, Tensor]:
    return {name: each.tensor.detach().clone() for name, each in get_local_state(held).items()}


def restored(
    rank: int, world: int, *, folder: str, layout: dict[str, int], bad: list[tuple[int, int, Callable[[Path], None]]]
) -> dict[str, Any]:
    """Each worker sees files of its own, of which some are `bad`: by rank and step."""
    run = Run(Path(folder) / f"files-{rank}")
    written(run, 1, 2, 3)
    for whose, step, harm in bad:
        if whose == rank:
            harm(run.checkpoints / format_checkpoint_name(step))
    place, _, held = worker(rank, world, layout)
    before, told = state(held), list[tuple[str, str]]()
    loaded = restore_newest(run, place, held, lambda path, *what: told.append((path.name, what[0])))
    after = state(held)
    changed = any(not tensor.equal(after[name]) for name, tensor in before.items())
    steps = {int(each) for name, each in after.items() if name.endswith("/step")}
    return {"step": None if loaded is None else loaded.manifest.meta["step"], "changed": changed, "told": told} | {
        "optimizer": steps
    }


def read(rank: int, world: int, *, folder: str, layout: dict[str, int], in_place: bool) -> dict[str, Any]:
    """Bytes of what is made while a checkpoint is read, and whether the state is the checkpoint's then."""
    expected = {name: tensor.clone() for name, tensor in get_state_tensors(*trained(3), GradScaler()).items()}
    place, model, held = worker(rank, world, layout)
    used = {name: each.tensor.nbytes for name, each in get_local_state(held).items()}
    known: set[int] = set()
    made: list[int] = []

    def note(result: Any) -> None:
        if isinstance(result, Tensor) and not isinstance(result, DTensor):  # whose local part is seen, too
            storage = result.untyped_storage()
            if storage.data_ptr() not in known:
                known.add(storage.data_ptr())
                made.append(storage.nbytes())

    for parameter in model.parameters():
        known.add(to_local(parameter).untyped_storage().data_ptr())
    with observe_operations(note):
        restore_newest(Run(Path(folder)), place, held, lambda *bad: None, durable_only=True, in_place=in_place)
    whole = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in get_state_tensors(model, held.optimizer, held.scaler).items()
    }
    return {
        "made": sum(made),
        "weights": sum(size for name, size in used.items() if not name.startswith("optimizer/")),
        "same": whole.keys() == expected.keys() and all(whole[name].equal(expected[name]) for name in whole),
    }


@pytest.mark.parametrize("layout", [{"replicate": 2}, {"shard": 2}], ids=["replicas", "shards"])
def test_in_place_weights_take_no_memory_a_second_time(
    world: ProcessWorlds, tmp_path: Path, layout: dict[str, int]
) -> None:
    written(Run(tmp_path), 3)
    elsewhere, in_place = (
        world.run(2, read, folder=str(tmp_path), layout=layout, in_place=in_place) for in_place in (False, True)
    )
    for one, other in zip(elsewhere, in_place, strict=True):
        assert one["same"]
        assert other["same"]
        assert one["made"] - other["made"] == one["weights"] > 0


@pytest.mark.parametrize("harm", [damage, unlink])
@pytest.mark.parametrize("layout", [{"replicate": 2}, {"shard": 2}], ids=["replicas", "shards"])
def test_all_fall_back_together_to_what_each_of_them_can_read(
    world: ProcessWorlds, tmp_path: Path, layout: dict[str, int], harm: Callable[[Path], None]
) -> None:
    bad = [(1, 3, harm), (0, 2, harm)]
    found = world.run(2, restored, folder=str(tmp_path), layout=layout, bad=bad)
    assert [each["step"] for each in found] == [1, 1]
    assert [each["optimizer"] for each in found] == [{1}, {1}]
    names = [(format_checkpoint_name(step), "rank-00000.safetensors") for step in (3, 2)]
    assert [each["told"] for each in found] == [names, names]


@pytest.mark.parametrize("layout", [{"replicate": 2}, {"shard": 2}], ids=["replicas", "shards"])
def test_nothing_changes_where_they_can_read_none_in_common(
    world: ProcessWorlds, tmp_path: Path, layout: dict[str, int]
) -> None:
    bad = [(1, 3, damage), (1, 2, unlink), (0, 1, damage)]
    found = world.run(2, restored, folder=str(tmp_path), layout=layout, bad=bad)
    assert [(each["step"], each["changed"], each["optimizer"]) for each in found] == [(None, False, {5})] * 2
