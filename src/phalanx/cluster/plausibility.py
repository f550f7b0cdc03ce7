"""Find impossible figures of a cluster that has valid types. The cause is often a wrong unit."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from phalanx.cluster.spec import AcceleratorSpec, Cluster
from phalanx.recipe.yaml_loader import KeyPath

MAX_VALUE_BY_FIELD: dict[str, tuple[float, str]] = {
    "tflops": (2e6, "TFLOP/s of one device"),
    "achieved_tflops": (2e6, "TFLOP/s of one device"),
    "memory_gib": (1e5, "GiB of one device"),
    "host_memory_gib": (1e6, "GiB of one node"),
    "memory_gbps": (1e6, "GB/s of one device"),
    "host_gbps": (1e5, "GB/s one way"),
    "gbps": (1e5, "GB/s one way"),
    "latency_us": (1e6, "microseconds"),
    "kernel_us": (1e6, "microseconds"),
    "power_w": (1e6, "watts"),
    "idle_w": (1e6, "watts"),
    "count": (1e4, "devices of one node"),
    "ports": (1e4, "ports of one node"),
    "cores": (1e5, "cores of one node"),
    "failures_per_1000_node_days": (1e6, "failures of 1,000 nodes in a day"),
    "restart_s": (1e6, "seconds"),
}
"""More than this, whatever comes in the next years, is another unit: about a hundred times what any entry of the
catalogue has, and what its unit is meant to be."""
MIN_FIGURE = 1e-9
MIN_FIGURE_BY_FIELD = {"efficiency": 1e-4, "bandwidth": 1e-4, "sharpness": 0.1}
"""Less than this no figure is, whatever its unit; curves bend no less than this."""
MAX_SHARE_OF_PEAK = 1.1
"""Fits of efficiency and measurements may exceed the data sheet by this factor: clocks above the nominal one."""
NO_SCALE_OUT_TEXT = (
    "missing, expected the network that joins the nodes; the network among neighbours does not reach all"
)


def find_implausible_values(cluster: Cluster) -> Iterator[tuple[KeyPath, str]]:
    """Yield each impossible figure: its key, and the problem."""
    for name in ("node", "storage", "prices", "reliability"):
        yield from _too_small(getattr(cluster, name), (name,))
        yield from _check_maxima(getattr(cluster, name), (name,))
    yield from _check_accelerator(cluster.node.accelerator, ("node", "accelerator"))
    yield from _check_networks(cluster)
    if cluster.node.idle_w and cluster.node.power_w and cluster.node.idle_w > cluster.node.power_w:
        yield ("node", "idle_w"), f"found {cluster.node.idle_w:g}, expected at most power_w ({cluster.node.power_w:g})"
    if cluster.nodes > 1 and cluster.node.scale_out is None and cluster.domain < cluster.devices:
        yield ("node", "scale_out"), NO_SCALE_OUT_TEXT


def _too_small(part: BaseModel, key: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    for name in type(part).model_fields:
        value: Any = getattr(part, name)
        parts = value.items() if isinstance(value, dict) else [(None, value)]
        for below, each in parts:
            where = (*key, name) if below is None else (*key, name, below)
            if isinstance(each, BaseModel):
                yield from _too_small(each, where)
            elif isinstance(each, float) and 0 < each < MIN_FIGURE_BY_FIELD.get(name, MIN_FIGURE):
                yield where, f"found {each:g}, expected at least {MIN_FIGURE_BY_FIELD.get(name, MIN_FIGURE):g}"


def _check_maxima(part: BaseModel, key: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    for name in type(part).model_fields:
        value: Any = getattr(part, name)
        if isinstance(value, BaseModel):
            yield from _check_maxima(value, (*key, name))
        elif name in MAX_VALUE_BY_FIELD:
            figures = value.items() if isinstance(value, dict) else [(None, value)]
            for sub_key, figure in figures:
                maximum, unit = MAX_VALUE_BY_FIELD[name]
                if figure is not None and figure > maximum:
                    full_key = (*key, name) if sub_key is None else (*key, name, sub_key)
                    yield full_key, f"found {figure:g}, which no hardware has; the unit is {unit}"


def _check_accelerator(accelerator: AcceleratorSpec, key: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    for precision, rate in accelerator.achieved_tflops.items():
        peak = accelerator.tflops.get(precision)
        if peak is not None and rate > MAX_SHARE_OF_PEAK * peak:
            full_key = (*key, "achieved_tflops", precision)
            yield full_key, f"found {rate:g}, expected at most the peak rate (tflops, {peak:g})"
    for precision, curve in accelerator.curves.items():
        if curve.overhead_us > MAX_VALUE_BY_FIELD["kernel_us"][0]:
            yield (*key, "curves", precision, "overhead_us"), f"found {curve.overhead_us:g}, which no hardware has"
        for name in ("efficiency", "bandwidth"):
            fraction = getattr(curve, name)
            if fraction > MAX_SHARE_OF_PEAK:
                yield (*key, "curves", precision, name), f"found {fraction:g}, expected a share of the peak, 1 at most"
        if precision not in accelerator.tflops:
            yield (*key, "curves", precision), "expected a peak rate (tflops) of this precision, of which it is a share"
    if accelerator.idle_w and accelerator.power_w and accelerator.idle_w > accelerator.power_w:
        yield (*key, "idle_w"), f"found {accelerator.idle_w:g}, expected at most power_w ({accelerator.power_w:g})"
    if accelerator.memory_gbps and accelerator.host_gbps and accelerator.host_gbps > accelerator.memory_gbps:
        yield (*key, "host_gbps"), _explain_above_memory(accelerator.host_gbps, accelerator.memory_gbps)


def _check_networks(cluster: Cluster) -> Iterator[tuple[KeyPath, str]]:
    memory = cluster.node.accelerator.memory_gbps
    for name in ("scale_up", "scale_out"):
        network = getattr(cluster.node, name)
        if memory and network and network.gbps > memory:
            yield ("node", name, "gbps"), _explain_above_memory(network.gbps, memory)


def _explain_above_memory(link: float, memory: float) -> str:
    return f"found {link:g}, more than the device's own memory gives (memory_gbps, {memory:g})"
