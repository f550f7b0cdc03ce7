"""What is to be predicted, as one value: a model's profile, on a cluster, divided and trained in a certain way. Many
layouts of it are arrays, one element a layout, so that a search predicts thousands at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

import numpy as np

from phalanx.cluster.spec import Cluster
from phalanx.planner.model_profile import Gemm, ModelProfile
from phalanx.recipe import Recipe
from phalanx.recipe.schema import LocalSgdConfig, Parallelism

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
CHECKPOINTING_MODES = ("none", "selective", "full")
PIPELINE_SCHEDULES: tuple[PipelineSchedule, ...] = get_args(PipelineSchedule)
INT8_WIRE_RATIO = (1 + 4 / 256) / 4
"""Bytes of numbers in 8 bits with an fp32 scale for each 256 of them, as a share of those in fp32."""


@dataclass(frozen=True)
class SoftwareStack:
    """What a software stack is known or fitted to do. Constants of (hardware, software stack), never of a run."""

    name: str = "phalanx"
    compute_factor: float = 1.0
    """Time of computing, as a multiple of what rates say."""
    fp8_gemm_factor: float = 1.0
    """Factor on the time of products in 8 bits or fewer, in addition to `compute_factor`."""
    expert_factor: float = 1.0
    """Time of what is bound by memory in models with experts, likewise: tokens are also permuted, padded and cast."""
    comm_factor: float = 1.0
    """Time that bytes take to travel, likewise."""
    fuses_memory_ops: bool = True
    """Whether what is bound by memory is fused, by a compiler or by hand."""
    memory_op_speed: float = 1.1
    """Speed of what is bound by memory, as a multiple of what bytes and bandwidth say: fusing saves more than
    neighbours' results."""
    attention_speed: float = 1.0
    """Speed of its fused attention, as a multiple of what is usual on that hardware; 0 where scores are stored."""
    sequence_parallel: bool = True
    """Whether tensor ranks divide by sequence what they do not divide by width (Korthikanti et al. 2022)."""
    max_overlap: float = 0.94
    """Share of the communication of gradients and sharded weights that can hide behind computing at best."""
    max_tp_overlap: float = 0.0
    """The same of the sums over tensor ranks."""
    latency_factor: float = 1.0
    """Time of a collective that moves nothing, as a multiple of what links say."""
    launch_s: float = 8e-6
    """Seconds that the host needs for each kernel."""
    launches_per_expert_gemm: float = 0.0
    """Kernels that the host launches for each product of each expert that a rank has; 0 where one is for all."""
    routing_sync_s: float = 0.0
    """Seconds that the host is held up when tokens travel to experts or back, which it waits for to know how many."""
    step_overhead_s: float = 0.005
    """Other seconds of a step: reading data, agreeing on norms, launching."""
    gradient_bytes: int = 4
    """Bytes of one element of a gradient that is sent."""


@dataclass(frozen=True)
class GradientTransport:
    """What a gradient synchronization sends, as a share of the gradients' bytes, and the memory that it takes in
    addition to the gradient, in bytes an element: buffers and error feedback."""

    wire_ratio: float = 1.0
    extra_bytes_per_element: float = 0.0
    overlaps_backward: bool = True
    """Whether it travels behind the backward pass."""
    needed_by_single_replica: bool = False
    """Whether the memory is taken by one worker alone, too."""


TRANSPORT_BY_COMPRESSION = {
    # Sent, received, and a part that is summed: a half of two workers.
    "bf16": GradientTransport(2 / 4, 2.0 + 2.0 + 1.0),
    # Held back; sent and received with a scale for 256.
    "int8": GradientTransport(INT8_WIRE_RATIO, 4.0 + 2 * 4.0 * INT8_WIRE_RATIO),
}
"""Transport by compression; other values send gradients uncompressed."""


def transport_of(recipe: Recipe, profile: ModelProfile | None = None) -> GradientTransport:
    """What a recipe sends in a step; of powersgd it depends on the model, of which at most all is sent."""
    if recipe.local_sgd is not None:
        return local_wire(recipe.local_sgd)
    if recipe.grad_sync.compression == "powersgd":
        share = 1.0 if profile is None else powersgd_wire_ratio(profile, recipe.grad_sync.powersgd_rank)
        return GradientTransport(share, 4.0 + 4.0 * share)  # held back; sent
    return TRANSPORT_BY_COMPRESSION.get(recipe.grad_sync.compression, GradientTransport())


def local_wire(local_sgd: LocalSgdConfig) -> GradientTransport:
    """Traffic and memory of local SGD: workers synchronize only every `sync_every` steps. They wait for it (Stich 2019,
    arXiv 1805.09767; Douillard et al. 2023, arXiv 2311.08105, where it is called H) or overlap it with further steps
    (2025, arXiv 2501.18512). In addition to gradients they keep the weights of the last synchronization, the difference
    to them, and the momentum of the outer optimizer."""
    each = TRANSPORT_BY_COMPRESSION.get(local_sgd.sync_dtype, GradientTransport())
    momentum = 4.0 if local_sgd.method == "diloco" and local_sgd.outer_optimizer.momentum else 0.0
    memory = each.extra_bytes_per_element + 4.0 + 4.0 + momentum
    return GradientTransport(
        each.wire_ratio / local_sgd.sync_every, memory, local_sgd.sync_delay > 0, needed_by_single_replica=True
    )


def powersgd_wire_ratio(profile: ModelProfile, rank: int) -> float:
    """The share of all gradients' bytes that PowerSGD sends. The weight [n, k] of a product travels as two matrices of
    `rank` columns (Vogels et al. 2019) where these are smaller. Other weights, such as embeddings that are not the
    weight of a product, are assumed to travel whole, and so are all weights where some are frozen."""
    if any(segment.weights.frozen_count for segment in profile.segments):
        return 1.0
    saved_elements = 0.0
    for segment in profile.segments:
        for each in segment.ops_of("forward"):
            if isinstance(each, Gemm) and each.has_weight:
                n, k = sorted((each.n.fixed, each.k.fixed))
                saved_elements += segment.repeats * each.count.fixed * max(0.0, n * k - min(rank, n) * (n + k))
    return max(0.0, 1.0 - saved_elements / profile.num_parameters)


@dataclass(frozen=True)
class Scenario:
    """A run to predict."""

    profile: ModelProfile
    cluster: Cluster
    parallelism: Parallelism
    micro_size: int
    global_batch: int
    """Samples of a step."""
    precision: str = "bf16"
    checkpointing: str = "none"
    """none, selective (memory-bound operations), full; or attention: only what unfused attention stores."""
    zero_level: int = 1
    """What data-parallel ranks divide: 0 nothing, 1 optimizer state, 2 gradients, too, 3 weights, too. Weights are
    divided over `parallelism.shard`; the rest over all replicas."""
    virtual_stages: int = 1
    """Stages that one pipeline rank has (interleaving)."""
    stack: SoftwareStack = field(default_factory=SoftwareStack)
    optimizer: str = "adamw"
    transport: GradientTransport = GradientTransport()
    """How gradients travel between replicas."""

    @property
    def data_parallel(self) -> int:
        """Groups of ranks among which the batch is divided."""
        return self.parallelism.replicate * self.parallelism.shard

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one group in a step."""
        return max(1, self.global_batch // (self.data_parallel * self.micro_size))


@dataclass(frozen=True)
class Layouts:
    """What a search may choose, as integers: each field an array with one element a layout."""

    replicate: np.ndarray
    shard: np.ndarray
    tensor: np.ndarray
    pipeline: np.ndarray
    context: np.ndarray
    expert: np.ndarray
    micro_size: np.ndarray
    checkpointing: np.ndarray
    """Index into `CHECKPOINTING_MODES`."""
    schedule: np.ndarray
    """Index into `PIPELINE_SCHEDULES`."""
    virtual_stages: np.ndarray
    zero_level: np.ndarray
    """What data-parallel ranks divide; see `Scenario.zero_level`."""

    def __len__(self) -> int:
        return len(self.replicate)

    def take(self, rows: Any) -> "Layouts":
        """The layouts at `rows`: indices, a mask or a slice."""
        return Layouts(**{name: column[rows] for name, column in vars(self).items()})

    def unique_rows(self, *names: str) -> tuple[np.ndarray, np.ndarray]:
        """One row for each distinct combination of these fields, and for every layout the index of its own."""
        _, rows, inverse = np.unique(
            np.stack([getattr(self, name) for name in names]), axis=1, return_index=True, return_inverse=True
        )
        return rows, inverse.reshape(-1)


LAYOUT_FIELDS = tuple(field.name for field in fields(Layouts))
_PARALLELISM_FIELDS = ("replicate", "shard", "tensor", "pipeline", "context", "expert")


def layout_of(scenario: Scenario) -> Layouts:
    """The one layout of a scenario."""
    parallelism = scenario.parallelism
    known_mode = scenario.checkpointing in CHECKPOINTING_MODES
    values = {
        **{name: getattr(parallelism, name) for name in _PARALLELISM_FIELDS},
        "micro_size": scenario.micro_size,
        "checkpointing": CHECKPOINTING_MODES.index(scenario.checkpointing) if known_mode else 0,
        "schedule": PIPELINE_SCHEDULES.index(parallelism.pipeline_schedule),
        "virtual_stages": scenario.virtual_stages,
        "zero_level": scenario.zero_level,
    }
    return Layouts(**{name: np.array([value]) for name, value in values.items()})


def to_scenarios(base_scenario: Scenario, layouts: Layouts, rows: Sequence[int]) -> list[Scenario]:
    """The layouts at `rows` as scenarios, which have everything else from `base_scenario`."""
    scenarios = []
    for row in rows:
        value = {name: int(getattr(layouts, name)[row]) for name in LAYOUT_FIELDS}
        parallelism = Parallelism(
            **{name: value[name] for name in _PARALLELISM_FIELDS},
            pipeline_schedule=PIPELINE_SCHEDULES[value["schedule"]],
            layers_per_stage=base_scenario.parallelism.layers_per_stage,
            async_tp=base_scenario.parallelism.async_tp,
        )
        scenarios.append(
            replace(
                base_scenario,
                parallelism=parallelism,
                micro_size=value["micro_size"],
                checkpointing=CHECKPOINTING_MODES[value["checkpointing"]],
                zero_level=value["zero_level"],
                virtual_stages=value["virtual_stages"],
            )
        )
    return scenarios
