"""Which workers work together on what: the process groups of a layout.

Ranks are numbered with the tensor dimension innermost, since it talks most and should have the fastest links, and
pipeline stages outermost, since they talk least:

    rank = (((pipeline x replicate + r) x shard + s) x context + c) x tensor + t
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from phalanx.data.feed import share
from phalanx.recipe import Recipe
from phalanx.recipe.exchanges import sums_shards
from phalanx.recipe.schema import Parallelism
from phalanx.train.parallel.collectives import Group
from phalanx.train.parallel.shard import REDUCES_UNUSED
from phalanx.train.place import Place, patience

DIMENSIONS = ("pipeline", "replicate", "shard", "context", "tensor")
"""Of the world, outermost first."""
_NUMBERS = itertools.count(1)
"""DTensor remembers what it made on a mesh, and would take one of an earlier world for a new one if they were equal."""


def coordinates(layout: Parallelism, rank: int) -> dict[str, int]:
    """Where a rank stands in each dimension."""
    found = {}
    for name in reversed(DIMENSIONS):
        size = getattr(layout, name)
        found[name] = rank % size
        rank //= size
    return {name: found[name] for name in DIMENSIONS}


@dataclass(frozen=True)
class Mesh:
    """This worker's place in a layout, and the groups that it belongs to; a group of one is None.

    `stage` are all ranks that hold the same layers. `data` numbers the parts of the batch, 0 <= data < data_size: ranks
    that differ in pipeline, context or tensor only work on the same samples. `fsdp` is the DeviceMesh over which
    parameters are sharded ("shard"), or sharded and replicated ("replicate", "shard") where sums over replicas are left
    to FSDP; None where they are whole.
    `expert_fsdp` is the same for experts, whose number of owners is smaller by `expert`. `rounds`: the ranks that shard
    a replica take micro-batches in turns, and sums over replicas are not left to FSDP.
    """

    layout: Parallelism
    at: dict[str, int]
    tensor: Group = None
    context: Group = None
    pipeline: Group = None
    replicate: Group = None
    expert: Group = None
    stage: Group = None
    fsdp: DeviceMesh | None = None
    expert_fsdp: DeviceMesh | None = None
    rounds: bool = False

    @property
    def data(self) -> int:
        """The number of this worker's part of the batch."""
        return self.at["replicate"] * self.layout.shard + self.at["shard"]

    @property
    def data_size(self) -> int:
        """Parts into which the batch is divided."""
        return self.layout.replicate * self.layout.shard

    @property
    def turns(self) -> int:
        """Ranks that take micro-batches in turns (`feed.share`)."""
        return self.layout.shard if self.rounds else 1

    def own(self, micro_batches: int) -> range:
        """Which of a step's micro-batches are this worker's."""
        return share(micro_batches, self.data, self.data_size, self.turns)

    @property
    def sharded(self) -> int:
        """Ranks over which a parameter is sharded."""
        return self.layout.shard * self.layout.context

    @property
    def shard_rank(self) -> int:
        """This worker's number among those."""
        return self.at["shard"] * self.layout.context + self.at["context"]

    @property
    def speaks(self) -> bool:
        """Whether losses of this worker's micro-batches count: tensor ranks hold the same, only the last stage has
        any. (Context ranks hold parts.)"""
        return self.at["tensor"] == 0 and self.at["pipeline"] == self.layout.pipeline - 1

    @property
    def speaker(self) -> int:
        """The rank of the first worker that speaks."""
        return (self.layout.pipeline - 1) * (self.layout.world // self.layout.pipeline)

    def number(self, axes: Sequence[str]) -> tuple[int, int]:
        """This worker's number among the ranks that differ from it in `axes` only, and how many they are."""
        index, count = 0, 1
        for axis in axes:
            size = getattr(self.layout, axis)
            index, count = index * size + self.at[axis], count * size
        return index, count

    @property
    def only_replicates(self) -> bool:
        """Whether every worker holds the whole model."""
        return self.layout.replicate == self.layout.world


def alone() -> Mesh:
    """The mesh of a single worker."""
    return Mesh(Parallelism(), coordinates(Parallelism(), 0))


def build_mesh(
    layout: Parallelism,
    place: Place,
    recipe: Recipe | None = None,
    opening: Callable[[str], AbstractContextManager[Any]] = lambda dimension: contextlib.nullcontext(),
) -> Mesh:
    """The groups of this worker; every worker calls it, after `join`. The layout's product is the world; the
    `recipe` says who sums between sharded replicas. What `opening` gives for a dimension is entered while its group
    opens connections."""
    at = coordinates(layout, place.rank)
    world = dist.group.WORLD if layout.world > 1 else None
    if layout.replicate == layout.world:
        return Mesh(layout, at, replicate=world, stage=world)
    sharded = layout.shard * layout.context
    sizes = [getattr(layout, name) for name in DIMENSIONS]
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    groups: dict[str, Group] = {}
    for i, name in enumerate(DIMENSIONS):
        with opening(name):
            groups[name] = _own_group(ranks.movedim(i, -1), place.rank)
    fsdp = expert_fsdp = expert = None
    rounds = sharded > 1 and sums_shards(recipe or Recipe(), layout, place.device.type)
    if sharded > 1:
        owners = groups["shard"]
        if layout.context > 1:
            owners = _own_group(ranks.flatten(2, 3).movedim(2, -1), place.rank)
        # rounds go with no other dimension than these two
        replicas = groups["replicate"] if REDUCES_UNUSED and not rounds else None
        fsdp = _mesh_of(place, owners, replicas)
        if layout.expert > 1:
            by_expert = ranks.reshape(layout.pipeline, layout.replicate, -1, layout.expert, layout.tensor)
            expert = _own_group(by_expert.movedim(3, -1), place.rank)
            same = _own_group(by_expert.movedim(2, -1), place.rank, single=True)
            expert_fsdp = _mesh_of(place, same, replicas)
    return Mesh(
        layout,
        at,
        tensor=groups["tensor"],
        context=groups["context"],
        pipeline=groups["pipeline"],
        replicate=groups["replicate"],
        expert=expert,
        stage=world if layout.pipeline == 1 else _own_group(ranks.flatten(1), place.rank),
        fsdp=fsdp,
        expert_fsdp=expert_fsdp,
        rounds=rounds,
    )


def group_of_stages(mesh: Mesh, place: Place, members: Sequence[int]) -> Group:
    """The group of the workers at these places in the pipeline that differ in nothing else; every worker calls it."""
    ranks = torch.arange(mesh.layout.world).view(mesh.layout.pipeline, -1)
    chosen = ranks[list(members)].T  # [all else, members]
    return _own_group(chosen, place.rank, required=mesh.at["pipeline"] in members)


def _own_group(ranks: torch.Tensor, rank: int, required: bool = True, single: bool = False) -> Group:
    """Of the groups that are the rows of `ranks` [..., size], the one that holds `rank`. All ranks make all groups, in
    the same order. None instead of a group of one, unless `single`."""
    if ranks.shape[-1] == 1 and not single:
        return None
    own: Group = None
    for row in ranks.reshape(-1, ranks.shape[-1]).tolist():
        group: dist.ProcessGroup = dist.new_group(row, timeout=patience())
        if rank in row:
            own = group
    assert own is not None or not required
    return own


def _mesh_of(place: Place, owners: Group, replicas: Group) -> DeviceMesh:
    """What FSDP shards over `owners`, and replicates over `replicas` where there are any: of the groups that there are,
    since a second communicator for the same ranks costs connections, and memory of a GPU."""
    assert owners is not None
    name = f"shard of mesh {next(_NUMBERS)}"
    if replicas is None:
        return DeviceMesh.from_group(owners, place.device.type, mesh_dim_names=(name,))
    across = dist.get_process_group_ranks(replicas)
    along = dist.get_process_group_ranks(owners)
    # Ranks of a dimension are as far from one another whatever the others are.
    mesh = [[first + other - place.rank for other in along] for first in across]
    return DeviceMesh.from_group([replicas, owners], place.device.type, mesh, mesh_dim_names=("replicate", name))
