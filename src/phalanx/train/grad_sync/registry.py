"""The algorithms of gradient synchronization by their names in recipes."""

from phalanx.train.grad_sync.algorithms.allreduce import AllReduceAlgorithm
from phalanx.train.grad_sync.algorithms.base import AlgorithmFactory
from phalanx.train.grad_sync.algorithms.binomial_tree import BinomialTree
from phalanx.train.grad_sync.algorithms.hierarchical import HierarchicalAllReduce
from phalanx.train.grad_sync.algorithms.parameter_server import ParameterServer, ShardedParameterServer
from phalanx.train.grad_sync.algorithms.recursive_halving import RecursiveHalving
from phalanx.train.grad_sync.algorithms.ring import RingAllReduce
from phalanx.train.grad_sync.compression.bf16 import Bf16Compression
from phalanx.train.grad_sync.compression.int8 import Int8Compression
from phalanx.train.grad_sync.compression.powersgd import PowerSGDCompression

GRAD_SYNC_ALGORITHMS: dict[str, AlgorithmFactory] = {
    "all-reduce": AllReduceAlgorithm,
    "bf16": Bf16Compression,
    "int8": Int8Compression,
    "powersgd": PowerSGDCompression,
    "ring": RingAllReduce,
    "binomial-tree": BinomialTree,
    "recursive-halving": RecursiveHalving,
    "parameter-server": ParameterServer,
    "sharded-parameter-server": ShardedParameterServer,
    "hierarchical": HierarchicalAllReduce,
}
