"""Inside the node first (Goyal et al. 2017, sec. 4): little crosses the network between nodes, where links are slow.

Workers of a node leave parts of its sum with some of them; these sum their part over all nodes, in a ring of one worker
a node; then the parts are handed out inside. As many workers of each node serve as the smallest node has. The cost is
`plan.exchanges.hierarchical`: a node's ports carry 2 (m - 1)/m of the gradients among m nodes, however many workers.
With every worker on a node of its own it is the ring, with all on one node the sharded server.
"""

from phalanx.train.exchange.buckets import Bucket
from phalanx.train.exchange.messages import Post
from phalanx.train.exchange.ring import ring_sum
from phalanx.train.exchange.server import collect, hand_out
from phalanx.train.exchange.strategy import Exact, Pending, Site


class Hierarchical(Exact):
    """Two levels: the node, and all nodes."""

    def __init__(self, site: Site, buckets: object):
        self._rank, self._post = site.rank, Post(site)
        nodes: dict[int, list[int]] = {}
        for rank, node in enumerate(site.nodes):
            nodes.setdefault(node, []).append(rank)
        self._mine = nodes[site.nodes[site.rank]]
        count = min(len(ranks) for ranks in nodes.values())
        self._servers = self._mine[:count]
        self._rings = [[ranks[lane] for ranks in nodes.values()] for lane in range(count)]

    def answer(self, number: int, bucket: Bucket) -> Pending | None:
        flat = bucket.slab.flat
        collect(self._post, flat, self._servers, self._mine, self._rank)
        if self._rank in self._servers:
            lane = self._servers.index(self._rank)
            part = flat.tensor_split(len(self._servers))[lane]
            ring_sum(self._post, part, self._rings[lane], self._rank)
        hand_out(self._post, flat, self._servers, self._mine, self._rank)
        return None
