"""The strategies by the names that recipes give them."""

from phalanx.train.exchange.allreduce import AllReduce
from phalanx.train.exchange.half import Half
from phalanx.train.exchange.int8 import Int8
from phalanx.train.exchange.strategy import Way

WAYS: dict[str, Way] = {
    "allreduce": AllReduce,
    "bf16": Half,
    "int8": Int8,
}
