"""Going back to a checkpoint in an object store: each byte is read once for all nodes, and all workers agree."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import store_saves
from phalanx.recipe.schema import OptimizerConfig, Parallelism
from phalanx.run import Run
from phalanx.run.directory import write_json
from phalanx.train.checkpoint.digest import compute_digest
from phalanx.train.checkpoint.load_plan import get_state_tensors
from phalanx.train.checkpoint.restore import restore_newest
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.mesh import build_mesh
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.optim.container import OptimizerContainer
from phalanx.train.precision import GradScaler
from phalanx.train.train_state import AppState
from process_worlds import ProcessWorlds
from store_saves import make_saver, open_checkpoints, save_to_store


def widened(steps: int) -> tuple[nn.Module, OptimizerContainer]:
    """About 1 MB of state."""
    model = nn.Linear(300, 300)
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, 0.0)
    optimizer = OptimizerContainer(model, OptimizerConfig())
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(0.1)
    return model, optimizer


def stored(bucket: Path, *steps: int) -> dict[int, str]:
    """Checkpoints in a store after these steps of a single worker, and their digests."""
    saver, digests = make_saver(open_checkpoints(bucket)), {}
    for step in steps:
        tensors = get_state_tensors(*widened(step), GradScaler())
        assert save_to_store(saver, step, tensors, units_trained=step).phase == "committed"
        digests[step] = compute_digest(tensors.items(), 16 * step)
    return digests


def restored(
    rank: int, world: int, *, bucket: str, folder: str, nodes: int, shared: bool, kept: bool = False
) -> dict[str, Any]:
    """Each worker's node has a directory of its own unless it is `shared`."""
    os.environ |= {"PHALANX_NODE_RANK": str(rank * nodes // world)}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world // nodes)}
    run = Run(Path(folder) / ("shared" if shared else f"node-{rank * nodes // world}"))
    if not kept:
        run.create()
        write_json(run.store, {"url": f"file://{bucket}"})
    place = DistEnv(rank, world, rank)
    model, optimizer = widened(0)
    parallel_model = ParallelModel(build_mesh(Parallelism(replicate=world), place), (model,))
    rejected: list[tuple[str, str]] = []
    counters = open_checkpoints(Path(bucket)).store.counters
    before = counters.bytes_read
    loaded = restore_newest(
        run,
        place,
        AppState(parallel_model, optimizer, GradScaler()),
        lambda path, file, reason: rejected.append((str(path), file)),
        store_url=run.store_url,
    )
    step = None if loaded is None else loaded.manifest.meta["step"]
    digest = compute_digest(get_state_tensors(model, optimizer, GradScaler()).items(), 16 * (step or 0))
    found = sorted(path.name for path in run.checkpoints.iterdir())
    return {
        "step": step,
        "digest": digest,
        "read": counters.bytes_read - before,
        "rejected": rejected,
        "found": found,
    }


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_each_byte_is_read_from_the_store_once_for_all_nodes(
    world: ProcessWorlds, tmp_path: Path, nodes: int, shared: bool
) -> None:
    digests = stored(tmp_path / "bucket", 1, 2)
    results = world.run(4, restored, bucket=str(tmp_path / "bucket"), folder=str(tmp_path), nodes=nodes, shared=shared)
    assert [(each["step"], each["digest"]) for each in results] == [(2, digests[2])] * 4
    size = open_checkpoints(tmp_path / "bucket").read(2).manifest.nbytes
    assert size <= sum(each["read"] for each in results) <= 1.1 * size
    assert [each["found"] for each in results] == [["step-000000002"]] * 4


def test_a_damaged_block_makes_all_workers_take_the_checkpoint_before(world: ProcessWorlds, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    digests = stored(bucket, 1, 2)
    block = open_checkpoints(bucket).read(2).blocks[5]
    store_saves.flip_byte(bucket / "blocks" / block.name)
    results = world.run(2, restored, bucket=str(bucket), folder=str(tmp_path), nodes=2, shared=False)
    for each in results:
        assert (each["step"], each["digest"]) == (1, digests[1])
        assert each["rejected"] == [(f"file://{bucket}/checkpoints/step-000000002", block.name)]
        assert each["found"] == ["step-000000001"]


def test_a_checkpoint_without_its_manifest_is_none(world: ProcessWorlds, tmp_path: Path) -> None:
    digests = stored(tmp_path / "bucket", 1, 2)
    (tmp_path / "bucket/checkpoints/step-000000002/MANIFEST.json").unlink()
    (result,) = world.run(1, restored, bucket=str(tmp_path / "bucket"), folder=str(tmp_path), nodes=1, shared=False)
    assert (result["step"], result["digest"], result["rejected"]) == (1, digests[1], [])


def test_nodes_that_fetched_the_checkpoint_before_read_no_block_again(world: ProcessWorlds, tmp_path: Path) -> None:
    stored(tmp_path / "bucket", 1)
    where = {"bucket": str(tmp_path / "bucket"), "folder": str(tmp_path), "nodes": 2, "shared": False}
    world.run(2, restored, **where)
    assert sum(each["read"] for each in world.run(2, restored, **where, kept=True)) == 0


def test_a_node_without_the_checkpoint_gets_it_from_the_store(world: ProcessWorlds, tmp_path: Path) -> None:
    digests = stored(tmp_path / "bucket", 1)
    where = {"bucket": str(tmp_path / "bucket"), "folder": str(tmp_path), "shared": False}
    world.run(1, restored, **where, nodes=1)
    results = world.run(2, restored, **where, nodes=2)
    assert [each["digest"] for each in results] == [digests[1]] * 2


def test_a_store_that_does_not_answer_ends_the_restore_on_all_workers(world: ProcessWorlds, tmp_path: Path) -> None:
    for text in world.run(2, refused, folder=str(tmp_path)):
        assert "OSError" in text
        assert "no store here" in text


def refused(rank: int, world: int, *, folder: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("phalanx.storage.run_objects.StoredSteps.steps", fail)
        try:
            restored(rank, world, bucket=f"{folder}/bucket", folder=folder, nodes=2, shared=False)
        except OSError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def fail(url: object) -> None:
    raise OSError(5, "no store here")
