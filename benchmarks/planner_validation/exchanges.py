"""What it costs to add up gradients over all devices, by the way that it is done; after FireCaffe (Iandola et al. 2016,
arXiv 1511.00175), which showed that this choice decides whether data parallelism scales, and what came since.

Every way is a plain function (bytes, ranks, bandwidth, latency) -> seconds: bytes of all gradients, bandwidth in bytes
a second of one device into the network, one way, latency in seconds of one message. One rank takes no time. Only the
network's time is counted: sums, copies and launches are in the bandwidth that one fits. Networks that block are not
here; their bandwidth is lower.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.plan.setup import INT8

Exchange = Callable[[float, int, float, float], float]
"""(bytes, ranks, bytes a second, seconds a message) -> seconds."""


def parameter_server(size: float, ranks: int, bandwidth: float, latency: float) -> float:
    """One server beside the ranks: it takes all their gradients in through one port while it sends weights out:
    n |W| / BW, linear in the ranks (FireCaffe sec. 5). Paleo (Qi et al. 2017) has it among them and both ways one after
    the other, 2 (n - 1) |W| / BW (`serving_rank`)."""
    return ranks * (size / bandwidth + latency) if ranks > 1 else 0.0


def serving_rank(size: float, ranks: int, bandwidth: float, latency: float) -> float:
    """One of the ranks is the server, as in `phalanx.train.exchange.server`: it takes the others' gradients in, then
    sends them the sum, 2 (n - 1) |W| / BW (Paleo's). Of many buckets on CPUs half of that: one is sent while another
    comes in."""
    return 2 * (ranks - 1) * (size / bandwidth + latency)


def sharded_parameter_server(size: float, ranks: int, bandwidth: float, latency: float) -> float:
    """Every rank serves an equal part of the weights (Li et al. 2014, OSDI): 2 (n - 1)/n |W| / BW, all ports busy both
    ways; n - 1 messages leave each port each time."""
    return 2 * (ranks - 1) / ranks * size / bandwidth + 2 * (ranks - 1) * latency


def reduction_tree(size: float, ranks: int, bandwidth: float, latency: float) -> float:
    """Binomial tree of whole messages: up to one rank, then down again, 2 log2(n) (|W| / BW + latency), FireCaffe's
    choice (sec. 5.2; as its formula has it, without rounding log2 up). That of one message: of many buckets some go up
    while others come down."""
    return 2 * math.log2(ranks) * (size / bandwidth + latency)


def halving_doubling(size: float, ranks: int, bandwidth: float, latency: float) -> float:
    """Recursive halving, then doubling (Rabenseifner 2004; Thakur et al. 2005): 2 (n - 1)/n |W| / BW and 2 log2(n)
    messages. Numbers that are no power of two first fold the surplus onto others, and in the end back: Thakur's
    |W| / BW each way on top."""
    if ranks <= 1:
        return 0.0
    power = 1 << (ranks.bit_length() - 1)
    fold = 0.0 if power == ranks else 2 * (size / bandwidth + latency)
    return fold + 2 * (power - 1) / power * size / bandwidth + 2 * math.log2(power) * latency


def ring(size: float, ranks: int, bandwidth: float, latency: float) -> float:
    """Ring reduce-scatter and all-gather (Patarasuk and Yuan 2009): 2 (n - 1) pieces of |W| / n, which is the least
    traffic there can be, at 2 (n - 1) messages."""
    return 2 * (ranks - 1) * (size / ranks / bandwidth + latency)


def butterfly(size: float, ranks: int, bandwidth: float, latency: float) -> float:
    """Recursive doubling with whole messages: log2(n) (|W| / BW + latency), for small messages (Thakur et al. 2005)."""
    return math.ceil(math.log2(ranks)) * (size / bandwidth + latency)


def hierarchical(
    size: float,
    nodes: int,
    a_node: int,
    inner: tuple[float, float],
    outer: tuple[float, float],
    way: Exchange = ring,
) -> float:
    """Inside each node first (Goyal et al. 2017, sec. 4; NCCL's trees and rings over nodes do as well): reduce-scatter
    among its `a_node` devices, exchange `way` among nodes, all-gather inside. `inner` and `outer` are (bytes a second,
    seconds a message), `inner` of one device, `outer` of one whole node: its devices share its ports."""
    inside = ring(size, a_node, *inner)  # reduce-scatter and all-gather together are one ring all-reduce
    return inside + way(size, nodes, *outer)


def one_level(size: float, ranks: int, bandwidth: float, latency: float) -> float:
    """`hierarchical` with every rank on a node of its own, which makes it a ring."""
    return hierarchical(size, ranks, 1, (bandwidth, latency), (bandwidth, latency))


def half(size: float, ranks: int, bandwidth: float, latency: float) -> float:
    """Gradients that are fp32, in bf16 on the wire: parts to those that add them, and sums back."""
    return sharded_parameter_server(size / 2, ranks, bandwidth, latency)


def eighth(size: float, ranks: int, bandwidth: float, latency: float) -> float:
    """fp32 gradients as 8 bits with an fp32 scale for each 256 of them, in the two steps of a sharded server."""
    return sharded_parameter_server(size * INT8, ranks, bandwidth, latency)


def low_rank(size: float, ranks: int, bandwidth: float, latency: float, share: float = 1.0) -> float:
    """Gradients as thin matrices that take `share` of their bytes, in two all-reduces, one after the other (Vogels et
    al. 2019)."""
    return ring(size * share, ranks, bandwidth, latency) + ring(0.0, ranks, bandwidth, latency)


def local_steps(size: float, ranks: int, bandwidth: float, latency: float, every: int, way: Exchange = ring) -> float:
    """A step's share of an exchange every so many steps, of weights that are as large as gradients (Stich 2019; DiLoCo,
    Douillard et al. 2023): way / H. Nothing hides it. The small message in which all agree on a step is not counted, as
    with the other ways."""
    return way(size, ranks, bandwidth, latency) / every


WAYS: dict[str, Exchange] = {
    "all-reduce": ring,  # what the libraries do with large messages
    "bf16": half,
    "int8": eighth,
    "powersgd": low_rank,  # for matrices that are no smaller as thin ones
    "ring": ring,
    "binomial-tree": reduction_tree,
    "recursive-halving": halving_doubling,
    "parameter-server": serving_rank,
    "sharded-parameter-server": sharded_parameter_server,
    "hierarchical": one_level,
    "parameter_server": parameter_server,
    "butterfly": butterfly,
}
"""By the names that recipes give them (`phalanx.train.exchange.ways`), and two that are only foretold."""


@dataclass(frozen=True)
class Iteration:
    """One step of data parallelism, in seconds."""

    compute: float
    exchange: float
    """Of all gradients, whether anyone waits for it or not."""
    exposed: float
    """The part of the exchange during which nothing is computed."""

    @property
    def seconds(self) -> float:
        """From one step to the next."""
        return self.compute + self.exposed


def iteration(compute: float, exchange: float, hidden: float = 0.0) -> Iteration:
    """A step that computes for `compute` seconds on every device and exchanges for `exchange`, of which up to `hidden`
    seconds run beside computing, as they may from the first gradient on; FireCaffe hid none."""
    return Iteration(compute, exchange, max(0.0, exchange - hidden))


def speedup(step: Iteration, batch: float, single: float, single_batch: float) -> float:
    """Samples a second of a `step` over `batch` samples, over those of one device that takes `single` seconds for
    `single_batch`. Both batches matter: a device is slower on few samples at once."""
    return (batch / step.seconds) / (single_batch / single)
