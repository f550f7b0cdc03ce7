"""The size of buckets for a loop of the user's own: its model is known only when it prepares it."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from phalanx.recipe import Recipe, dump_recipe, load_resolved_recipe
from phalanx.run import Run
from phalanx.run.directory import write_json
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.session import resolve_bucket_size
from process_worlds import ProcessWorlds
from resolved_recipes import resolved_recipe

PARAMETERS = 12 * 2**20
"""48 MiB of gradients: 4 MiB are a 12th."""


def buckets(rank: int, world: int, *, folder: str, bucket: Any, begun: bool, nodes: int) -> tuple[Any, Any]:
    """What a worker takes, and what the run's resolved recipe says afterwards."""
    run = Run(Path(folder))
    given = Recipe.model_validate({"parallelism": {"replicate": world}, "grad_sync": {"bucket_mib": bucket}})
    if rank == 0:
        run.recipe.write_text(dump_recipe(given))
        run.resolved.write_text(dump_recipe(resolved_recipe(world, **given.model_dump(exclude_unset=True))))
        write_json(run.plan, {"session": {"optimizer": "AdamW"}} if begun else {})
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world // nodes)}
    os.environ["PHALANX_NODE_RANK"] = str(rank * nodes // world)
    dist.barrier()
    found = resolve_bucket_size(run, load_resolved_recipe(run.resolved), DistEnv(rank, world), PARAMETERS)
    dist.barrier()
    return found.grad_sync.bucket_mib, load_resolved_recipe(run.resolved).grad_sync.bucket_mib


@pytest.mark.parametrize(
    ("bucket", "begun", "nodes", "expected"),
    [("auto", False, 2, 4.0), ("auto", False, 1, 25.0), ("auto", True, 2, 25.0), (7.5, False, 2, 7.5)],
    ids=["between nodes", "on one node", "a run that goes on", "given"],
)
def test_a_new_run_between_nodes_has_a_12th_of_the_gradients(
    world: ProcessWorlds, tmp_path: Path, bucket: Any, begun: bool, nodes: int, expected: float
) -> None:
    for found in world.run(2, buckets, folder=str(tmp_path), bucket=bucket, begun=begun, nodes=nodes):
        assert found == (expected, expected)
