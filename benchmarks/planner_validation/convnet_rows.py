"""From a row of a table of published data-parallel training of convolutional networks to what is to be predicted.

Columns are those of shared/validation/published_cnn_runs.csv; any may be absent or empty. What a row leaves out is
assumed, and `ConvnetRun.assumption` says so; nothing here knows a row by its figures.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from phalanx.cluster import catalog
from phalanx.cluster.catalog import get_entry, list_entries
from phalanx.cluster.spec import AcceleratorSpec, NodeSpec, Precision
from phalanx.errors import RecipeError
from planner_validation.cells import CannotPredict, Row
from planner_validation.convnet_costs import (
    ConvLibrary,
    ConvnetCounts,
    find_accelerator,
    find_convnet,
    has_tensor_cores,
)

ItemT = TypeVar("ItemT")
USUAL_BATCH: Mapping[bool, int] = {True: 256, False: 64}
"""Images of one device where a table gives no batch: with tensor cores, and without."""
FORM_BY_SOFTWARE = (
    ("alexnet", "caffe", "AlexNet grouped"),
    ("alexnet", "mxnet", "AlexNet wide"),
    ("googlenet", "caffe", "GoogLeNet with auxiliary heads"),
)
"""Networks that software trains in another form than their name says: (name, software, form)."""
INTRA_NODE_LINK_EFFICIENCY, INTER_NODE_LINK_EFFICIENCY = 0.5, 0.6
"""Share of a link's rate that exchanges reach inside a node and between nodes, where nothing is known: V100s in a DGX-1
reach 0.15 (2 of them) to 0.9 (8) of NVLink; Paleo takes 0.56 of Titan's network, Primus 0.7 of InfiniBand."""
GEMINI_GB_PER_S = 2.9
"""GB/s that FireCaffe's reduction tree reached over Titan's network, of 8.3 on paper: fits the paper's five speed-ups,
as 2.7 to 3.1 do."""


@dataclass(frozen=True)
class DeviceNetwork:
    """What devices exchange over. Bytes a second that exchanges reach, seconds a message."""

    devices_per_node: int
    intra_node_link: tuple[float, float]
    """Of one device to its neighbours."""
    inter_node_link: tuple[float, float]
    """Of one node to others."""
    cores_per_node: int | None = None


@dataclass(frozen=True)
class ConvnetRun:
    """What a row says about one run."""

    convnet: ConvnetCounts
    device: AcceleratorSpec
    precision: Precision
    stack: ConvLibrary
    devices: int
    batch: float
    """Of all devices together."""
    algorithm: str
    """Name of the exchange in `exchanges`."""
    network: DeviceNetwork
    overlaps_communication: bool
    """Whether gradients travel while others are still computed."""
    decodes_images: bool
    """Whether real images were decoded by the host."""
    epochs: float | None
    baseline_epochs: float | None
    assumption: str = ""


def parse_run(row: Row) -> ConvnetRun:
    """What a row says. CannotPredict: something that cannot be assumed is missing or unknown."""
    text = joined_text(row)
    net = convnet_of_row(row.get("model", ""), text)
    name = row.get("gpu", "").strip()
    device = find_accelerator(name) if name and name.casefold() != "cpu" else None
    devices = parse_positive(row.get("n_gpus"))
    if net is None:
        raise CannotPredict(f"unknown network {row.get('model', '')!r}")
    if device is None:
        raise CannotPredict(f"unknown device {name!r}" if name else "no device given")
    if devices is None or devices < 1:
        raise CannotPredict(f"n_gpus={row.get('n_gpus', '')!r} is no number of devices")
    precision = find_precision(row, device)
    batch, assumed = parse_positive(row.get("global_batch")), ""
    if batch is None:
        batch = devices * USUAL_BATCH[has_tensor_cores(device) and precision != "fp32"]
        assumed = f"global_batch={batch:g}"
    whole = int(devices)
    return ConvnetRun(
        net,
        device,
        precision,
        find_conv_library(text),
        whole,
        batch,
        find_algorithm(row.get("comm_scheme", "")),
        find_network(row, device, whole),
        overlaps_communication=re.search(r"caffe|paleo", text) is None,
        decodes_images="real" in row.get("dataset", "").casefold(),
        epochs=parse_positive(row.get("epochs")),
        baseline_epochs=parse_positive(row.get("baseline_epochs")),
        assumption=assumed,
    )


def joined_text(row: Row) -> str:
    """All that a row says about its software, in small letters."""
    return " ".join(row.get(key, "") for key in ("source", "model", "comm_scheme", "note", "precision")).casefold()


def parse_positive(text: str | None) -> float | None:
    """A positive number, or None."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def convnet_of_row(name: str, text: str) -> ConvnetCounts | None:
    """The network that a table calls so; words in brackets are not part of a name unless they make one. `text`: what
    else the row says, for software has its own variants."""
    bare = re.sub(r"\(.*?\)", " ", name).strip()
    for called, software, own in FORM_BY_SOFTWARE:
        if bare.casefold() == called and software in text:
            return find_convnet(own)
    if re.fullmatch(r"(resnet|rn)-?\d+", bare.casefold()) and "v1.5" in text:
        return find_convnet(f"{bare} v1.5")
    return find_convnet(name) or find_convnet(bare)


def find_precision(row: Row, device: AcceleratorSpec) -> Precision:
    """The precision that a row names, else fp32, except where nobody used that: TPUs have only bf16, MLPerf's
    submissions ran mixed precision wherever there are tensor cores, and tf32 is the default where there is any."""
    text = joined_text(row)
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


def find_conv_library(text: str) -> ConvLibrary:
    """Who convolved, by what a row says. Caffe in published tables is that of 2014 to 2016."""
    if "native" in text:
        return "native"
    return "cudnn4" if re.search(r"cudnn[ -]?(r|v)?[1-4]\b|caffe", text) else "cudnn5"


def find_algorithm(text: str) -> str:
    """The exchange that a row names; ring where it names none, or only its library."""
    said = text.casefold()
    for match, algorithm in (
        (r"parameter.?server|\bps\b", "parameter_server"),
        (r"halving|doubling", "recursive-halving"),
        (r"tree", "binomial-tree"),
        (r"butterfly", "butterfly"),
    ):
        if re.search(match, said):
            return algorithm
    return "ring"


def find_network(row: Row, device: AcceleratorSpec, devices: int) -> DeviceNetwork:
    """What devices exchanged over: the node that `interconnect` names, else the usual one of such devices, then any
    link or rate that it names as well. Ethernet of 10 Gb/s and PCIe 3 where nobody knows."""
    said = row.get("interconnect", "")
    node = _find_node(said, row.get("gpu", "")) or _default_node(device.name)
    inside, outside, latency = find_link("PCIe 3").gbps, find_link("Ethernet 10").gbps, (1e-6, 5e-6)
    count, cores = 8, None
    if node is not None:
        count, cores = node.count, node.cores
        if node.scale_up is not None:
            inside = node.scale_up.gbps
            # a torus or switch that joins more devices than a node has is one network for all of them
            count = max(count, min(devices, node.scale_up.domain))
        if node.scale_out is not None:
            outside = node.scale_out.gbps * node.scale_out.ports
    for found in _find_links(said):
        if found.kind is not None:
            inside = found.gbps
        else:
            outside = found.gbps
    if node is not None and node.scale_out is not None and node.scale_out.link == "Gemini":
        outside = GEMINI_GB_PER_S / INTER_NODE_LINK_EFFICIENCY
    bits = re.search(r"([\d.]+)\s*(Gb/s|Gbit|Gbps|GbE)", said)
    if bits:
        outside = float(bits[1]) / 8
    devices_match = re.search(r"(\d+)\s?x\s?[A-Z]\w*\d|(?:servers|nodes) x ?(\d+)|(\d+) \w+ (?:per|a) node", said)
    devices_match = devices_match or re.search(r"(?:servers|nodes) x ?(\d+)", row.get("note", ""))
    if devices_match:
        count = int(next(group for group in devices_match.groups() if group))
    return DeviceNetwork(
        count,
        (inside * INTRA_NODE_LINK_EFFICIENCY * 1e9, latency[0]),
        (outside * INTER_NODE_LINK_EFFICIENCY * 1e9, latency[1]),
        cores,
    )


def _word_groups(text: str) -> list[str]:
    words = re.findall(r"[\w.+-]+", text)
    return [" ".join(words[at : at + size]) for size in (3, 2, 1) for at in range(len(words) - size + 1)]


@cache
def _find_node(text: str, device: str) -> NodeSpec | None:
    for phrase in _word_groups(text):
        found = _look_up_or_none(catalog.find_node, f"{phrase} {device}") or _look_up_or_none(catalog.find_node, phrase)
        if found is not None:
            return found
    return None


@cache
@dataclass(frozen=True)
class LinkKind:
    """A kind of link: GB/s one way, latency of the smallest message, kind of network within a node."""

    name: str
    gbps: float
    latency_us: float | None = None
    kind: str | None = None


def find_link(name: str) -> LinkKind:
    """Return the link of this name in the catalog. Raises RecipeError if there is none."""
    entry = get_entry("links", name)
    return LinkKind(entry.name, **entry.values)


def _find_links(text: str) -> tuple[LinkKind, ...]:
    found = (_look_up_or_none(find_link, phrase) for phrase in _word_groups(text))
    return tuple(one for one in found if one is not None)


@cache
def _default_node(name: str) -> NodeSpec | None:
    nodes = (catalog.find_node(entry.name) for entry in list_entries("nodes"))
    return next((node for node in nodes if node.accelerator.name == name), None)


def _look_up_or_none(look_up: Callable[[str], ItemT], name: str) -> ItemT | None:
    try:
        return look_up(name)
    except RecipeError:
        return None
