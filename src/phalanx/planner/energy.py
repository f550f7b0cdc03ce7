"""What a run draws and uses: power of devices and nodes by load, what a power cap costs in time, kWh at the building.

Closed forms over a cluster's values; nothing is measured here. Power in watts, energy in kWh, times in seconds,
loads and caps as shares of 1 where it says so.
"""

import math
import re
from dataclasses import dataclass, replace

import numpy as np

from phalanx.cluster.spec import AcceleratorSpec, Cluster, NodeSpec

TRAINING_LOAD = 0.7
"""Default load of a machine that trains: MLPerf Training v5.0 power logs of an 8-GPU H100 machine have a median of 8.0
kW between 2.9 idle and 10.2 at most. In Zeus's 180 workloads on older GPUs the median draw was 0.48 (P100) to 0.74 (RTX
6000) of the limit, and 0.13 to 0.97 over all."""
IDLE_POWER_SHARE = 0.2
"""Idle over highest draw where no idle figure is known: H100 0.13, MI250X 0.18, A100 0.22, V100 0.25."""
NON_ACCELERATOR_POWER_SHARE = 0.4
"""Processors, memory, fans and losses of a node over the highest draw of its devices, where the node's own figure is
not known. Wide: Frontier's nodes 0.22 (RAPS), GB200 NVL72 0.53, DGX B200 0.79, DGX H100 0.82, the latter two figures
for choosing fuses rather than draws."""


@dataclass(frozen=True)
class PowerCapModel:
    """How one family of accelerators slows down under a power limit, fitted to Zeus's measurements (You et al.,
    NSDI 2023): slowdown = max(1, ((U (1 + c) - P0) / (cap - P0))^(1/a)), all powers over the highest limit there is."""

    name_pattern: str
    """Regular expression for an accelerator's name."""
    limit_w: float
    """The highest limit of the card that was measured."""
    exponent: float
    floor_share: float
    """P0: what is drawn however slow the clocks are."""
    draw_offset: float
    """Margin below the cap at which a program slows down (> 0), or above it (< 0)."""
    mean_abs_error: float
    """Mean absolute error of the slow-down on workloads that were left out of the fit."""


CAP_MODELS = (
    PowerCapModel(r"V100", 250, 4.13, 0.305, 0.044, 0.041),
    PowerCapModel(r"Quadro RTX ?6000", 260, 5.78, 0.378, 0.069, 0.049),
    PowerCapModel(r"\bA40\b", 300, 1.20, 0.235, -0.165, 0.062),
    PowerCapModel(r"P100", 250, 13.2, 0.404, 0.193, 0.026),
)
_FALLBACK_CAP_MODELS = CAP_MODELS[:3]
"""What stands in for accelerators that have no model. Not the P100: at the limits that were tried it hardly slows
down, so that its constants say little."""


SWEEP_MEAN_ABS_ERROR = 0.03
"""Mean absolute error of a sweep's curve at caps between the measured ones, as docs/benchmarks/fleet.md has it."""
CAP_TOLERANCE_W = 1.0
"""Devices round caps to a watt or less."""


@dataclass(frozen=True)
class PowerCapSlowdown:
    """Time under a cap over time without, with the range it is expected in."""

    expected: float
    low: float
    high: float
    source: str
    """What it is from: a sweep of a run, measurements of the family of devices, or of others."""


@dataclass(frozen=True)
class SweptSpeeds:
    """Speeds of a run at power caps in ascending order, as a sweep measured them: shares of that at the highest cap."""

    run: str
    caps_w: tuple[float, ...]
    speeds: tuple[float, ...]

    def holds(self, cap_w: float) -> bool:
        """Whether a cap is within those that were measured."""
        return self.caps_w[0] - CAP_TOLERANCE_W <= cap_w <= self.caps_w[-1] + CAP_TOLERANCE_W


@dataclass(frozen=True)
class RunEnergy:
    """What a run uses, in kWh: all its devices, its nodes with them, and the building with the nodes."""

    accelerator_kwh: float
    node_kwh: float
    site_kwh: float
    node_w: float
    """Mean draw of one node."""


def _interpolate_power(idle_power: float, max_power: float, load: float) -> float:
    return idle_power + min(1.0, max(0.0, load)) * (max_power - idle_power)


def device_power(accelerator: AcceleratorSpec, load: float, cap_w: float | None = None) -> float | None:
    """Watts of one device at a load of 0 to 1 (clipped): idle + load x (most - idle), never above a cap. None when
    the device's highest draw is not known.

    Linear, as in RAPS, which replays Frontier's jobs (idle 88 W, most 560 W a GPU), and after Fan, Weber and Barroso
    2007; "load" is whatever makes it so, not a share of time: a busy device that waits for its memory draws less than
    one that multiplies matrices.
    """
    max_power_w = accelerator.power_w
    if max_power_w is None:
        return None
    idle = IDLE_POWER_SHARE * max_power_w if accelerator.idle_w is None else accelerator.idle_w
    power_w = _interpolate_power(min(idle, max_power_w), max_power_w, load)
    return power_w if cap_w is None else min(power_w, cap_w)


def node_power(node: NodeSpec, load: float, cap_w: float | None = None) -> float | None:
    """Watts of one node at this load of its devices and of the rest. A cap applies to each device, not to the rest.
    None when the draw of the devices is not known.

    The rest is what the node's own figures leave after the devices; without such figures it is REST_SHARE of the
    devices' maximum, and half of that when idle.
    """
    accelerator_w, accelerator_max_w = device_power(node.accelerator, load, cap_w), node.accelerator.power_w
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


def predict_cap_slowdown(accelerator: AcceleratorSpec, cap_w: float, draw_w: float) -> PowerCapSlowdown:
    """How much slower a program becomes under a cap of `cap_w` that draws `draw_w` on average without one.

    Families that Zeus measured (V100, Quadro RTX 6000, A40, P100) have their own constants, and twice the mean error
    of their fit as range, which held four of five measurements; its lower end may be below 1, since a fifth of the
    measured runs was faster under a cap than without. For any other, the three that react to caps are applied to
    shares of its own highest draw: expected is their geometric mean, low the least of them, and high what it takes
    when the rate falls with the power above idle, as if a lower clock saved no voltage. That range is wide because
    little is known: a vendor's blog has 10 to 15 % for an H100 at 600 of 700 W, where the three say 0 to 7 and the
    upper end is 20. ValueError when the highest draw is not known, or the cap is below what the device draws at its
    lowest clocks.
    """
    max_power_w = accelerator.power_w
    fitted_model = next((model for model in CAP_MODELS if re.search(model.name_pattern, accelerator.name)), None)
    if fitted_model is not None:
        limit = max_power_w or fitted_model.limit_w
        value = _evaluate_cap_model(fitted_model, cap_w / limit, draw_w / limit)
        spread = 2.0 * fitted_model.mean_abs_error
        return PowerCapSlowdown(value, value * (1.0 - spread), value * (1.0 + spread), "measured on this family")
    if max_power_w is None:
        raise ValueError(f"{accelerator.name}: needs power_w, its highest draw, to say what a cap of {cap_w:g} W does")
    slowdowns = [
        _evaluate_cap_model(model, cap_w / max_power_w, draw_w / max_power_w) for model in _FALLBACK_CAP_MODELS
    ]
    idle = IDLE_POWER_SHARE * max_power_w if accelerator.idle_w is None else accelerator.idle_w
    worst = (draw_w - idle) / (cap_w - idle)
    return PowerCapSlowdown(
        math.prod(slowdowns) ** (1.0 / len(slowdowns)),
        min(slowdowns),
        max(*slowdowns, worst),
        "estimate from other families",
    )


def predict_swept_slowdown(
    accelerator: AcceleratorSpec, cap_w: float, draw_w: float, swept: SweptSpeeds | None
) -> PowerCapSlowdown:
    """The same by what a sweep of the run has measured, with twice the mean error as range. Above its highest cap, and
    for caps outside of it, `predict_cap_slowdown` stands in."""
    if swept is None:
        return predict_cap_slowdown(accelerator, cap_w, draw_w)
    if not swept.holds(cap_w):
        found = predict_cap_slowdown(accelerator, cap_w, draw_w)
        measured = f"the sweep of {swept.run} has {swept.caps_w[0]:.0f} to {swept.caps_w[-1]:.0f} W"
        return replace(found, source=f"{found.source}; {measured}")
    top_w, value = swept.caps_w[-1], 1.0 / float(np.interp(cap_w, swept.caps_w, swept.speeds))
    is_whole = accelerator.power_w is not None and top_w >= accelerator.power_w - CAP_TOLERANCE_W
    top = PowerCapSlowdown(1.0, 1.0, 1.0, "") if is_whole else predict_cap_slowdown(accelerator, top_w, draw_w)
    spread = 2.0 * SWEEP_MEAN_ABS_ERROR
    source = f"sweep of {swept.run}" + ("" if is_whole else f" below {top_w:.0f} W, {top.source} above")
    return PowerCapSlowdown(
        top.expected * value, top.low * value * (1.0 - spread), top.high * value * (1.0 + spread), source
    )


def _evaluate_cap_model(model: PowerCapModel, cap: float, draw: float) -> float:
    if cap <= model.floor_share:
        raise ValueError(f"a cap at {cap:.0%} of the highest limit is below what it draws at the lowest clocks")
    power_share = draw * (1.0 + model.draw_offset) - model.floor_share
    slowdown: float = (max(0.0, power_share) / (cap - model.floor_share)) ** (1.0 / model.exponent)
    return max(1.0, slowdown)


def predict_run_energy(
    cluster: Cluster, seconds: float, nodes: int | None = None, load: float = TRAINING_LOAD
) -> RunEnergy | None:
    """Energy of a run of `seconds` on `nodes` of the cluster's nodes (default all) at a load of 0 to 1, with the power
    cap and the PUE of the cluster's prices. `seconds` are the seconds under the cap: see `predict_cap_slowdown`. None
    when the draw of the devices is not known. Shared switches, storage and idle spare nodes are not included."""
    cap = cluster.prices.power_cap_w
    device, node = device_power(cluster.node.accelerator, load, cap), node_power(cluster.node, load, cap)
    if device is None or node is None:
        return None
    count = cluster.nodes if nodes is None else nodes
    hours = count * seconds / 3600.0
    node_kwh = node * hours / 1000.0
    return RunEnergy(device * cluster.node.count * hours / 1000.0, node_kwh, node_kwh * cluster.prices.pue, node)
