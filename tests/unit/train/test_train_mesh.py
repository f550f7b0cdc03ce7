"""Where ranks stand in a layout, and what follows from it without any process group."""

import itertools
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from small_train import mesh_of

from phalanx.recipe.schema import Parallelism
from phalanx.train.parallel.mesh import DIMENSIONS, build_mesh, coordinates
from phalanx.train.place import Place, outwait

LAYOUT = {"pipeline": 2, "replicate": 2, "shard": 3, "context": 2, "tensor": 2}


def meshes(**layout: int) -> list[Any]:
    return [mesh_of(rank, **layout) for rank in range(Parallelism(**layout).world)]


def test_every_rank_has_coordinates_of_its_own() -> None:
    layout = Parallelism(**LAYOUT)
    found = [tuple(coordinates(layout, rank).values()) for rank in range(layout.world)]
    assert sorted(found) == list(itertools.product(*(range(LAYOUT[name]) for name in DIMENSIONS)))


def test_ranks_are_numbered_with_tensor_innermost_and_pipeline_outermost() -> None:
    layout = Parallelism(**LAYOUT)
    for rank in range(layout.world):
        at = coordinates(layout, rank)
        number = (at["pipeline"] * 2 + at["replicate"]) * 3 + at["shard"]
        assert rank == (number * 2 + at["context"]) * 2 + at["tensor"]


def test_parts_of_the_batch_are_divided_over_replicas_and_shards_only() -> None:
    found = meshes(**LAYOUT)
    assert {mesh.data_size for mesh in found} == {6}
    assert sorted(mesh.data for mesh in found) == sorted([*range(6)] * 8)
    for one, other in itertools.combinations(found, 2):
        alike = all(one.at[name] == other.at[name] for name in ("replicate", "shard"))
        assert (one.data == other.data) == alike


def test_by_rounds_the_ranks_that_shard_take_micro_batches_in_turns_whatever_the_number_of_replicas() -> None:
    for replicate in (1, 2, 3):
        found = [replace(mesh, rounds=True) for mesh in meshes(replicate=replicate, shard=2)]
        assert sorted(index for mesh in found for index in mesh.own(12)) == [*range(12)]
        for mesh in found:
            assert {index % 2 for index in mesh.own(12)} == {mesh.at["shard"]}
            assert len(mesh.own(12)) == 6 // replicate


def test_without_rounds_micro_batches_are_consecutive() -> None:
    assert [mesh.own(12) for mesh in meshes(replicate=2, shard=2)] == [range(i, i + 3) for i in (0, 3, 6, 9)]


def test_parameters_are_sharded_over_shard_and_context() -> None:
    found = meshes(**LAYOUT)
    assert {mesh.sharded for mesh in found} == {6}
    assert {mesh.shard_rank for mesh in found} == set(range(6))


def test_experts_reuse_the_ranks_that_shard() -> None:
    found = meshes(shard=2, context=2, expert=2)
    assert [mesh.shard_rank for mesh in found] == [0, 1, 2, 3]


def test_of_each_micro_batch_one_rank_speaks_for_each_part_of_its_sequences() -> None:
    speaking = [mesh for mesh in meshes(**LAYOUT) if mesh.speaks]
    assert sorted((mesh.data, mesh.at["context"]) for mesh in speaking) == list(itertools.product(range(6), range(2)))
    assert {mesh.at["pipeline"] for mesh in speaking} == {1}


@pytest.mark.parametrize("axes", [(), ("replicate",), ("shard", "context"), ("replicate", "tensor"), DIMENSIONS])
def test_ranks_that_differ_in_some_axes_only_are_numbered_without_gaps(axes: tuple[str, ...]) -> None:
    numbers: dict[tuple[int, ...], list[int]] = {}
    for mesh in meshes(**LAYOUT):
        rest = tuple(mesh.at[name] for name in DIMENSIONS if name not in axes)
        index, count = mesh.number(axes)
        numbers.setdefault(rest, []).append(index)
        assert count == len(list(itertools.product(*(range(LAYOUT[name]) for name in axes))))
    assert all(sorted(found) == list(range(len(found))) for found in numbers.values())


@pytest.mark.parametrize(
    ("layout", "expected"), [({}, True), ({"replicate": 4}, True), ({"shard": 2}, False), ({"tensor": 2}, False)]
)
def test_a_layout_of_replicas_only_leaves_the_model_whole(layout: dict[str, int], expected: bool) -> None:
    assert mesh_of(**layout).only_replicates is expected


def test_one_worker_belongs_to_no_group() -> None:
    mesh = build_mesh(Parallelism(), Place())
    assert mesh == mesh_of()
    assert (mesh.data, mesh.data_size, mesh.speaks) == (0, 1, True)


def test_collectives_of_a_part_of_the_workers_outwait_the_agent_too(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[timedelta] = []

    def new_group(ranks: list[int], timeout: timedelta = timedelta(minutes=30)) -> Any:
        waits.append(timeout)
        return SimpleNamespace(ranks=ranks)

    monkeypatch.setattr(dist, "new_group", new_group)
    outwait(7200.0)
    try:
        build_mesh(Parallelism(tensor=2, replicate=2), Place(1, 4))
    finally:
        outwait(0.0)
    assert waits
    assert min(waits) > timedelta(seconds=7200)
