"""Schema of a cluster: data-sheet values and measurements. `load.py` fills in values from the catalogue,
`calibration/` measures, and the planner predicts with both.

Units: TFLOP/s dense; GB/s = 1e9 bytes per second in one direction for one device or port; GiB of memory; us; watts. An
unknown figure is None, never a guess: code that needs one states its default.
"""

from types import NoneType
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from phalanx.recipe.field_types import NUMBER_NOT_BOOL, Count

Precision = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8"]
Figure = Annotated[float, Field(gt=0), NUMBER_NOT_BOOL]
Measure = Annotated[float, Field(ge=0), NUMBER_NOT_BOOL]
Ratio = Annotated[float, Field(ge=1), NUMBER_NOT_BOOL]


class StrictModel(BaseModel):
    """Base of all models: immutable, unknown keys are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false for a number: Python takes them for 1 and 0."""
        if isinstance(value, bool) and info.field_name is not None:
            annotation = cls.model_fields[info.field_name].annotation
            if {annotation, *get_args(annotation)} <= {int, float, NoneType, int | None, float | None}:
                raise PydanticCustomError("number", "expected a number")
        return value


class MatmulCurve(StrictModel):
    """Model of the time of a matrix product: t = t0 + ((F / (P e))^q + (B / (W b))^q)^(1/q), with F = 2 m n k FLOPs, B
    bytes of operands and result, and the data-sheet peaks P (compute) and W (memory)."""

    efficiency: Figure
    """e: share of the peak rate that large products reach."""
    bandwidth: Figure
    """b: share of the memory bandwidth that thin products reach."""
    overhead_us: Measure
    """t0: overhead of any product."""
    sharpness: Annotated[float, Field(gt=0, allow_inf_nan=True), NUMBER_NOT_BOOL] = 1.4
    """q: 1 adds both times, infinity takes the larger."""


class AcceleratorSpec(StrictModel):
    """One device: a GPU, a TPU chip, or all cores of a CPU."""

    name: str
    vendor: str = ""
    generation: str = ""
    """Generation of the architecture (ampere, hopper, cdna3, tpu); determines the efficiency in training."""
    tflops: dict[Precision, Figure]
    """Peak rate of dense matrix products by precision."""
    memory_gib: Figure
    memory_gbps: Figure | None = None
    """Bandwidth of its memory."""
    host_gbps: Figure | None = None
    """Bandwidth of its link to the host, in one direction."""
    power_w: Figure | None = None
    """Maximum power."""
    idle_w: Figure | None = None
    achieved_tflops: dict[Precision, Figure] = Field(default_factory=dict)
    """Best measured rate of matrix products by precision: an upper bound of the typical rate."""
    curves: dict[Precision, MatmulCurve] = Field(default_factory=dict)
    """Models fitted to many measured products, by precision."""
    kernel_us: Figure | None = None
    """Time of a small kernel from one launch to the next."""


class ScaleUpNetwork(StrictModel):
    """The fast network between neighboring devices: NVLink, xGMI, ICI, PCIe."""

    link: str
    gbps: Figure
    """GB/s of one device into the network, in one direction, over all its links."""
    domain: Count
    """Devices that it connects; may be more than a node has (NVL72)."""
    kind: Literal["switch", "mesh", "torus", "pcie"] = "switch"
    latency_us: Figure | None = None


class ScaleOutNetwork(StrictModel):
    """The network between nodes."""

    link: str
    gbps: Figure
    """GB/s of one port in one direction."""
    ports: Count = 1
    """Ports of one node."""
    latency_us: Figure | None = None


class NodeSpec(StrictModel):
    """One machine: `count` equal devices."""

    name: str = "node"
    accelerator: AcceleratorSpec
    count: Count
    scale_up: ScaleUpNetwork | None = None
    """None: devices communicate through host memory."""
    scale_out: ScaleOutNetwork | None = None
    """None: there is only one node."""
    host_memory_gib: Figure | None = None
    cores: Count | None = None
    power_w: Figure | None = None
    """Maximum power of the whole node."""
    idle_w: Figure | None = None


class NetworkTopology(StrictModel):
    """How nodes are connected. `oversubscription`: bandwidth of the leaves over that of the upper levels."""

    kind: Literal["fat-tree", "rail", "torus", "dragonfly", "single"] = "fat-tree"
    oversubscription: Ratio = 1.0
    nodes_a_leaf: Count | None = None
    """Nodes below one leaf switch; traffic between them is not oversubscribed."""


class StorageSpec(StrictModel):
    """Storage of data and checkpoints; rates of the whole cluster and of one node."""

    name: str = "storage"
    read_gbps: Figure | None = None
    write_gbps: Figure | None = None
    node_read_gbps: Figure | None = None
    node_write_gbps: Figure | None = None
    write_requests_usd: Figure | None = None
    read_requests_usd: Figure | None = None
    """Price of 1,000 requests to a store."""
    egress_usd: Figure | None = None
    """Price of a GB that leaves the region of a store."""


class LocationSpeed(StrictModel):
    """Speed of a path or URL, as one node measured it. `latencies_s`: median and 99th percentile, of `fsync` and
    `rename` of a small file, of `PUT` and `GET` of a small object. `files_per_s` are created, listed and deleted."""

    location: str
    read_gbps: Figure | None = None
    write_gbps: Figure | None = None
    files_per_s: Figure | None = None
    latencies_s: dict[str, tuple[Measure, Measure]] = Field(default_factory=dict)


class Prices(StrictModel):
    """Prices in one currency."""

    currency: str = "USD"
    device_hour: Figure | None = None
    kwh: Figure | None = None
    pue: Ratio = 1.2
    """Power usage effectiveness: power of the building over power of the machines."""
    carbon_g_per_kwh: Figure | None = None
    """Grams of CO2 equivalents for each kWh from the grid."""


class Reliability(StrictModel):
    """Failure rate of nodes, and duration of a restart."""

    failures_per_1000_node_days: Figure | None = None
    restart_s: Figure | None = None


class GemmTiming(StrictModel):
    """Time of one matrix product [m, k] x [k, n], measured over many."""

    precision: Precision
    m: Count
    n: Count
    k: Count
    seconds: Figure
    layout: Literal["nn", "nt", "tn"] = "nn"
    """Which operand is transposed in memory: "nt" the second, as in a linear layer's forward; "nn" none, as in the
    gradient of its input; "tn" the first, as in the gradient of its weight."""
    processes: Count = 1
    """Processes that did the same at once and shared the cores of a CPU: each had `threads / processes` of them."""


class OpTiming(StrictModel):
    """Time of one operation of a kind: `bytes` that it reads and writes, `flops` if it computes.
    `calibration/memory_ops.py` lists the kinds."""

    kind: str
    precision: Precision
    bytes: Figure
    flops: Measure = 0.0
    seconds: Figure
    shape: tuple[Count, ...] = ()
    processes: Count = 1
    """Concurrent processes, as in `GemmTiming`."""


class CollectiveTiming(StrictModel):
    """Time of one collective. `bytes` and `busbw_gbps` are defined as in nccl-tests: bytes of the whole buffer."""

    kind: Literal["all_reduce"]
    backend: str
    ranks: Count
    bytes: Count
    seconds: Figure
    busbw_gbps: Figure
    right: bool = True
    """Whether the result was correct."""


class Measurements(StrictModel):
    """Measurements of `phalanx calibrate`, valid only for the hardware, driver and library versions of `key`."""

    when: str
    key: dict[str, str]
    """Hardware, driver, library versions."""
    threads: Count | None = None
    """CPU threads of the process that measured."""
    drift: Measure = 0.0
    """Share by which the slowest reference product took longer than the fastest."""
    busy_cores: Measure = 0.0
    """Cores that other processes used before the measurements. From 0.3 on `auto` does not use the file."""
    products: list[GemmTiming] = Field(default_factory=list)
    operations: list[OpTiming] = Field(default_factory=list)
    launch_us: Figure | None = None
    collectives: list[CollectiveTiming] = Field(default_factory=list)
    storage: StorageSpec | None = None
    locations: list[LocationSpeed] = Field(default_factory=list)
    """What a recipe names."""
    odd: list[str] = Field(default_factory=list)
    """Anomalies, a sentence each."""


class Cluster(StrictModel):
    """A cluster of `nodes` equal nodes."""

    name: str
    nodes: Count
    node: NodeSpec
    topology: NetworkTopology = NetworkTopology()
    storage: StorageSpec = StorageSpec()
    prices: Prices = Prices()
    reliability: Reliability = Reliability()
    measured: Measurements | None = None
    notes: dict[str, Any] = Field(default_factory=dict)
    """Other information, such as discovered cards, disks and links; predictions do not use it."""

    @property
    def devices(self) -> int:
        """Number of accelerators."""
        return self.nodes * self.node.count

    @property
    def domain(self) -> int:
        """Number of devices that one scale-up network connects; 1 without such a network."""
        return min(self.node.scale_up.domain, self.devices) if self.node.scale_up else 1
