"""Where ranks stand in a layout, and what follows from it without any process group."""

import itertools
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from phalanx.recipe.schema import Parallelism
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.mesh import MESH_DIMENSIONS, build_mesh, rank_coordinates
from phalanx.train.distributed.process_group import set_collective_timeout
from small_train import mesh_of

LAYOUT = {"pipeline": 2, "replicate": 2, "shard": 3, "context": 2, "tensor": 2}


def meshes(**layout: int) -> list[Any]:
    return [mesh_of(rank, **layout) for rank in range(Parallelism(**layout).world)]


def test_ranks_are_numbered_with_tensor_innermost_and_pipeline_outermost() -> None:
    layout = Parallelism(**LAYOUT)
    for rank in range(layout.world):
        at = rank_coordinates(layout, rank)
        assert all(at[name] in range(LAYOUT[name]) for name in MESH_DIMENSIONS)
        number = (at["pipeline"] * 2 + at["replicate"]) * 3 + at["shard"]
        assert rank == (number * 2 + at["context"]) * 2 + at["tensor"]


def test_parts_of_the_batch_are_divided_over_replicas_and_shards_only() -> None:
    found = meshes(**LAYOUT)
    assert {mesh.dp_size for mesh in found} == {6}
    assert sorted(mesh.dp_rank for mesh in found) == sorted([*range(6)] * 8)
    for one, other in itertools.combinations(found, 2):
        alike = all(one.coordinates[name] == other.coordinates[name] for name in ("replicate", "shard"))
        assert (one.dp_rank == other.dp_rank) == alike


def test_by_rounds_the_ranks_that_shard_take_micro_batches_in_turns_whatever_the_number_of_replicas() -> None:
    for replicate in (1, 2, 3):
        found = [replace(mesh, is_tree_hsdp=True) for mesh in meshes(replicate=replicate, shard=2)]
        assert sorted(index for mesh in found for index in mesh.own_micro_batches(12)) == [*range(12)]
        for mesh in found:
            assert {index % 2 for index in mesh.own_micro_batches(12)} == {mesh.coordinates["shard"]}
            assert len(mesh.own_micro_batches(12)) == 6 // replicate


def test_without_rounds_micro_batches_are_consecutive() -> None:
    assert [mesh.own_micro_batches(12) for mesh in meshes(replicate=2, shard=2)] == [
        range(i, i + 3) for i in (0, 3, 6, 9)
    ]


@pytest.mark.parametrize("axes", [(), ("replicate",), ("shard", "context"), ("replicate", "tensor"), MESH_DIMENSIONS])
def test_ranks_that_differ_in_some_axes_only_are_numbered_without_gaps(axes: tuple[str, ...]) -> None:
    numbers: dict[tuple[int, ...], list[int]] = {}
    for mesh in meshes(**LAYOUT):
        rest = tuple(mesh.coordinates[name] for name in MESH_DIMENSIONS if name not in axes)
        index, count = mesh.index_along(axes)
        numbers.setdefault(rest, []).append(index)
        assert count == len(list(itertools.product(*(range(LAYOUT[name]) for name in axes))))
    assert all(sorted(found) == list(range(len(found))) for found in numbers.values())


def test_collectives_of_a_part_of_the_workers_outwait_the_agent_too(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[timedelta] = []

    def new_group(ranks: list[int], timeout: timedelta = timedelta(minutes=30)) -> Any:
        waits.append(timeout)
        return SimpleNamespace(ranks=ranks)

    monkeypatch.setattr(dist, "new_group", new_group)
    set_collective_timeout(7200.0)
    try:
        build_mesh(Parallelism(tensor=2, replicate=2), DistEnv(1, 4))
    finally:
        set_collective_timeout(0.0)
    assert waits
    assert min(waits) > timedelta(seconds=7200)
