"""The methods by the names that recipes give them."""

from phalanx.train.exchange.allreduce import AllReduce
from phalanx.train.exchange.half import Half
from phalanx.train.exchange.halving import Halving
from phalanx.train.exchange.hierarchical import Hierarchical
from phalanx.train.exchange.int8 import Int8
from phalanx.train.exchange.powersgd import PowerSGD
from phalanx.train.exchange.reduction_tree import ReductionTree
from phalanx.train.exchange.ring import Ring
from phalanx.train.exchange.server import Server, ShardedServer
from phalanx.train.exchange.strategy import Way

WAYS: dict[str, Way] = {
    "all-reduce": AllReduce,
    "bf16": Half,
    "int8": Int8,
    "powersgd": PowerSGD,
    "ring": Ring,
    "binomial-tree": ReductionTree,
    "recursive-halving": Halving,
    "parameter-server": Server,
    "sharded-parameter-server": ShardedServer,
    "hierarchical": Hierarchical,
}
