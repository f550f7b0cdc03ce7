"""Inside the node first (Goyal et al. 2017, sec. 4): little crosses the network between nodes, where links are slow.

Workers of a node leave parts of its sum with some of them; these sum their part over all nodes, in a ring of one worker
a node; then the parts are handed out inside. As many workers of each node serve as the smallest node has. A node's
ports carry 2 (m - 1)/m of the gradients among m nodes, however many workers. With every
worker on a node of its own it is the ring, with all on one node the sharded server.
"""

from torch import Tensor

from phalanx.train.exchange.buckets import Bucket
from phalanx.train.exchange.messages import Talking
from phalanx.train.exchange.ring import all_gather, reduce_scatter
from phalanx.train.exchange.server import collect, hand_out
from phalanx.train.exchange.strategy import Pending, Site


class Hierarchical(Talking):
    """Two levels: the node, and all nodes."""

    def __init__(self, site: Site, buckets: object):
        super().__init__(site, buckets)
        nodes: dict[int, list[int]] = {}
        for rank, node in enumerate(site.nodes):
            nodes.setdefault(node, []).append(rank)
        self._mine = nodes[site.nodes[site.rank]]
        count = min(len(ranks) for ranks in nodes.values())
        self._servers = self._mine[:count]
        self._rings = [[ranks[number] for ranks in nodes.values()] for number in range(count)]

    def answer(self, number: int, bucket: Bucket) -> Pending | None:
        flat, rank, post = bucket.slab.flat, self._site.rank, self._post.about(number)
        collect(post, flat, self._servers, self._mine, rank)
        if rank in self._servers:
            reduce_scatter(post, *self._served(flat), rank)
        return None

    def take(self, number: int, bucket: Bucket) -> None:
        flat, rank, post = bucket.slab.flat, self._site.rank, self._post.about(number)
        if rank in self._servers:
            all_gather(post, *self._served(flat), rank)
        hand_out(post, flat, self._servers, self._mine, rank)

    def _served(self, flat: Tensor) -> tuple[Tensor, list[int]]:
        """The part of the gradients that this worker serves, and who serves it in other nodes."""
        own = self._servers.index(self._site.rank)
        return flat.tensor_split(len(self._servers))[own], self._rings[own]
