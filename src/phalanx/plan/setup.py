"""What is to be predicted, as one value: a model's profile, on a cluster, divided and trained in a certain way."""

from dataclasses import dataclass, field

from phalanx.cluster.description import Cluster
from phalanx.plan.profile import Product, Profile
from phalanx.recipe import Recipe
from phalanx.recipe.schema import LocalSgdConfig, Parallelism

INT8 = (1 + 4 / 256) / 4
"""Bytes of numbers in 8 bits with an fp32 scale for each 256 of them, as a share of those in fp32."""


@dataclass(frozen=True)
class Stack:
    """What a software stack is known or fitted to do. Constants of (hardware, software stack), never of a run."""

    name: str = "phalanx"
    computing: float = 1.0
    """Time of computing, as a multiple of what rates say."""
    eight: float = 1.0
    """Time of products in 8 bits or fewer, likewise, beside `computing`."""
    experts: float = 1.0
    """Time of everything in blocks with experts, likewise."""
    communicating: float = 1.0
    """Time that bytes take to travel, likewise."""
    fused: bool = True
    """Whether what is bound by memory is fused, by a compiler or by hand."""
    memory: float = 1.1
    """Speed of what is bound by memory, as a multiple of what bytes and bandwidth say: fusing saves more than
    neighbours' results."""
    flash: float = 1.0
    """Speed of its fused attention, as a multiple of what is usual on that hardware; 0 where scores are stored."""
    sequence_parallel: bool = True
    """Whether tensor ranks divide by sequence what they do not divide by width (Korthikanti et al. 2022)."""
    hidden: float = 0.94
    """Share of the communication of gradients and sharded weights that can hide behind computing at best."""
    tensor_hidden: float = 0.0
    """The same of the sums over tensor ranks."""
    latency: float = 1.0
    """Time of a collective that moves nothing, as a multiple of what links say."""
    launch: float = 8e-6
    """Seconds that the host needs for each kernel."""
    expert_launches: float = 0.0
    """Kernels that the host launches for each product of each expert that a rank has; 0 where one is for all."""
    routing: float = 0.0
    """Seconds that the host is held up when tokens travel to experts or back, which it waits for to know how many."""
    step_seconds: float = 0.005
    """What a step costs besides: reading data, agreeing on norms, launching."""
    gradient_bytes: int = 4
    """Of one element of a gradient that travels."""


@dataclass(frozen=True)
class Wire:
    """What an exchange of gradients sends, as a share of its bytes, and the bytes of memory that it takes for each
    element beside the gradient: buffers, and what it holds back."""

    share: float = 1.0
    memory: float = 0.0
    hides: bool = True
    """Whether it travels behind the backward pass."""
    keeps: bool = False
    """Whether the memory is taken by one worker alone, too."""


WIRES = {
    "bf16": Wire(2 / 4, 2.0 + 2.0 + 1.0),  # sent, received, and a part that is summed: a half of two workers
    "int8": Wire(INT8, 4.0 + 2 * 4.0 * INT8),  # held back; sent and received with a scale for 256
}
"""By compression; others send gradients as they are."""


def wire_of(recipe: Recipe, profile: Profile | None = None) -> Wire:
    """What a recipe sends in a step; of powersgd it depends on the model, of which at most all is sent."""
    if recipe.local_sgd is not None:
        return local_wire(recipe.local_sgd)
    if recipe.grad_sync.compression == "powersgd":
        share = 1.0 if profile is None else _thin_share(profile, recipe.grad_sync.powersgd_rank)
        return Wire(share, 4.0 + 4.0 * share)  # held back; sent
    return WIRES.get(recipe.grad_sync.compression, Wire())


def local_wire(local_sgd: LocalSgdConfig) -> Wire:
    """What workers send that take steps of their own: nothing but every so many steps, when they wait for it (Stich
    2019, arXiv 1805.09767; Douillard et al. 2023, arXiv 2311.08105, who call it H) or go on (2025, arXiv 2501.18512).
    They keep beside gradients the weights with which a round began, how far they moved, and the momentum of outer
    steps."""
    each = WIRES.get(local_sgd.sync_dtype, Wire())
    momentum = 4.0 if local_sgd.method == "diloco" and local_sgd.outer_optimizer.momentum else 0.0
    memory = each.memory + 4.0 + 4.0 + momentum
    return Wire(each.share / local_sgd.sync_every, memory, local_sgd.sync_delay > 0, keeps=True)


def _thin_share(profile: Profile, rank: int) -> float:
    """Of all gradients' bytes, what powersgd sends: a product's weight [n, k] travels as two matrices of so many
    columns (Vogels et al. 2019) where these are smaller; others, embeddings that are no product's weight among them,
    are taken to travel whole, and all where some weights are frozen."""
    if any(segment.weights.frozen for segment in profile.segments):
        return 1.0
    saved = 0.0
    for segment in profile.segments:
        for each in segment.of("forward"):
            if isinstance(each, Product) and each.weight:
                n, k = sorted((each.n.fixed, each.k.fixed))
                saved += segment.repeats * each.count.fixed * max(0.0, n * k - min(rank, n) * (n + k))
    return max(0.0, 1.0 - saved / profile.parameters)


@dataclass(frozen=True)
class Setup:
    """A run that is to be foretold."""

    profile: Profile
    cluster: Cluster
    layout: Parallelism
    micro: int
    batch: int
    """Samples of a step."""
    precision: str = "bf16"
    recompute: str = "none"
    """none, selective (memory-bound operations), full; or attention: only what unfused attention stores."""
    zero: int = 1
    """What data-parallel ranks divide: 0 nothing, 1 optimizer state, 2 gradients, too, 3 weights, too. Weights are
    divided over `parallelism.shard`; the rest over all replicas."""
    chunks: int = 1
    """Stages that one pipeline rank has (interleaving)."""
    stack: Stack = field(default_factory=Stack)
    optimizer: str = "adamw"
    wire: Wire = Wire()
    """How gradients travel between replicas."""

    @property
    def parts(self) -> int:
        """Groups of ranks among which the batch is divided."""
        return self.layout.replicate * self.layout.shard

    @property
    def micros(self) -> int:
        """Micro-batches of one group in a step."""
        return max(1, self.batch // (self.parts * self.micro))
