"""Figures that cannot be: what is wrong with a cluster though each value is of its type. Often a unit was mistaken."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from phalanx.cluster.description import Accelerator, Cluster
from phalanx.recipe.text import Key

MOST: dict[str, tuple[float, str]] = {
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
    "restart_seconds": (1e6, "seconds"),
}
"""More than this, whatever comes in the next years, is another unit: about a hundred times what any entry of the
catalogue has, and what its unit is meant to be."""
SMALLEST = 1e-9
LEAST = {"efficiency": 1e-4, "bandwidth": 1e-4, "sharpness": 0.1}
"""Less than this no figure is, whatever its unit; curves bend no less than this."""
ABOVE_PEAK = 1.1
"""Fits of efficiency and measurements may exceed the data sheet by this factor: clocks above the nominal one."""
NEEDS_A_NETWORK = "missing, expected the network that joins the nodes; the network among neighbours does not reach all"


def problems(cluster: Cluster) -> Iterator[tuple[Key, str]]:
    """Each impossible figure: its key, and what is wrong with it."""
    for name in ("node", "storage", "prices", "reliability"):
        yield from _too_small(getattr(cluster, name), (name,))
        yield from _too_large(getattr(cluster, name), (name,))
    yield from _accelerator(cluster.node.accelerator, ("node", "accelerator"))
    yield from _links(cluster)
    if cluster.node.idle_w and cluster.node.power_w and cluster.node.idle_w > cluster.node.power_w:
        yield ("node", "idle_w"), f"found {cluster.node.idle_w:g}, expected at most power_w ({cluster.node.power_w:g})"
    if cluster.nodes > 1 and cluster.node.scale_out is None and cluster.domain < cluster.devices:
        yield ("node", "scale_out"), NEEDS_A_NETWORK


def _too_small(part: BaseModel, key: Key) -> Iterator[tuple[Key, str]]:
    for name in type(part).model_fields:
        value: Any = getattr(part, name)
        parts = value.items() if isinstance(value, dict) else [(None, value)]
        for below, each in parts:
            where = (*key, name) if below is None else (*key, name, below)
            if isinstance(each, BaseModel):
                yield from _too_small(each, where)
            elif isinstance(each, float) and 0 < each < LEAST.get(name, SMALLEST):
                yield where, f"found {each:g}, expected at least {LEAST.get(name, SMALLEST):g}"


def _too_large(part: BaseModel, key: Key) -> Iterator[tuple[Key, str]]:
    for name in type(part).model_fields:
        value: Any = getattr(part, name)
        if isinstance(value, BaseModel):
            yield from _too_large(value, (*key, name))
        elif name in MOST:
            figures = value.items() if isinstance(value, dict) else [(None, value)]
            for below, figure in figures:
                most, unit = MOST[name]
                if figure is not None and figure > most:
                    where = (*key, name) if below is None else (*key, name, below)
                    yield where, f"found {figure:g}, which no hardware has; the unit is {unit}"


def _accelerator(device: Accelerator, key: Key) -> Iterator[tuple[Key, str]]:
    for precision, rate in device.achieved_tflops.items():
        peak = device.tflops.get(precision)
        if peak is not None and rate > ABOVE_PEAK * peak:
            where = (*key, "achieved_tflops", precision)
            yield where, f"found {rate:g}, expected at most the peak rate (tflops, {peak:g})"
    for precision, curve in device.curves.items():
        if curve.overhead_us > MOST["kernel_us"][0]:
            yield (*key, "curves", precision, "overhead_us"), f"found {curve.overhead_us:g}, which no hardware has"
        for name in ("efficiency", "bandwidth"):
            share = getattr(curve, name)
            if share > ABOVE_PEAK:
                yield (*key, "curves", precision, name), f"found {share:g}, expected a share of the peak, 1 at most"
        if precision not in device.tflops:
            yield (*key, "curves", precision), "expected a peak rate (tflops) of this precision, of which it is a share"
    if device.idle_w and device.power_w and device.idle_w > device.power_w:
        yield (*key, "idle_w"), f"found {device.idle_w:g}, expected at most power_w ({device.power_w:g})"
    if device.memory_gbps and device.host_gbps and device.host_gbps > device.memory_gbps:
        yield (*key, "host_gbps"), _above_memory(device.host_gbps, device.memory_gbps)


def _links(cluster: Cluster) -> Iterator[tuple[Key, str]]:
    memory = cluster.node.accelerator.memory_gbps
    for name in ("scale_up", "scale_out"):
        network = getattr(cluster.node, name)
        if memory and network and network.gbps > memory:
            yield ("node", name, "gbps"), _above_memory(network.gbps, memory)


def _above_memory(link: float, memory: float) -> str:
    return f"found {link:g}, more than the device's own memory gives (memory_gbps, {memory:g})"
