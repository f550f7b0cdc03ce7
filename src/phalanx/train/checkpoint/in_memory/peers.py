"""Connect each worker to the workers on other nodes with which it exchanges replicas."""

from collections.abc import Collection, Mapping
from pathlib import Path

from phalanx.train.checkpoint.in_memory.replication import ReplicaClient, ReplicaServer, find_local_address
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.object_collectives import NodeMap, all_gather_json


class ReplicaPeers:
    """The connections of one worker, if any: to the worker that keeps its replica, and from those that replicate to
    it."""

    def __init__(self, dist_env: DistEnv, nodes: NodeMap):
        self._dist_env, self._nodes = dist_env, nodes
        self._server: ReplicaServer | None = None
        self.client: ReplicaClient | None = None

    @property
    def cpu_s(self) -> float:
        """Core seconds that storing the last replicas of others took."""
        return 0.0 if self._server is None else self._server.cpu_s

    def connect(self, folder: Path, senders: Collection[int], environment: Mapping[str, str]) -> str:
        """Connect the ranks `senders` to the workers that keep their replicas in `folder`. Every worker calls it.
        Return why it failed on any worker, in which case nothing is connected; "" if all are connected."""
        dist_env, nodes = self._dist_env, self._nodes
        replicated_ranks = [rank for rank in senders if nodes.replica_rank(rank) == dist_env.rank]
        address, problem = None, ""
        try:
            if replicated_ranks:
                self._server = ReplicaServer(folder)
                address = self._server.listen(find_local_address(environment))
        except OSError as error:
            problem = str(error)
        addresses = all_gather_json(dist_env, address)
        try:
            if dist_env.rank in senders and addresses[nodes.replica_rank(dist_env.rank)] is not None:
                host, port, secret = addresses[nodes.replica_rank(dist_env.rank)]
                self.client = ReplicaClient((host, port, secret))
            if self._server is not None and not problem:
                self._server.accept(len(replicated_ranks))
        except OSError as error:
            problem = problem or str(error)
        found = next((each for each in all_gather_json(dist_env, problem) if each), "")
        if found:
            self.shut_down()
            self.close()
        return found

    def shut_down(self) -> None:
        """End all exchanges at once, even while a thread sends: it then fails. Close the connections afterwards."""
        for peer in (self.client, self._server):
            if peer is not None:
                peer.close()

    def close(self) -> None:
        """Close the connections after `shut_down`, when no thread sends any more."""
        if self.client is not None:
            self.client.close_socket()
        self.client = self._server = None
