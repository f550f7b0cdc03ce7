"""Have the nodes of a run give each other the shards of datasets in a store (`storage/peers.py`)."""

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence

from phalanx.run.cache import cache_root
from phalanx.storage.cache import localize_into, set_peers
from phalanx.storage.peers import ObjectPeers
from phalanx.storage.url import is_url
from phalanx.train.checkpoint.in_memory.replication import find_local_address
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.object_collectives import (
    all_gather_json,
    broadcast_json_from_rank_zero,
    gather_node_map,
)


@contextlib.contextmanager
def sharing_shards(
    dist_env: DistEnv, datasets: Sequence[str | None], environment: Mapping[str, str] = os.environ
) -> Iterator[None]:
    """Share the shards of datasets at URLs among the nodes, as long as this lasts. The first worker of each node serves
    them. Nodes that see one cache directory share that instead. Every worker enters at the same time."""
    nodes = gather_node_map(dist_env, environment) if any(map(is_url, datasets)) else None
    if nodes is None or nodes.num_nodes == 1:
        yield
        return
    secret = broadcast_json_from_rank_zero(dist_env, secrets.token_hex(16))
    cache_root().mkdir(parents=True, exist_ok=True)
    marker = cache_root() / f".nodes-{secret[:16]}"
    if dist_env.is_rank_zero:
        marker.touch()
    all_gather_json(dist_env, None)  # after this every worker sees the marker, if it can
    own_node = nodes.node_of_rank[dist_env.rank]
    peers, address = ObjectPeers(secret.encode(), localize_into), None
    if nodes.is_node_leader(dist_env.rank):
        address = peers.listen(find_local_address(environment))
    gathered = all_gather_json(dist_env, (address, own_node > 0 and marker.exists()))
    if dist_env.is_rank_zero:
        marker.unlink(missing_ok=True)
    if not any(sees_cache for _, sees_cache in gathered):
        leaders = [nodes.ranks_on(node)[0] for node in range(nodes.num_nodes)]
        peers.connect([tuple(gathered[leader][0]) for leader in leaders], own_node)
        set_peers(peers)
    try:
        yield
    finally:
        set_peers(None)
        peers.close()
