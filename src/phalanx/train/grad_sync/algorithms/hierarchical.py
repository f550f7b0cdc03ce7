"""Inside the node first (Goyal et al. 2017, sec. 4): little crosses the network between nodes, where links are slow.

Workers of a node leave parts of its sum with some of them; these sum their part over all nodes, in a ring of one worker
a node; then the parts are handed out inside. As many workers of each node serve as the smallest node has. A node's
ports carry 2 (m - 1)/m of the gradients among m nodes, however many workers. With every
worker on a node of its own it is the ring, with all on one node the sharded server.
"""

from torch import Tensor

from phalanx.train.grad_sync.algorithms.base import CommContext, PendingWork
from phalanx.train.grad_sync.algorithms.p2p import P2PAlgorithm
from phalanx.train.grad_sync.algorithms.parameter_server import broadcast_from_servers, reduce_to_servers
from phalanx.train.grad_sync.algorithms.ring import ring_all_gather, ring_reduce_scatter
from phalanx.train.grad_sync.buckets import Bucket


class HierarchicalAllReduce(P2PAlgorithm):
    """Two levels: the node, and all nodes."""

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
        """The part of the gradients that this worker serves, and who serves it in other nodes."""
        own = self._servers.index(self._comm.rank)
        return flat.tensor_split(len(self._servers))[own], self._inter_node_rings[own]
