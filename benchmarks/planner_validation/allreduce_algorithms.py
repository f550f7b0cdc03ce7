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

from phalanx.planner.scenario import INT8_WIRE_RATIO

AllReduceCost = Callable[[float, int, float, float], float]
"""(bytes, ranks, bytes a second, seconds a message) -> seconds."""


def parameter_server(num_bytes: float, ranks: int, bandwidth: float, latency: float) -> float:
    """One server beside the ranks: it takes all their gradients in through one port while it sends weights out:
    n |W| / BW, linear in the ranks (FireCaffe sec. 5). Paleo (Qi et al. 2017) has it among them and both ways one after
    the other, 2 (n - 1) |W| / BW (`root_rank_server`)."""
    return ranks * (num_bytes / bandwidth + latency) if ranks > 1 else 0.0


def root_rank_server(num_bytes: float, ranks: int, bandwidth: float, latency: float) -> float:
    """One of the ranks is the server, as in `phalanx.train.grad_sync.algorithms`: it takes the others'
    gradients in, then sends them the sum, 2 (n - 1) |W| / BW (Paleo's). Of many buckets on CPUs half of that: one is
    sent while another comes in."""
    return 2 * (ranks - 1) * (num_bytes / bandwidth + latency)


def sharded_parameter_server(num_bytes: float, ranks: int, bandwidth: float, latency: float) -> float:
    """Every rank serves an equal part of the weights (Li et al. 2014, OSDI): 2 (n - 1)/n |W| / BW, all ports busy both
    ways; n - 1 messages leave each port each time."""
    return 2 * (ranks - 1) / ranks * num_bytes / bandwidth + 2 * (ranks - 1) * latency


def binomial_tree(num_bytes: float, ranks: int, bandwidth: float, latency: float) -> float:
    """Binomial tree of whole messages: up to one rank, then down again, 2 log2(n) (|W| / BW + latency), FireCaffe's
    choice (sec. 5.2; as its formula has it, without rounding log2 up). That of one message: of many buckets some go up
    while others come down."""
    return 2 * math.log2(ranks) * (num_bytes / bandwidth + latency)


def recursive_halving_doubling(num_bytes: float, ranks: int, bandwidth: float, latency: float) -> float:
    """Recursive halving, then doubling (Rabenseifner 2004; Thakur et al. 2005): 2 (n - 1)/n |W| / BW and 2 log2(n)
    messages. Numbers that are no power of two first fold the surplus onto others, and in the end back: Thakur's
    |W| / BW each way on top."""
    if ranks <= 1:
        return 0.0
    power = 1 << (ranks.bit_length() - 1)
    fold_s = 0.0 if power == ranks else 2 * (num_bytes / bandwidth + latency)
    return fold_s + 2 * (power - 1) / power * num_bytes / bandwidth + 2 * math.log2(power) * latency


def ring(num_bytes: float, ranks: int, bandwidth: float, latency: float) -> float:
    """Ring reduce-scatter and all-gather (Patarasuk and Yuan 2009): 2 (n - 1) pieces of |W| / n, which is the least
    traffic there can be, at 2 (n - 1) messages."""
    return 2 * (ranks - 1) * (num_bytes / ranks / bandwidth + latency)


def recursive_doubling(num_bytes: float, ranks: int, bandwidth: float, latency: float) -> float:
    """Recursive doubling with whole messages: log2(n) (|W| / BW + latency), for small messages (Thakur et al. 2005)."""
    return math.ceil(math.log2(ranks)) * (num_bytes / bandwidth + latency)


def hierarchical(
    num_bytes: float,
    num_nodes: int,
    ranks_per_node: int,
    intra_node_link: tuple[float, float],
    inter_node_link: tuple[float, float],
    inter_node_algorithm: AllReduceCost = ring,
) -> float:
    """Inside each node first (Goyal et al. 2017, sec. 4; NCCL's trees and rings over nodes do as well): reduce-scatter
    among its `ranks_per_node` devices, exchange `way` among nodes, all-gather inside. `intra_node_link` and
    `inter_node_link` are (bytes a second,
    seconds a message), `intra_node_link` of one device, `inter_node_link` of one whole node: its devices share its
    ports."""
    intra_node_s = ring(
        num_bytes, ranks_per_node, *intra_node_link
    )  # reduce-scatter and all-gather together are one ring all-reduce
    return intra_node_s + inter_node_algorithm(num_bytes, num_nodes, *inter_node_link)


def flat_hierarchical(num_bytes: float, ranks: int, bandwidth: float, latency: float) -> float:
    """`hierarchical` with every rank on a node of its own, which makes it a ring."""
    return hierarchical(num_bytes, ranks, 1, (bandwidth, latency), (bandwidth, latency))


def bf16_allreduce(num_bytes: float, ranks: int, bandwidth: float, latency: float) -> float:
    """Gradients that are fp32, in bf16 on the wire: parts to those that add them, and sums back."""
    return sharded_parameter_server(num_bytes / 2, ranks, bandwidth, latency)


def int8_allreduce(num_bytes: float, ranks: int, bandwidth: float, latency: float) -> float:
    """fp32 gradients as 8 bits with an fp32 scale for each 256 of them, in the two steps of a sharded server."""
    return sharded_parameter_server(num_bytes * INT8_WIRE_RATIO, ranks, bandwidth, latency)


def powersgd_allreduce(
    num_bytes: float, ranks: int, bandwidth: float, latency: float, wire_ratio: float = 1.0
) -> float:
    """Gradients as thin matrices that take `wire_ratio` of their bytes, in two all-reduces, one after the other (Vogels
    et al. 2019)."""
    return ring(num_bytes * wire_ratio, ranks, bandwidth, latency) + ring(0.0, ranks, bandwidth, latency)


def local_sgd(
    num_bytes: float, ranks: int, bandwidth: float, latency: float, sync_every: int, algorithm: AllReduceCost = ring
) -> float:
    """A step's share of an exchange every so many steps, of weights that are as large as gradients (Stich 2019; DiLoCo,
    Douillard et al. 2023): way / H. Nothing hides it. The small message in which all agree on a step is not counted, as
    with the other ways."""
    return algorithm(num_bytes, ranks, bandwidth, latency) / sync_every


COST_BY_ALGORITHM: dict[str, AllReduceCost] = {
    "all-reduce": ring,  # what the libraries do with large messages
    "bf16": bf16_allreduce,
    "int8": int8_allreduce,
    "powersgd": powersgd_allreduce,  # for matrices that are no smaller as thin ones
    "ring": ring,
    "binomial-tree": binomial_tree,
    "recursive-halving": recursive_halving_doubling,
    "parameter-server": root_rank_server,
    "sharded-parameter-server": sharded_parameter_server,
    "hierarchical": flat_hierarchical,
    "parameter_server": parameter_server,
    "butterfly": recursive_doubling,
}
"""By the names that recipes give them (`phalanx.train.grad_sync.bucketed_reducer`), and two that are only predicted."""


@dataclass(frozen=True)
class DataParallelStep:
    """One step of data parallelism, in seconds."""

    compute_s: float
    grad_sync_s: float
    """Of all gradients, whether anyone waits for it or not."""
    exposed_s: float
    """The part of the exchange during which nothing is computed."""

    @property
    def step_s(self) -> float:
        """From one step to the next."""
        return self.compute_s + self.exposed_s


def overlap_step(compute_s: float, grad_sync_s: float, overlappable_s: float = 0.0) -> DataParallelStep:
    """A step that computes for `compute_s` seconds on every device and exchanges for `grad_sync_s`, of which up to
    `overlappable_s` seconds run beside computing, as they may from the first gradient on; FireCaffe hid none."""
    return DataParallelStep(compute_s, grad_sync_s, max(0.0, grad_sync_s - overlappable_s))


def speedup(step: DataParallelStep, batch: float, single_device_s: float, single_device_batch: float) -> float:
    """Samples a second of a `step` over `batch` samples, over those of one device that takes `single_device_s` seconds
    for `single_device_batch`. Both batches matter: a device is slower on few samples at once."""
    return (batch / step.step_s) / (single_device_batch / single_device_s)
