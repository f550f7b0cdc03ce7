"""Schema of a cluster: data-sheet values and measurements. `load.py` fills in values from the catalogue,
`calibration/` measures, and the planner predicts with both.

Units: TFLOP/s dense; GB/s = 1e9 bytes per second in one direction for one device or port; GiB of memory; us; watts. An
unknown figure is None, never a guess: code that needs one states its default.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from phalanx.recipe.schema import NUMBER_NOT_BOOL

Precision = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8"]
MOST_NODES = 1_000_000
MAX_FIGURE = 1e18
"""Of any figure, so that products of several are numbers; `plausibility.py` has what hardware may have."""
Figure = Annotated[float, Field(gt=0, le=MAX_FIGURE), NUMBER_NOT_BOOL]
Measure = Annotated[float, Field(ge=0, le=MAX_FIGURE), NUMBER_NOT_BOOL]
Ratio = Annotated[float, Field(ge=1, le=1e6), NUMBER_NOT_BOOL]
Count = Annotated[int, Field(gt=0, le=10**15), NUMBER_NOT_BOOL]


class StrictModel(BaseModel):
    """Base of every part: immutable, unknown keys refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class MatmulCurve(StrictModel):
    """How fast matrices are really multiplied: t = t0 + ((F / (P e))^q + (B / (W b))^q)^(1/q), F = 2 m n k operations,
    B bytes of operands and result, P and W the peak rates of the data sheet."""

    efficiency: Figure
    """e: share of the peak rate that large products reach."""
    bandwidth: Figure
    """b: share of the memory bandwidth that thin products reach."""
    overhead_us: Measure
    """t0: what a product costs however small it is."""
    sharpness: Annotated[float, Field(gt=0, allow_inf_nan=True), NUMBER_NOT_BOOL] = 1.4
    """q: 1 adds both times, infinity takes the larger."""


class AcceleratorSpec(StrictModel):
    """One device that computes: a GPU, a TPU chip, or all cores of a CPU."""

    name: str
    vendor: str = ""
    generation: str = ""
    """Of its architecture (ampere, hopper, cdna3, tpu): what its efficiency in training goes by."""
    tflops: dict[Precision, Figure]
    """Peak rate of dense matrix products by precision."""
    memory_gib: Figure
    memory_gbps: Figure | None = None
    """Bandwidth of its memory."""
    host_gbps: Figure | None = None
    """Of its link to the host, one way."""
    power_w: Figure | None = None
    """The most that it draws."""
    idle_w: Figure | None = None
    achieved_tflops: dict[Precision, Figure] = Field(default_factory=dict)
    """Best rate of matrix products that anyone measured, by precision: an upper bound of what is typical."""
    curves: dict[Precision, MatmulCurve] = Field(default_factory=dict)
    """Fitted to many measured products."""
    kernel_us: Figure | None = None
    """What a small kernel takes from one launch to the next."""


class ScaleUpNetwork(StrictModel):
    """The fast network among neighbours: NVLink, xGMI, ICI, PCIe."""

    link: str
    gbps: Figure
    """Of one device into the network, one way, all its links together."""
    domain: Count
    """Devices that it joins; may be more than a node has (NVL72)."""
    kind: Literal["switch", "mesh", "torus", "pcie"] = "switch"
    latency_us: Figure | None = None


class ScaleOutNetwork(StrictModel):
    """The network between nodes."""

    link: str
    gbps: Figure
    """Of one port, one way."""
    ports: Count = 1
    """Of one node."""
    latency_us: Figure | None = None


class NodeSpec(StrictModel):
    """One machine: `count` equal devices."""

    name: str = "node"
    accelerator: AcceleratorSpec
    count: Count
    scale_up: ScaleUpNetwork | None = None
    """None: devices meet through the host's memory."""
    scale_out: ScaleOutNetwork | None = None
    """None: there is only one node."""
    host_memory_gib: Figure | None = None
    cores: Count | None = None
    power_w: Figure | None = None
    """The most that the whole node draws."""
    idle_w: Figure | None = None


class NetworkTopology(StrictModel):
    """How nodes hang together. `oversubscription`: what the leaves could send, over what the upper levels carry."""

    kind: Literal["fat-tree", "rail", "torus", "dragonfly", "single"] = "fat-tree"
    oversubscription: Ratio = 1.0
    nodes_a_leaf: Count | None = None
    """Nodes below one leaf switch, which oversubscription spares."""


class StorageSpec(StrictModel):
    """Where data and checkpoints lie; rates of the whole cluster and of one node."""

    name: str = "storage"
    read_gbps: Figure | None = None
    write_gbps: Figure | None = None
    node_read_gbps: Figure | None = None
    node_write_gbps: Figure | None = None


class Prices(StrictModel):
    """What things cost, in one currency."""

    currency: str = "USD"
    device_hour: Figure | None = None
    kwh: Figure | None = None
    pue: Ratio = 1.2
    """Power of the building over power of the machines."""
    power_cap_w: Figure | None = None
    """Limit that is set on each device."""


class Reliability(StrictModel):
    """How often nodes fail, and how long a start takes."""

    failures_per_1000_node_days: Figure | None = None
    restart_seconds: Figure | None = None


class GemmTiming(StrictModel):
    """One measured matrix product [m, k] x [k, n], and what it took. The clock ran over many."""

    precision: Precision
    m: Count
    n: Count
    k: Count
    seconds: Figure
    layout: Literal["nn", "nt", "tn"] = "nn"
    """Which operand lies transposed in memory: "nt" the second, as in a linear layer's forward; "nn" none, as in the
    gradient of its input; "tn" the first, as in the gradient of its weight."""
    processes: Count = 1
    """How many did the same at once, sharing the cores of a CPU: each had `threads / processes` of them."""


class OpTiming(StrictModel):
    """One measured operation of a named kind: `bytes` that it moved (read and written), `flops` where it computes.
    `calibration/memory_ops.py` lists the kinds."""

    kind: str
    precision: Precision
    bytes: Figure
    flops: Measure = 0.0
    seconds: Figure
    shape: tuple[Count, ...] = ()
    processes: Count = 1
    """As of a product."""


class CollectiveTiming(StrictModel):
    """One measured collective. `bytes` as nccl-tests count them: of the whole buffer; `busbw_gbps` by their rules."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
    backend: str
    ranks: Count
    nodes: Count = 1
    bytes: Count
    seconds: Figure
    busbw_gbps: Figure
    algorithm: str | None = None
    right: bool = True
    """Whether the result was what it must be."""


class OverlapSlowdown(StrictModel):
    """What computing and communicating cost each other when both run at once: times over the times alone."""

    compute: Figure
    communication: Figure


class Measurements(StrictModel):
    """What `phalanx calibrate` measured, and where: valid for that hardware, driver and those libraries only."""

    when: str
    key: dict[str, str]
    """Hardware, driver, library versions."""
    threads: Count | None = None
    """CPU threads of the process that measured."""
    drift: Measure = 0.0
    """By what share the slowest of the reference products, timed now and then, was slower than the fastest."""
    products: list[GemmTiming] = Field(default_factory=list)
    operations: list[OpTiming] = Field(default_factory=list)
    launch_us: Figure | None = None
    collectives: list[CollectiveTiming] = Field(default_factory=list)
    overlap: OverlapSlowdown | None = None
    storage: StorageSpec | None = None
    checkpoint_gbps: Figure | None = None
    """Of a checkpoint in Phalanx's own format, written and fsynced."""
    odd: list[str] = Field(default_factory=list)
    """What looks wrong, in words."""


class Cluster(StrictModel):
    """All of it: `nodes` equal nodes."""

    name: str
    nodes: Annotated[int, Field(gt=0, le=MOST_NODES), NUMBER_NOT_BOOL]
    node: NodeSpec
    topology: NetworkTopology = NetworkTopology()
    storage: StorageSpec = StorageSpec()
    prices: Prices = Prices()
    reliability: Reliability = Reliability()
    measured: Measurements | None = None
    notes: dict[str, Any] = Field(default_factory=dict)
    """Anything else worth knowing: discovered cards, disks, links; never read by predictions."""

    @property
    def devices(self) -> int:
        """Number of accelerators."""
        return self.nodes * self.node.count

    @property
    def domain(self) -> int:
        """How many of them one network among neighbours really joins; 1 without such a network."""
        return min(self.node.scale_up.domain, self.devices) if self.node.scale_up else 1
