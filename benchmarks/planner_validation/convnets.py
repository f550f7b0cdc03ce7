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

from phalanx.cluster import catalogue
from phalanx.cluster.description import Accelerator, Precision
from phalanx.errors import RecipeError

Stack = Literal["cudnn5", "cudnn4", "native"]
"""Who convolves: cuDNN 5 and later (2016 on), cuDNN up to 4, or a matrix product after unrolling (im2col)."""

FP32_RATE: Mapping[str, float] = MappingProxyType(
    {"Kepler": 0.32, "Maxwell": 0.58, "Pascal": 0.67, "Volta": 0.9, "later": 0.9}
)
"""e by generation: share of the fp32 peak, before SHORTER and LONGER. Turing counts as Volta."""
TENSOR_RATE: Mapping[str, float] = MappingProxyType({"Volta": 0.76, "TPU": 0.76, "later": 0.44, "later, tf32": 0.26})
"""e with tensor cores: share of the fp16, bf16 or tf32 peak. The faster the cores, the less of them is used."""
SHORTER: Mapping[str, float] = MappingProxyType({"cudnn5": 2.3, "cudnn5, Kepler": 2.9, "cudnn4": 1.25, "native": 1.0})
"""By how much Winograd's and FFT methods shorten square convolutions of stride 1 in fp32; 2.25 is F(2x2, 3x3)'s."""
LONGER = MappingProxyType({"flat": 1.5, "grouped": 4.7})
"""By how much convolutions of 1xn (fp32 only) and of many groups take longer than others with as many operations."""
NATIVE_RATE = 0.34
"""Rate of unrolled convolutions over cuDNN's."""
MEMORY_SHARE = 0.80
KEPLER_MEMORY_SHARE = 0.53
"""b: share of the memory bandwidth that is reached; Kepler's boards check and correct errors in the same memory."""
KERNEL_SECONDS = 42e-6
"""k: what a launch costs on top of its work, and small pieces of work with it. One graph of fused layers costs less."""
UPDATE_BYTES = 24
"""Moved for each parameter by an optimizer with momentum in fp32: weight, gradient, momentum read; two written, one
more read by the next forward."""

_GENERATIONS = (
    (r"K20|K40|K80|Kepler", "Kepler"),
    (r"M40|M60|GTX 9\d0|Maxwell", "Maxwell"),
    (r"P100|P40|P4\b|GTX 10\d0|TITAN Xp|Pascal", "Pascal"),
    (r"V100|TITAN V\b|T4\b|RTX 20\d0|Quadro RTX|Turing", "Volta"),
    (r"TPU", "TPU"),
)


@dataclass(frozen=True)
class Convnet:
    """A network, counted for one image: multiply-accumulates by kind, elements moved, launches. See the data file."""

    name: str
    parameters: float
    plain: float
    square: float
    flat: float
    grouped: float
    first: float
    moved: float
    pointwise: float
    kernels: int
    pointwise_kernels: int

    @property
    def gradient_bytes(self) -> float:
        """Bytes of its gradients in fp32."""
        return 4.0 * self.parameters

    @property
    def forward_flops(self) -> float:
        """Floating-point operations of a forward pass over one image, two for each multiply-accumulate."""
        return 2.0 * (self.plain + self.square + self.flat + self.grouped)


def convnet(name: str) -> Convnet | None:
    """The network of that name, whatever its case and signs; None: it is not known."""
    return _networks().get(_plain(name))


def card(name: str) -> Accelerator | None:
    """The accelerator of that name: of the catalogue, else of the cards that it leaves out; None: unknown to both."""
    old = _cards().get(_plain(name))
    if old is not None:
        return old
    try:
        return catalogue.accelerator(name)
    except RecipeError:
        return None


def generation(device: Accelerator) -> str:
    """The device's generation as the constants count them; "later" is all that came after Turing, other makers' too."""
    return next((name for match, name in _GENERATIONS if re.search(match, device.name)), "later")


def has_tensor_cores(device: Accelerator) -> bool:
    """Whether reduced precision is multiplied by units of its own."""
    return generation(device) in TENSOR_RATE


def compute_seconds(
    net: Convnet,
    device: Accelerator,
    precision: Precision,
    batch: float,
    stack: Stack,
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
    age = generation(device)
    shorter = 1.0 if tensor else SHORTER.get(f"{stack}, {age}", SHORTER[stack])
    flat = 1.0 if tensor else LONGER["flat"]
    rate = TENSOR_RATE.get(f"{age}, {precision}", TENSOR_RATE[age]) if tensor else FP32_RATE[age]
    if stack == "native":
        rate *= NATIVE_RATE
    work = net.plain + net.square / shorter + net.flat * flat + net.grouped * LONGER["grouped"]
    flops = 2.0 * (3.0 * work - net.first) * batch
    width = 2 if precision in ("fp16", "bf16") else 4
    # rectifiers and sums are computed with the layer before by all software that uses tensor cores
    elements = net.moved + (0.0 if tensor else net.pointwise)
    moved = width * elements * batch + UPDATE_BYTES * net.parameters
    share = KEPLER_MEMORY_SHARE if age == "Kepler" else MEMORY_SHARE
    kernels = net.kernels + (0 if tensor else net.pointwise_kernels)
    computing = flops / (peak * 1e12 * rate) + kernels * KERNEL_SECONDS
    return slower * computing + moved / (memory * 1e9 * share * bandwidth)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


@cache
def _data() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    data: dict[str, dict[str, Any]] = YAML(typ="safe").load(text)
    return data


@cache
def _networks() -> dict[str, Convnet]:
    found = {}
    for name, counts in _data()["convnets"].items():
        aliases = counts.get("aliases", [])
        millions = ("plain", "square", "flat", "grouped", "first", "moved", "pointwise")
        net = Convnet(
            name,
            parameters=1e6 * counts["params"],
            kernels=counts["kernels"],
            pointwise_kernels=counts["pointwise_kernels"],
            **{key: 1e6 * counts[key] for key in millions},
        )
        found.update({_plain(alias): net for alias in (name, *aliases)})
    return found


@cache
def _cards() -> dict[str, Accelerator]:
    found = {}
    for name, values in _data()["cards"].items():
        known = {key: value for key, value in values.items() if key != "aliases"}
        device = Accelerator(name=name, vendor="NVIDIA", **known)
        found.update({_plain(alias): device for alias in (name, *values["aliases"])})
    return found
