"""From a row of a table of published data-parallel training of convolutional networks to what is to be predicted.

Columns are those of shared/validation/published_cnn_runs.csv; any may be absent or empty. What a row leaves out is
assumed, and `Run.assumed` says so; nothing here knows a row by its figures.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from phalanx.cluster import catalogue
from phalanx.cluster.description import Accelerator, Node, Precision
from phalanx.errors import RecipeError
from planner_validation.cells import CannotPredict, Row
from planner_validation.convnets import Convnet, Stack, card, convnet, has_tensor_cores

T = TypeVar("T")
USUAL_BATCH: Mapping[bool, int] = {True: 256, False: 64}
"""Images of one device where a table gives no batch: with tensor cores, and without."""
OTHERWISE = (
    ("alexnet", "caffe", "AlexNet grouped"),
    ("alexnet", "mxnet", "AlexNet wide"),
    ("googlenet", "caffe", "GoogLeNet with auxiliary heads"),
)
"""Networks that software trains in another form than their name says: (name, software, form)."""
INSIDE, OUTSIDE = 0.5, 0.6
"""Share of a link's rate that exchanges reach inside a node and between nodes, where nothing is known: V100s in a DGX-1
reach 0.15 (2 of them) to 0.9 (8) of NVLink; Paleo takes 0.56 of Titan's network, Primus 0.7 of InfiniBand."""
GEMINI = 2.9
"""GB/s that FireCaffe's reduction tree reached over Titan's network, of 8.3 on paper: fits the paper's five speed-ups,
as 2.7 to 3.1 do."""


@dataclass(frozen=True)
class Network:
    """What devices exchange over. Bytes a second that exchanges reach, seconds a message."""

    a_node: int
    inner: tuple[float, float]
    """Of one device to its neighbours."""
    outer: tuple[float, float]
    """Of one node to others."""
    cores: int | None = None


@dataclass(frozen=True)
class Run:
    """What a row says about one run."""

    net: Convnet
    device: Accelerator
    precision: Precision
    stack: Stack
    devices: int
    batch: float
    """Of all devices together."""
    way: str
    """Name of the exchange in `exchanges`."""
    network: Network
    overlaps: bool
    """Whether gradients travel while others are still computed."""
    decodes: bool
    """Whether real images were decoded by the host."""
    epochs: float | None
    baseline_epochs: float | None
    assumed: str = ""


def read_run(row: Row) -> Run:
    """What a row says. CannotPredict: something that cannot be assumed is missing or unknown."""
    text = everything(row)
    net = network_of(row.get("model", ""), text)
    name = row.get("gpu", "").strip()
    device = card(name) if name and name.casefold() != "cpu" else None
    devices = number(row.get("n_gpus"))
    if net is None:
        raise CannotPredict(f"unknown network {row.get('model', '')!r}")
    if device is None:
        raise CannotPredict(f"unknown device {name!r}" if name else "no device given")
    if devices is None or devices < 1:
        raise CannotPredict(f"n_gpus={row.get('n_gpus', '')!r} is no number of devices")
    precision = precision_of(row, device)
    batch, assumed = number(row.get("global_batch")), ""
    if batch is None:
        batch = devices * USUAL_BATCH[has_tensor_cores(device) and precision != "fp32"]
        assumed = f"global_batch={batch:g}"
    whole = int(devices)
    return Run(
        net,
        device,
        precision,
        stack_of(text),
        whole,
        batch,
        way_of(row.get("comm_scheme", "")),
        network_between(row, device, whole),
        overlaps=re.search(r"caffe|paleo", text) is None,
        decodes="real" in row.get("dataset", "").casefold(),
        epochs=number(row.get("epochs")),
        baseline_epochs=number(row.get("baseline_epochs")),
        assumed=assumed,
    )


def everything(row: Row) -> str:
    """All that a row says about its software, in small letters."""
    return " ".join(row.get(key, "") for key in ("source", "model", "comm_scheme", "note", "precision")).casefold()


def number(text: str | None) -> float | None:
    """A positive number, or None."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def network_of(name: str, text: str) -> Convnet | None:
    """The network that a table calls so; words in brackets are not part of a name unless they make one. `text`: what
    else the row says, for software has its own variants."""
    bare = re.sub(r"\(.*?\)", " ", name).strip()
    for called, software, own in OTHERWISE:
        if bare.casefold() == called and software in text:
            return convnet(own)
    if re.fullmatch(r"(resnet|rn)-?\d+", bare.casefold()) and "v1.5" in text:
        return convnet(f"{bare} v1.5")
    return convnet(name) or convnet(bare)


def precision_of(row: Row, device: Accelerator) -> Precision:
    """The precision that a row names, else fp32, except where nobody used that: TPUs have only bf16, MLPerf's
    submissions ran mixed precision wherever there are tensor cores, and tf32 is the default where there is any."""
    text = everything(row)
    if "fp32" not in device.tflops:
        return "bf16"
    if not has_tensor_cores(device):
        return "fp16" if re.search(r"\bfp16\b|half precision", text) else "fp32"
    if re.search(r"\b(amp|fp16|mixed|half|mlperf)\b", text):
        return "fp16"
    if re.search(r"\bbf16\b", text):
        return "bf16" if "bf16" in device.tflops else "fp16"
    if re.search(r"\bfp32\b", text) or "tf32" not in device.tflops:
        return "fp32"
    return "tf32"


def stack_of(text: str) -> Stack:
    """Who convolved, by what a row says. Caffe in published tables is that of 2014 to 2016."""
    if "native" in text:
        return "native"
    return "cudnn4" if re.search(r"cudnn[ -]?(r|v)?[1-4]\b|caffe", text) else "cudnn5"


def way_of(text: str) -> str:
    """The exchange that a row names; ring where it names none, or only its library."""
    said = text.casefold()
    for match, way in (
        (r"parameter.?server|\bps\b", "parameter_server"),
        (r"halving|doubling", "recursive-halving"),
        (r"tree", "binomial-tree"),
        (r"butterfly", "butterfly"),
    ):
        if re.search(match, said):
            return way
    return "ring"


def network_between(row: Row, device: Accelerator, devices: int) -> Network:
    """What devices exchanged over: the node that `interconnect` names, else the usual one of such devices, then any
    link or rate that it names as well. Ethernet of 10 Gb/s and PCIe 3 where nobody knows."""
    said = row.get("interconnect", "")
    node = _named_node(said, row.get("gpu", "")) or _usual_node(device.name)
    inside, outside, latency = catalogue.link("PCIe 3").gbps, catalogue.link("Ethernet 10").gbps, (1e-6, 5e-6)
    count, cores = 8, None
    if node is not None:
        count, cores = node.count, node.cores
        if node.scale_up is not None:
            inside = node.scale_up.gbps
            # a torus or switch that joins more devices than a node has is one network for all of them
            count = max(count, min(devices, node.scale_up.domain))
        if node.scale_out is not None:
            outside = node.scale_out.gbps * node.scale_out.ports
    for found in _named_links(said):
        if found.kind is not None:
            inside = found.gbps
        else:
            outside = found.gbps
    if node is not None and node.scale_out is not None and node.scale_out.link == "Gemini":
        outside = GEMINI / OUTSIDE
    bits = re.search(r"([\d.]+)\s*(Gb/s|Gbit|Gbps|GbE)", said)
    if bits:
        outside = float(bits[1]) / 8
    told = re.search(r"(\d+)\s?x\s?[A-Z]\w*\d|(?:servers|nodes) x ?(\d+)|(\d+) \w+ (?:per|a) node", said)
    told = told or re.search(r"(?:servers|nodes) x ?(\d+)", row.get("note", ""))
    if told:
        count = int(next(group for group in told.groups() if group))
    return Network(count, (inside * INSIDE * 1e9, latency[0]), (outside * OUTSIDE * 1e9, latency[1]), cores)


def _phrases(text: str) -> list[str]:
    words = re.findall(r"[\w.+-]+", text)
    return [" ".join(words[at : at + size]) for size in (3, 2, 1) for at in range(len(words) - size + 1)]


@cache
def _named_node(text: str, device: str) -> Node | None:
    for phrase in _phrases(text):
        found = _named(catalogue.node, f"{phrase} {device}") or _named(catalogue.node, phrase)
        if found is not None:
            return found
    return None


@cache
def _named_links(text: str) -> tuple[catalogue.Link, ...]:
    found = (_named(catalogue.link, phrase) for phrase in _phrases(text))
    return tuple(one for one in found if one is not None)


@cache
def _usual_node(name: str) -> Node | None:
    nodes = (catalogue.node(name) for name in catalogue.names("nodes"))
    return next((node for node in nodes if node.accelerator.name == name), None)


def _named(look_up: Callable[[str], T], name: str) -> T | None:
    try:
        return look_up(name)
    except RecipeError:
        return None
