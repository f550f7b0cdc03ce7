"""The methods by the names that recipes give them."""

from phalanx.train.exchange.allreduce import AllReduceAlgorithm
from phalanx.train.exchange.half import Bf16Compression
from phalanx.train.exchange.halving import RecursiveHalving
from phalanx.train.exchange.hierarchical import HierarchicalAllReduce
from phalanx.train.exchange.int8 import Int8Compression
from phalanx.train.exchange.powersgd import PowerSGDCompression
from phalanx.train.exchange.reduction_tree import BinomialTree
from phalanx.train.exchange.ring import RingAllReduce
from phalanx.train.exchange.server import ParameterServer, ShardedParameterServer
from phalanx.train.exchange.strategy import AlgorithmFactory

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
