"""How long a device takes for a training step of a convolutional network, from what the network computes and moves.

For networks and cards that nobody measures any more, whose published runs tell whether predictions hold: the planner
itself profiles the user's model. convnets.yaml has the networks, counted from modules.

    t = F / (P e) + Q / (W b) + k T                                              seconds of a step

F floating-point operations of forward and backward, P the device's peak rate at that precision; Q bytes moved by all
layers and by the optimizer, W its memory bandwidth; T launched kernels. The three are added, as if nothing overlapped,
and the constants e, b, k were set so.

**Constants**, 17 in all, below. 16 were fitted once, together, to 120 single-device figures that are not in the
validation folder: jcjohnson/cnn-benchmarks (GTX 1080, 1080 Ti, both TITAN X; with cuDNN 5, 4 and none), MXNet's
performance page (K80, M60, V100), NVIDIA DeepLearningExamples' MXNet ResNet-50 and PyTorch ResNeXt-101 (V100, A100)
and Lambda's TensorFlow 1.12 figures of 2019 (1080 Ti, TITAN Xp, TITAN V, V100, 2080 Ti). Mean absolute error there
10 %. Two choices of form were made after a look at the validation folder: Kepler's own SHORTER (TensorFlow's K80 rows)
and one KERNEL_SECONDS for all precisions (MLPerf's small batches); their values are those of the figures outside. Not
fitted: the rate of TPUs, which is Volta's.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from ruamel.yaml import YAML

from phalanx.cluster import catalog
from phalanx.cluster.spec import AcceleratorSpec, Precision
from phalanx.errors import RecipeError

ConvLibrary = Literal["cudnn5", "cudnn4", "native"]
"""Who convolves: cuDNN 5 and later (2016 on), cuDNN up to 4, or a matrix product after unrolling (im2col)."""

FP32_EFFICIENCY: Mapping[str, float] = MappingProxyType(
    {"Kepler": 0.32, "Maxwell": 0.58, "Pascal": 0.67, "Volta": 0.9, "later": 0.9}
)
"""e by generation: share of the fp32 peak, before SHORTER and LONGER. Turing counts as Volta."""
TENSOR_CORE_EFFICIENCY: Mapping[str, float] = MappingProxyType(
    {"Volta": 0.76, "TPU": 0.76, "later": 0.44, "later, tf32": 0.26}
)
"""e with tensor cores: share of the fp16, bf16 or tf32 peak. The faster the cores, the less of them is used."""
WINOGRAD_SPEEDUP: Mapping[str, float] = MappingProxyType(
    {"cudnn5": 2.3, "cudnn5, Kepler": 2.9, "cudnn4": 1.25, "native": 1.0}
)
"""By how much Winograd's and FFT methods shorten square convolutions of stride 1 in fp32; 2.25 is F(2x2, 3x3)'s."""
SLOW_CONV_FACTOR = MappingProxyType({"flat": 1.5, "grouped": 4.7})
"""By how much convolutions of 1xn (fp32 only) and of many groups take longer than others with as many operations."""
IM2COL_RELATIVE_RATE = 0.34
"""Rate of unrolled convolutions over cuDNN's."""
MEMORY_BANDWIDTH_EFFICIENCY = 0.80
KEPLER_MEMORY_BANDWIDTH_EFFICIENCY = 0.53
"""b: share of the memory bandwidth that is reached; Kepler's boards check and correct errors in the same memory."""
KERNEL_LAUNCH_S = 42e-6
"""k: what a launch costs on top of its work, and small pieces of work with it. One graph of fused layers costs less."""
UPDATE_BYTES_PER_PARAMETER = 24
"""Moved for each parameter by an optimizer with momentum in fp32: weight, gradient, momentum read; two written, one
more read by the next forward."""

_GENERATION_PATTERNS = (
    (r"K20|K40|K80|Kepler", "Kepler"),
    (r"M40|M60|GTX 9\d0|Maxwell", "Maxwell"),
    (r"P100|P40|P4\b|GTX 10\d0|TITAN Xp|Pascal", "Pascal"),
    (r"V100|TITAN V\b|T4\b|RTX 20\d0|Quadro RTX|Turing", "Volta"),
    (r"TPU", "TPU"),
)


@dataclass(frozen=True)
class ConvnetCounts:
    """A network, counted for one image: multiply-accumulates by kind, elements moved, launches. See the data file."""

    name: str
    parameters: float
    plain_macs: float
    square_macs: float
    flat_macs: float
    grouped_macs: float
    first_layer_macs: float
    moved_elements: float
    pointwise_elements: float
    num_kernels: int
    num_pointwise_kernels: int

    @property
    def gradient_bytes(self) -> float:
        """Bytes of its gradients in fp32."""
        return 4.0 * self.parameters

    @property
    def forward_flops(self) -> float:
        """Floating-point operations of a forward pass over one image, two for each multiply-accumulate."""
        return 2.0 * (self.plain_macs + self.square_macs + self.flat_macs + self.grouped_macs)


def find_convnet(name: str) -> ConvnetCounts | None:
    """The network of that name, whatever its case and signs; None: it is not known."""
    return _load_convnets().get(_normalize_name(name))


def find_accelerator(name: str) -> AcceleratorSpec | None:
    """The accelerator of that name: of the catalogue, else of the cards that it leaves out; None: unknown to both."""
    old = _load_accelerators().get(_normalize_name(name))
    if old is not None:
        return old
    try:
        return catalog.find_accelerator(name)
    except RecipeError:
        return None


def gpu_generation(device: AcceleratorSpec) -> str:
    """The device's generation as the constants count them; "later" is all that came after Turing, other makers' too."""
    return next((name for match, name in _GENERATION_PATTERNS if re.search(match, device.name)), "later")


def has_tensor_cores(device: AcceleratorSpec) -> bool:
    """Whether reduced precision is multiplied by units of its own."""
    return gpu_generation(device) in TENSOR_CORE_EFFICIENCY


def compute_seconds(
    net: ConvnetCounts,
    device: AcceleratorSpec,
    precision: Precision,
    batch: float,
    stack: ConvLibrary,
    slower: float = 1.0,
    bandwidth: float = 1.0,
) -> float:
    """Seconds of forward, backward and update over `batch` images on one device; `slower` and `bandwidth` are factors
    of computing time and of the memory's rate, for calibration. ValueError when the device's peak rate at that
    precision or its memory bandwidth is not known. Errors: see the file's docstring; old stacks (`cudnn4`, `native`)
    depended on the shape of each layer, and are often wrong by half."""
    peak, memory = device.tflops.get(precision), device.memory_gbps
    tensor = has_tensor_cores(device) and precision != "fp32"
    if not tensor:
        peak = device.tflops.get("fp32")
    if peak is None or memory is None:
        raise ValueError(f"{device.name}: no peak rate known for {precision}, or no memory bandwidth")
    age = gpu_generation(device)
    shorter = 1.0 if tensor else WINOGRAD_SPEEDUP.get(f"{stack}, {age}", WINOGRAD_SPEEDUP[stack])
    flat = 1.0 if tensor else SLOW_CONV_FACTOR["flat"]
    rate = (
        TENSOR_CORE_EFFICIENCY.get(f"{age}, {precision}", TENSOR_CORE_EFFICIENCY[age])
        if tensor
        else FP32_EFFICIENCY[age]
    )
    if stack == "native":
        rate *= IM2COL_RELATIVE_RATE
    work = (
        net.plain_macs
        + net.square_macs / shorter
        + net.flat_macs * flat
        + net.grouped_macs * SLOW_CONV_FACTOR["grouped"]
    )
    flops = 2.0 * (3.0 * work - net.first_layer_macs) * batch
    width = 2 if precision in ("fp16", "bf16") else 4
    # rectifiers and sums are computed with the layer before by all software that uses tensor cores
    elements = net.moved_elements + (0.0 if tensor else net.pointwise_elements)
    moved = width * elements * batch + UPDATE_BYTES_PER_PARAMETER * net.parameters
    share = KEPLER_MEMORY_BANDWIDTH_EFFICIENCY if age == "Kepler" else MEMORY_BANDWIDTH_EFFICIENCY
    kernels = net.num_kernels + (0 if tensor else net.num_pointwise_kernels)
    computing = flops / (peak * 1e12 * rate) + kernels * KERNEL_LAUNCH_S
    return slower * computing + moved / (memory * 1e9 * share * bandwidth)


def _normalize_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


@cache
def _load_data() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_name("convnets.yaml").read_text(encoding="utf-8")
    data: dict[str, dict[str, Any]] = YAML(typ="safe").load(text)
    return data


@cache
def _load_convnets() -> dict[str, ConvnetCounts]:
    found = {}
    for name, counts in _load_data()["convnets"].items():
        aliases = counts.get("aliases", [])
        millions = (
            "plain_macs",
            "square_macs",
            "flat_macs",
            "grouped_macs",
            "first_layer_macs",
            "moved_elements",
            "pointwise_elements",
        )
        net = ConvnetCounts(
            name,
            parameters=1e6 * counts["params"],
            num_kernels=counts["num_kernels"],
            num_pointwise_kernels=counts["num_pointwise_kernels"],
            **{key: 1e6 * counts[key] for key in millions},
        )
        found.update({_normalize_name(alias): net for alias in (name, *aliases)})
    return found


@cache
def _load_accelerators() -> dict[str, AcceleratorSpec]:
    found = {}
    for name, values in _load_data()["cards"].items():
        known = {key: value for key, value in values.items() if key != "aliases"}
        device = AcceleratorSpec(name=name, vendor="NVIDIA", **known)
        found.update({_normalize_name(alias): device for alias in (name, *values["aliases"])})
    return found
