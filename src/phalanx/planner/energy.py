"""What a run draws, uses and costs: power of devices and nodes by load, kWh at the building, device-hours and money.

Closed forms over a cluster's values; nothing is measured here. Power in watts, energy in kWh, times in seconds,
loads as shares of 1.
"""

from dataclasses import dataclass

from phalanx.cluster.spec import AcceleratorSpec, Cluster, NodeSpec, Prices

IDLE_POWER_SHARE = 0.2
"""Idle over highest draw where no idle figure is known: H100 0.13, MI250X 0.18, A100 0.22, V100 0.25."""
NON_ACCELERATOR_POWER_SHARE = 0.4
"""Processors, memory, fans and losses of a node over the highest draw of its devices, where the node's own figure is
not known. Wide: Frontier's nodes 0.22 (RAPS), GB200 NVL72 0.53, DGX B200 0.79, DGX H100 0.82, the latter two figures
for choosing fuses rather than draws."""


@dataclass(frozen=True)
class RunEnergy:
    """What a run uses, in kWh: its nodes, and the building with the nodes."""

    node_kwh: float
    site_kwh: float
    node_w: float
    """Mean draw of one node."""


def _interpolate_power(idle_power: float, max_power: float, load: float) -> float:
    return idle_power + min(1.0, max(0.0, load)) * (max_power - idle_power)


def device_power(accelerator: AcceleratorSpec, load: float) -> float | None:
    """Watts of one device at a load of 0 to 1 (clipped): idle + load x (most - idle). None when the device's highest
    draw is not known.

    Linear, as in RAPS and after Fan, Weber and Barroso 2007. "Load" is no share of time: a busy device that waits for
    its memory draws less than one that multiplies matrices.
    """
    max_power_w = accelerator.power_w
    if max_power_w is None:
        return None
    idle = IDLE_POWER_SHARE * max_power_w if accelerator.idle_w is None else accelerator.idle_w
    return _interpolate_power(min(idle, max_power_w), max_power_w, load)


def node_power(node: NodeSpec, load: float) -> float | None:
    """Watts of one node at this load of its devices and of the rest. None when the draw of the devices is not known.

    The rest is what the node's own figures leave after the devices; without such figures it is
    NON_ACCELERATOR_POWER_SHARE of the devices' maximum, and half of that when idle.
    """
    accelerator_w, accelerator_max_w = device_power(node.accelerator, load), node.accelerator.power_w
    if accelerator_w is None or accelerator_max_w is None:
        return None
    accelerators_idle_w = node.count * (device_power(node.accelerator, 0.0) or 0.0)
    other_max_w = (
        NON_ACCELERATOR_POWER_SHARE * node.count * accelerator_max_w
        if node.power_w is None
        else max(0.0, node.power_w - node.count * accelerator_max_w)
    )
    other_idle_w = other_max_w / 2 if node.idle_w is None else max(0.0, node.idle_w - accelerators_idle_w)
    return node.count * accelerator_w + _interpolate_power(min(other_idle_w, other_max_w), other_max_w, load)


def predict_run_energy(cluster: Cluster, seconds: float, nodes: int, load: float) -> RunEnergy | None:
    """Predict the energy of a run of `seconds` on `nodes` nodes at a load of 0 to 1, with the cluster's PUE. None when
    the draw of the devices is unknown. Switches, storage and spare nodes are left out."""
    node = node_power(cluster.node, load)
    if node is None:
        return None
    hours = nodes * seconds / 3600.0
    node_kwh = node * hours / 1000.0
    return RunEnergy(node_kwh, node_kwh * cluster.prices.pue, node)


@dataclass(frozen=True)
class RunCost:
    """What a run takes. Money is in the currency of the prices; None where a price is not known."""

    wall_s: float
    """Wall time in seconds."""
    device_hours: float
    rent_cost: float | None
    """Device-hours times their price."""
    energy_cost: float | None
    """kWh at the building times their price. Rented devices usually have it in their rent: the two are not added."""


def estimate_run_cost(wall_s: float, num_devices: int, prices: Prices, energy: RunEnergy | None) -> RunCost:
    """Price a run of `wall_s` seconds on `num_devices` devices that uses `energy`."""
    hours = num_devices * wall_s / 3600.0
    rent = None if prices.device_hour is None else hours * prices.device_hour
    energy_cost = None if prices.kwh is None or energy is None else energy.site_kwh * prices.kwh
    return RunCost(wall_s, hours, rent, energy_cost)
