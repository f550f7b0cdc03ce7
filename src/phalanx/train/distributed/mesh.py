"""The device mesh: process groups for each dimension of the parallelism.

Ranks are numbered with the tensor dimension innermost, which communicates most and should have the fastest links, and
the pipeline dimension outermost, which communicates least:

    rank = (((pipeline x replicate + r) x shard + s) x context + c) x tensor + t
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from phalanx.data.prefetch import micro_batch_range
from phalanx.recipe import Recipe
from phalanx.recipe.grad_sync_defaults import reduces_hybrid_shards
from phalanx.recipe.schema import Parallelism
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.fsdp import REDUCES_UNUSED
from phalanx.train.distributed.process_group import patience
from phalanx.train.ops.collectives import Group

MESH_DIMENSIONS = ("pipeline", "replicate", "shard", "context", "tensor")
"""Dimensions of the world, outermost first."""
_MESH_IDS = itertools.count(1)
"""Makes meshes unequal: DTensor caches by mesh, and would use entries of an earlier world for an equal mesh."""


def rank_coordinates(parallelism: Parallelism, rank: int) -> dict[str, int]:
    """Return the coordinate of a rank in each dimension."""
    found = {}
    for name in reversed(MESH_DIMENSIONS):
        size = getattr(parallelism, name)
        found[name] = rank % size
        rank //= size
    return {name: found[name] for name in MESH_DIMENSIONS}


@dataclass(frozen=True)
class Mesh:
    """This worker's coordinates in the mesh, and its process groups; a group of one is None.

    `stage_group` are all ranks that hold the same layers. `dp_rank` is the index of the worker's part of the batch, 0
    <= dp_rank < dp_size: ranks that differ only in pipeline, context or tensor work on the same samples. `fsdp_mesh` is
    the DeviceMesh over which FSDP shards ("shard"), or shards and replicates ("replicate", "shard") if it also reduces
    over replicas; None if parameters are not sharded. `expert_fsdp_mesh` is the same for experts, which `expert_group`
    divides first. `is_tree_hsdp`: the ranks that shard a replica process micro-batches in turn, and FSDP does not
    reduce over replicas.
    """

    parallelism: Parallelism
    coordinates: dict[str, int]
    tensor_group: Group = None
    context_group: Group = None
    pipeline_group: Group = None
    replicate_group: Group = None
    expert_group: Group = None
    stage_group: Group = None
    fsdp_mesh: DeviceMesh | None = None
    expert_fsdp_mesh: DeviceMesh | None = None
    is_tree_hsdp: bool = False

    @property
    def dp_rank(self) -> int:
        """Index of this worker's part of the batch."""
        return self.coordinates["replicate"] * self.parallelism.shard + self.coordinates["shard"]

    @property
    def dp_size(self) -> int:
        """Number of parts into which the batch is divided."""
        return self.parallelism.replicate * self.parallelism.shard

    @property
    def micro_batch_stride(self) -> int:
        """Number of ranks that process micro-batches in turn (`feed.micro_batch_range`)."""
        return self.parallelism.shard if self.is_tree_hsdp else 1

    def own_micro_batches(self, micro_batches: int) -> range:
        """Return the indices of this worker's micro-batches in a step."""
        return micro_batch_range(micro_batches, self.dp_rank, self.dp_size, self.micro_batch_stride)

    @property
    def fsdp_size(self) -> int:
        """Number of ranks over which a parameter is sharded."""
        return self.parallelism.shard * self.parallelism.context

    @property
    def owns_loss(self) -> bool:
        """Whether this worker's losses count: tensor-parallel ranks have equal losses, and only the last pipeline stage
        has losses at all. (Context-parallel ranks have parts.)"""
        return self.coordinates["tensor"] == 0 and self.coordinates["pipeline"] == self.parallelism.pipeline - 1

    def index_along(self, axes: Sequence[str]) -> tuple[int, int]:
        """Return this worker's index among the ranks that differ from it in `axes` only, and their number."""
        index, count = 0, 1
        for axis in axes:
            size = getattr(self.parallelism, axis)
            index, count = index * size + self.coordinates[axis], count * size
        return index, count

    @property
    def is_pure_ddp(self) -> bool:
        """Whether every worker holds the whole model."""
        return self.parallelism.replicate == self.parallelism.world


def make_single_worker_mesh() -> Mesh:
    """Make the mesh of a single worker."""
    return Mesh(Parallelism(), rank_coordinates(Parallelism(), 0))


def build_mesh(parallelism: Parallelism, dist_env: DistEnv, recipe: Recipe | None = None) -> Mesh:
    """Create the groups of this worker, after `init_process_group`; every worker calls it. The product of the
    dimensions is the world size. The `recipe` determines what reduces between sharded replicas."""
    own_coordinates = rank_coordinates(parallelism, dist_env.rank)
    world_group = dist.group.WORLD if parallelism.world > 1 else None
    if parallelism.replicate == parallelism.world:
        return Mesh(parallelism, own_coordinates, replicate_group=world_group, stage_group=world_group)
    fsdp_size = parallelism.shard * parallelism.context
    sizes = [getattr(parallelism, name) for name in MESH_DIMENSIONS]
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    groups: dict[str, Group] = {}
    for i, name in enumerate(MESH_DIMENSIONS):
        groups[name] = _make_groups(ranks.movedim(i, -1), dist_env.rank)
    fsdp_mesh = expert_fsdp_mesh = expert = None
    is_tree_hsdp = fsdp_size > 1 and reduces_hybrid_shards(recipe or Recipe())
    if fsdp_size > 1:
        owners = groups["shard"]
        if parallelism.context > 1:
            owners = _make_groups(ranks.flatten(2, 3).movedim(2, -1), dist_env.rank)
        # Tree HSDP is not combined with other dimensions than these two.
        replicas = groups["replicate"] if REDUCES_UNUSED and not is_tree_hsdp else None
        fsdp_mesh = _make_device_mesh(dist_env, owners, replicas)
        if parallelism.expert > 1:
            by_expert = ranks.reshape(
                parallelism.pipeline, parallelism.replicate, -1, parallelism.expert, parallelism.tensor
            )
            expert = _make_groups(by_expert.movedim(3, -1), dist_env.rank)
            same = _make_groups(by_expert.movedim(2, -1), dist_env.rank, single=True)
            expert_fsdp_mesh = _make_device_mesh(dist_env, same, replicas)
    return Mesh(
        parallelism,
        own_coordinates,
        tensor_group=groups["tensor"],
        context_group=groups["context"],
        pipeline_group=groups["pipeline"],
        replicate_group=groups["replicate"],
        expert_group=expert,
        stage_group=world_group if parallelism.pipeline == 1 else _make_groups(ranks.flatten(1), dist_env.rank),
        fsdp_mesh=fsdp_mesh,
        expert_fsdp_mesh=expert_fsdp_mesh,
        is_tree_hsdp=is_tree_hsdp,
    )


def make_stage_group(mesh: Mesh, dist_env: DistEnv, stage_positions: Sequence[int]) -> Group:
    """Create the group over these pipeline stages at otherwise equal coordinates; every worker calls it."""
    ranks = torch.arange(mesh.parallelism.world).view(mesh.parallelism.pipeline, -1)
    chosen = ranks[list(stage_positions)].T  # [other coordinates, stages]
    return _make_groups(chosen, dist_env.rank, required=mesh.coordinates["pipeline"] in stage_positions)


def _make_groups(ranks: torch.Tensor, rank: int, required: bool = True, single: bool = False) -> Group:
    """Create a group for each row of `ranks` [..., size], and return the one that contains `rank`. All ranks create all
    groups, in the same order. Returns None for a group of one, unless `single`."""
    if ranks.shape[-1] == 1 and not single:
        return None
    own: Group = None
    for row in ranks.reshape(-1, ranks.shape[-1]).tolist():
        group: dist.ProcessGroup = dist.new_group(row, timeout=patience())
        if rank in row:
            own = group
    assert own is not None or not required
    return own


def _make_device_mesh(dist_env: DistEnv, owners: Group, replicas: Group) -> DeviceMesh:
    """Make the DeviceMesh over which FSDP shards (`owners`) and, if given, replicates (`replicas`). It uses the
    existing groups: a second communicator for the same ranks would cost connections and GPU memory."""
    assert owners is not None
    name = f"shard of mesh {next(_MESH_IDS)}"
    if replicas is None:
        return DeviceMesh.from_group(owners, dist_env.device.type, mesh_dim_names=(name,))
    across = dist.get_process_group_ranks(replicas)
    along = dist.get_process_group_ranks(owners)
    # The rank offsets within a dimension do not depend on the other coordinates.
    mesh = [[first + other - dist_env.rank for other in along] for first in across]
    return DeviceMesh.from_group([replicas, owners], dist_env.device.type, mesh, mesh_dim_names=("replicate", name))
