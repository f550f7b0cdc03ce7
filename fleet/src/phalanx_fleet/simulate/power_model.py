"""Power of simulated nodes: two states and an activity, and what they draw over time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx_fleet.power_tree import NodePower
from phalanx_fleet.simulate.cluster_simulation import ClusterOutcome

SAVE_ACTIVITY = 0.15
"""Power above idle of an accelerator in a blocking save, over that of training: 8 H100 draw .6 kW idle, 1.19 kW in a
save and 4.45 kW in training (0.1-s records)."""
CAP_EXPONENT = 2.5
"""a in f ~ (P - P_idle)^(1/a), clock against power: 1.2 to 5.8 on V100, A40 and RTX 6000 (data of Zeus, NSDI 2023)."""
LEAST_POWER_SHARE = 1e-3
"""Power above idle, over the highest, that is left at a cap or coolant which allows less: jobs never stand still."""


@dataclass(frozen=True)
class PowerHistory:
    """Power of a group of nodes over time."""

    hourly_w: NDArray[np.float64]
    """Mean of each hour."""
    energy_j: float
    peak_w: float
    """Highest mean over an attempt's states, at any event."""


def device_power(power: NodePower, activity: float, cap: float = 1.0) -> float:
    """Return the watts of an accelerator: idle + activity x (highest - idle), at most its cap."""
    return min(cap * power.device_max_w, power.device_idle_w + activity * (power.device_max_w - power.device_idle_w))


def find_cap_speed(
    power: NodePower, activity: float, cap: float, speed_by_cap: Mapping[float, float] | None = None
) -> float:
    """Return the speed under a cap over the speed without one: by the curve of a sweep, or by `slow_down`, which also
    continues a curve below its lowest cap."""
    if not speed_by_cap:
        return slow_down(power, activity, cap)
    curve = {1.0: max(1.0, *speed_by_cap.values()), **speed_by_cap}
    caps = sorted(curve)
    speed = float(np.interp(cap, caps, [curve[each] for each in caps]) / curve[1.0])
    if cap < caps[0]:
        speed *= slow_down(power, activity, cap) / slow_down(power, activity, caps[0])
    return speed


def slow_down(power: NodePower, activity: float, cap: float) -> float:
    """Return the speed under a cap over the speed without one."""
    wanted_w = activity * (power.device_max_w - power.device_idle_w)
    allowed_w = max(cap * power.device_max_w - power.device_idle_w, LEAST_POWER_SHARE * power.device_max_w)
    return 1.0 if wanted_w <= allowed_w else float((allowed_w / wanted_w) ** (1.0 / CAP_EXPONENT))


def supply_power(node_w: float, num_racks: int, efficiency: float, rack_overhead_w: float) -> float:
    """Return the watts at the feed: nodes and racks, with conversion losses."""
    return (node_w + num_racks * rack_overhead_w) / efficiency


def measure_power(outcome: ClusterOutcome, power: NodePower, num_nodes: int, cap: float = 1.0) -> PowerHistory:
    """Compute the power of nodes from what ran on them. Idle nodes draw idle power, nodes in repair none; an attempt
    draws its mean, of training, saves and starting."""
    log, jobs = outcome.attempts, outcome.jobs
    start_s, end_s = np.array(log.start_s), np.array(log.end_s)
    above_w = np.array(
        [
            _mean_above_idle(power, jobs[job].activity, cap, (t.training_s, t.blocked_s, t.total_s)) * jobs[job].devices
            for job, t in zip(log.jobs, log.times, strict=True)
        ]
    )
    down_s = np.array([time_s for time_s, _ in outcome.node_states])
    down_w = -power.idle_w * np.diff(np.array([0, *(count for _, count in outcome.node_states)], dtype=float))
    times = np.concatenate([[0.0], start_s, end_s, down_s])
    steps = np.concatenate([[num_nodes * power.idle_w], above_w, -above_w, down_w])
    return integrate_steps(times, steps, outcome.end_s)


def _mean_above_idle(power: NodePower, activity: float, cap: float, seconds: tuple[float, float, float]) -> float:
    """Watts above idle of a device and its part of the rest of the node, on the mean of an attempt."""
    training_s, blocked_s, total_s = seconds
    if total_s <= 0:
        return 0.0
    device_w = device_power(power, activity, cap) - power.device_idle_w
    rest_w = activity * (power.rest_max_w - power.rest_idle_w) / power.num_devices
    return (training_s * (device_w + rest_w) + blocked_s * SAVE_ACTIVITY * device_w) / total_s


def integrate_steps(times: NDArray[np.float64], steps: NDArray[np.float64], until_s: float) -> PowerHistory:
    """Compute the hourly means of a level that changes by `steps` at `times`; of power, or of a number of devices."""
    order = np.argsort(times, kind="stable")
    times, levels = times[order], np.cumsum(steps[order])
    edges_s = np.append(times, until_s)
    energy = np.concatenate([[0.0], np.cumsum(levels * np.diff(edges_s))])
    hours = np.append(np.arange(0.0, until_s, 3600.0), until_s)
    at_hours = np.interp(hours, edges_s, energy)
    lasting = np.diff(edges_s) > 0
    peak_w = float(levels[lasting].max()) if lasting.any() else 0.0
    return PowerHistory(np.diff(at_hours) / np.diff(hours), float(energy[-1]), peak_w)


def add_histories(histories: Sequence[PowerHistory]) -> PowerHistory:
    """Add groups of nodes over the same time. The peak is the highest mean of an hour, where there are several."""
    if len(histories) == 1:
        return histories[0]
    hourly_w = np.sum([history.hourly_w for history in histories], axis=0)
    return PowerHistory(hourly_w, sum(history.energy_j for history in histories), float(hourly_w.max()))
