"""Power of simulated nodes: two states and an activity, what they draw over time, and throttling by the coolant.

An accelerator's rise over its coolant goes with its power. Where it would be above its limit, its clock falls until its
power is what the coolant allows. Accelerators are taken together in steps of their power."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from phalanx_fleet.power_tree import NodePower
from phalanx_fleet.simulate.cluster_simulation import ClusterOutcome
from phalanx_fleet.simulate.job_state import AttemptTime, ProgressClock, SimulatedJob
from phalanx_fleet.thermal.device_series import Values
from phalanx_fleet.thermal.plant import PlantHours

SAVE_ACTIVITY = 0.15
"""Power above idle of an accelerator in a blocking save, over that of training: 8 H100 draw .6 kW idle, 1.19 kW in a
save and 4.45 kW in training (0.1-s records)."""
CAP_EXPONENT = 2.5
"""a in f ~ (P - P_idle)^(1/a), clock against power: 1.2 to 5.8 on V100, A40 and RTX 6000 (data of Zeus, NSDI 2023)."""
LEAST_POWER_SHARE = 1e-3
"""Power above idle, over the highest, that is left at a cap or coolant which allows less: jobs never stand still."""
POWER_STEPS = 50
"""Steps of a device's power over its highest, to 2 %."""
LEAST_DEVICES = 1e-9
"""Mean of an hour below which there are none: rounding."""


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
    attempts, jobs = outcome.attempts, outcome.jobs
    start_s, end_s = (np.array([getattr(each, name) for each in attempts]) for name in ("start_s", "end_s"))
    above_w = np.array(
        [_mean_above_idle(power, jobs[each.job].activity, cap, each.time) * jobs[each.job].devices for each in attempts]
    )
    down_s = np.array([time_s for time_s, _ in outcome.node_states])
    down_w = -power.idle_w * np.diff(np.array([0, *(count for _, count in outcome.node_states)], dtype=float))
    times = np.concatenate([[0.0], start_s, end_s, down_s])
    steps = np.concatenate([[num_nodes * power.idle_w], above_w, -above_w, down_w])
    return integrate_steps(times, steps, outcome.end_s)


def _mean_above_idle(power: NodePower, activity: float, cap: float, time: AttemptTime) -> float:
    """Watts above idle of a device and its part of the rest of the node, on the mean of an attempt."""
    if time.total_s <= 0:
        return 0.0
    device_w = device_power(power, activity, cap) - power.device_idle_w
    rest_w = activity * (power.rest_max_w - power.rest_idle_w) / power.num_devices
    return (time.training_s * (device_w + rest_w) + time.blocked_s * SAVE_ACTIVITY * device_w) / time.total_s


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


@dataclass(frozen=True)
class GroupOutcome:
    """Equal nodes, and what happened on them."""

    power: NodePower
    num_nodes: int
    outcome: ClusterOutcome
    cap: float = 1.0
    """Power cap of each accelerator over its highest power."""

    @cached_property
    def attempts(self) -> tuple[Values, Values, Values]:
        """Start and end in seconds, and devices, of each attempt of a job."""
        attempts, jobs = self.outcome.attempts, self.outcome.jobs
        rows = [(each.start_s, each.end_s, jobs[each.job].devices) for each in attempts]
        start_s, end_s, devices = np.array(rows, dtype=float).reshape(-1, 3).T
        return start_s, end_s, devices

    @cached_property
    def power_shares(self) -> Values:
        """Power of a training accelerator of each attempt over its highest."""
        shares = find_power_shares(self.outcome.jobs, self.power, self.cap)
        return shares[[each.job for each in self.outcome.attempts]]

    @cached_property
    def training_shares(self) -> Values:
        return np.array([each.time.training_share for each in self.outcome.attempts])

    def find_busy_steps(
        self, chosen: NDArray[np.bool_] | slice = slice(None), weights: Values | float = 1.0
    ) -> tuple[Values, Values]:
        """Return the times at which devices in these attempts, each times its weight, start and end, and how many."""
        start_s, end_s, devices = (each[chosen] for each in self.attempts)
        changes = devices * weights
        return np.concatenate([[0.0], start_s, end_s]), np.concatenate([[0.0], changes, -changes])


@dataclass(frozen=True)
class PowerStep:
    """Accelerators of jobs with a power in one step, by hour."""

    share: float
    """Power over the highest, the upper end of the step."""
    idle_share: float
    device_max_w: float
    busy_devices: Values
    training_devices: Values
    """Without those that start or save."""
    training_w: Values
    """Of these, without throttling."""

    def find_throttled(self, allowed_power: Values) -> Values:
        """Return the devices that throttle."""
        return np.where((self.share > allowed_power) & (self.busy_devices > LEAST_DEVICES), self.busy_devices, 0.0)

    def find_saved_w(self, allowed_power: Values) -> Values:
        """Return the power that these accelerators draw less than without throttling."""
        allowed_w = np.maximum(allowed_power, self.idle_share + LEAST_POWER_SHARE) * self.device_max_w
        return np.maximum(self.training_w - self.training_devices * allowed_w, 0.0)


def find_allowed_power(found: PlantHours, core_limit_c: float) -> Values:
    """Return the power by hour at which an accelerator's core is at its limit, over its highest power."""
    coolant_c = found.coolant_c
    return np.asarray(np.maximum((core_limit_c - coolant_c) / (found.core_c - coolant_c), 0.0))


def list_power_steps(groups: Sequence[GroupOutcome], least_share: float, until_s: float) -> list[PowerStep]:
    """Return the accelerators of all jobs by their power, of those above a share of the highest."""
    steps = []
    for group in groups:
        power, shares = group.power, group.power_shares
        numbers = find_power_step(shares)
        for number in np.unique(numbers[numbers / POWER_STEPS > least_share]).tolist():
            chosen = numbers == number
            training = group.training_shares[chosen]
            busy, devices, device_shares = (
                integrate_steps(*group.find_busy_steps(chosen, weights), until_s).hourly_w
                for weights in (1.0, training, training * shares[chosen])
            )
            steps.append(
                PowerStep(
                    share=number / POWER_STEPS,
                    idle_share=power.device_idle_w / power.device_max_w,
                    device_max_w=power.device_max_w,
                    busy_devices=busy,
                    training_devices=devices,
                    training_w=device_shares * power.device_max_w,
                )
            )
    return steps


def find_power_shares(jobs: Sequence[SimulatedJob], power: NodePower, cap: float) -> Values:
    """Return the power of a training accelerator of each job over its highest."""
    return np.array([device_power(power, job.activity, cap) / power.device_max_w for job in jobs], dtype=float)


def find_power_step(shares: Values) -> NDArray[np.int64]:
    """Return the number of the step that each power over the highest is in."""
    return np.ceil(shares * POWER_STEPS - 1e-9).astype(np.int64)


def set_clocks(jobs: Sequence[SimulatedJob], power: NodePower, cap: float, allowed_power: Values) -> None:
    """Let jobs progress slower in hours in which their accelerators throttle: the clock goes with (P - P
    idle)^(1/2.5)."""
    shares = find_power_shares(jobs, power, cap)
    idle_share = power.device_idle_w / power.device_max_w
    clocks: dict[int, ProgressClock] = {}
    for job, number in zip(jobs, find_power_step(shares).tolist(), strict=True):
        share = number / POWER_STEPS
        if share <= allowed_power.min():
            continue
        if number not in clocks:
            left = np.maximum(allowed_power - idle_share, LEAST_POWER_SHARE) / max(share - idle_share, 1e-9)
            clocks[number] = ProgressClock(np.minimum(left, 1.0) ** (1.0 / CAP_EXPONENT))
        job.clock = clocks[number]
