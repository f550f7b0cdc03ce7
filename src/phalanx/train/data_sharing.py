"""Have the nodes of a run give each other data (`storage/peers.py`): the shards of datasets in a store, and the pieces
of streams, of which each node prepares a part."""

import contextlib
import queue
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from phalanx.data.prepare import WHOLE_DATASET, DatasetPart
from phalanx.data.prepare_plan import copy_piece
from phalanx.data.stream import is_stream, preparation_order, read_description
from phalanx.run.cache import cache_root
from phalanx.storage.cache import localize_into, set_peers
from phalanx.storage.peers import ObjectPeers
from phalanx.train.checkpoint.in_memory.replication import find_local_address
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.object_collectives import all_gather_json, broadcast_json_from_rank_zero, gather_node_map

_MAX_COPIES = 8
"""Pieces of a stream that a node copies at once."""
_RETRY_S = 1.0


@dataclass
class DataSharing:
    """The nodes that share data. `part`: this node among them; `peers` is None where nothing is shared, or in workers
    that leave it to the first worker of their node."""

    part: DatasetPart = WHOLE_DATASET
    peers: ObjectPeers | None = None
    is_over: threading.Event = field(default_factory=threading.Event)

    def share_stream(self, directory: Path, holdout_fraction: float, seed: int) -> None:
        """Give the pieces of a stream that this node prepares to the others, and copy theirs, in threads."""
        if self.peers is None or not is_stream(directory):
            return
        description = read_description(directory)
        name = f"stream-{description.identity}"
        self.peers.add_directory(name, directory)
        copies: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        for position, piece in enumerate(preparation_order(description, holdout_fraction, seed)):
            if (owner := position % self.part.num_parts) != self.part.index:
                copies.put((owner, piece))
        for _ in range(min(_MAX_COPIES, copies.qsize())):
            threading.Thread(target=self._copy_pieces, args=(self.peers, directory, name, copies), daemon=True).start()

    def _copy_pieces(
        self, peers: ObjectPeers, directory: Path, name: str, copies: "queue.SimpleQueue[tuple[int, int]]"
    ) -> None:
        while not self.is_over.is_set():
            try:
                owner, piece = copies.get_nowait()
            except queue.Empty:
                return
            copy_file = partial(_copy_stream_file, peers, owner, name)
            while not copy_piece(directory, piece, copy_file):  # it is prepared here in the end, if no node gives it
                if self.is_over.wait(_RETRY_S):
                    return


def _copy_stream_file(peers: ObjectPeers, owner: int, name: str, file: str, target: Path) -> bool:
    return peers.copy_from(owner, f"{name}/{file}", target)


@contextlib.contextmanager
def sharing_data(dist_env: DistEnv, is_wanted: bool) -> Iterator[DataSharing]:
    """Share data among the nodes as long as this lasts. The first worker of each node serves them. Nodes that see one
    cache directory share that instead. Every worker enters at the same time."""
    nodes = gather_node_map(dist_env) if is_wanted else None
    if nodes is None or nodes.num_nodes == 1:
        yield DataSharing()
        return
    secret = broadcast_json_from_rank_zero(dist_env, secrets.token_hex(16))
    cache_root().mkdir(parents=True, exist_ok=True)
    marker = cache_root() / f".nodes-{secret[:16]}"
    if dist_env.is_rank_zero:
        marker.touch()
    all_gather_json(dist_env, None)  # after this every worker sees the marker, if it can
    own_node = nodes.node_of_rank[dist_env.rank]
    is_leader = nodes.is_node_leader(dist_env.rank)
    peers = ObjectPeers(secret.encode(), localize_into)
    address = peers.listen(find_local_address()) if is_leader else None
    gathered = all_gather_json(dist_env, (address, own_node > 0 and marker.exists()))
    if dist_env.is_rank_zero:
        marker.unlink(missing_ok=True)
    sharing = DataSharing()
    if not any(sees_cache for _, sees_cache in gathered):
        leaders = [nodes.ranks_on(node)[0] for node in range(nodes.num_nodes)]
        peers.connect([tuple(gathered[leader][0]) for leader in leaders], own_node)
        set_peers(peers)
        sharing = DataSharing(DatasetPart(own_node, nodes.num_nodes), peers if is_leader else None)
    try:
        yield sharing
    finally:
        sharing.is_over.set()
        set_peers(None)
        peers.close()
