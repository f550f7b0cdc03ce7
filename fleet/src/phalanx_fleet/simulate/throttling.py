"""Throttling of accelerators by the coolant of the hour: how fast they are, and what they draw less.

An accelerator's rise over its coolant goes with its power. Where it would be above its limit, its clock falls until its
power is what the coolant allows. Accelerators are taken together in steps of their power.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from phalanx_fleet.power_tree import NodePower
from phalanx_fleet.simulate.cluster_simulation import ClusterOutcome
from phalanx_fleet.simulate.job_state import ProgressClock, SimulatedJob
from phalanx_fleet.simulate.power_model import CAP_EXPONENT, LEAST_POWER_SHARE, device_power, integrate_steps
from phalanx_fleet.thermal.device_series import Values
from phalanx_fleet.thermal.plant import PlantHours

POWER_STEPS = 50
"""Steps of a device's power over its highest, to 2 %."""
LEAST_DEVICES = 1e-9
"""Mean of an hour below which there are none: rounding."""


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
        log, jobs = self.outcome.attempts, self.outcome.jobs
        devices = np.array([jobs[job].devices for job in log.jobs], dtype=float)
        return np.array(log.start_s), np.array(log.end_s), devices

    @cached_property
    def power_shares(self) -> Values:
        """Power of a training accelerator of each attempt over its highest."""
        return find_power_shares(self.outcome.jobs, self.power, self.cap)[self.outcome.attempts.jobs]

    @cached_property
    def training_shares(self) -> Values:
        """Share of each attempt in steps."""
        return np.array([time.training_share for time in self.outcome.attempts.times])

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
