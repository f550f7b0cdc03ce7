"""Hierarchical all-reduce: first within the node, then between nodes, where links are slow (Goyal et al. 2017, sec. 4).

The workers of a node reduce-scatter to the servers of the node. Each server all-reduces its part with its counterparts
on the other nodes, in a ring with one worker per node; then the servers broadcast the parts within the node. Each node
has as many servers as the smallest node has workers. A node's links carry 2 (m - 1)/m of the gradients for m nodes,
whatever the number of workers. With one worker per node it is the ring algorithm; with one node, the sharded parameter
server.
"""

from torch import Tensor

from phalanx.train.grad_sync.algorithms.base import CommContext, PendingWork
from phalanx.train.grad_sync.algorithms.p2p import P2PAlgorithm
from phalanx.train.grad_sync.algorithms.parameter_server import broadcast_from_servers, reduce_to_servers
from phalanx.train.grad_sync.algorithms.ring import ring_all_gather, ring_reduce_scatter
from phalanx.train.grad_sync.buckets import Bucket


class HierarchicalAllReduce(P2PAlgorithm):
    """Two levels: within the node and between nodes."""

    def __init__(self, comm: CommContext, buckets: object):
        super().__init__(comm, buckets)
        nodes: dict[int, list[int]] = {}
        for rank, node in enumerate(comm.node_of_rank):
            nodes.setdefault(node, []).append(rank)
        self._ranks_on_node = nodes[comm.node_of_rank[comm.rank]]
        count = min(len(ranks) for ranks in nodes.values())
        self._servers = self._ranks_on_node[:count]
        self._inter_node_rings = [[ranks[number] for ranks in nodes.values()] for number in range(count)]

    def start_second_phase(self, bucket_index: int, bucket: Bucket) -> PendingWork | None:
        flat, rank, channel = bucket.buffer.flat, self._comm.rank, self._channel.for_bucket(bucket_index)
        reduce_to_servers(channel, flat, self._servers, self._ranks_on_node, rank)
        if rank in self._servers:
            ring_reduce_scatter(channel, *self._own_part_and_ring(flat), rank)
        return None

    def finish(self, bucket_index: int, bucket: Bucket) -> None:
        flat, rank, channel = bucket.buffer.flat, self._comm.rank, self._channel.for_bucket(bucket_index)
        if rank in self._servers:
            ring_all_gather(channel, *self._own_part_and_ring(flat), rank)
        broadcast_from_servers(channel, flat, self._servers, self._ranks_on_node, rank)

    def _own_part_and_ring(self, flat: Tensor) -> tuple[Tensor, list[int]]:
        """Return the part of the gradients that this worker serves, and the ring of servers of that part."""
        own = self._servers.index(self._comm.rank)
        return flat.tensor_split(len(self._servers))[own], self._inter_node_rings[own]
