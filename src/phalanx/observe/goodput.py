"""What a run took, in time, energy and money.

Seconds are productive, waiting, starting or lost: the one definition of each, in wall time and in device time.

A step's seconds hold those for which it waited for data and for a checkpoint that was saved before it. A save after the
last step of an attempt has no step that could hold its stall, so it is added. Device time is seconds x devices, one
device for each worker. Goodput is its productive share (Meta's effective training time ratio, arXiv 2410.21680, without
queue time). The cost of each failure is listed separately.

Energy is that of all nodes, as their agents have recorded it in RUN/telemetry; carbon and money follow from it.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from pydantic import ValidationError

from phalanx.cluster.spec import Prices
from phalanx.errors import DataError
from phalanx.observe.history import STEP_COMPONENTS, AttemptRecord, RunHistory
from phalanx.run import Run
from phalanx.run.event_types import CheckpointSaved, Compiled, RecipeResolved, WorkerFailure
from phalanx.run.telemetry_minutes import NodeEnergy, read_newest_energy

ETTR_DEFINITION = (
    "effective training time ratio: wall time of steps that counted, without waiting, and of evaluations, divided by "
    "wall time from the first start to the end, without queueing and without the time between a clean stop and the "
    "next start"
)


@dataclass(frozen=True)
class WorkSplit:
    """Seconds, or seconds x devices, of steps that count, of evaluations and of saves."""

    training_s: float
    """Steps that count, with what they waited for."""
    evaluation_s: float
    data_wait_s: float
    """Part of training: waiting for data."""
    step_stall_s: float
    """Part of training: stalled by checkpoints, on disk and in memory."""
    final_stall_s: float
    """Stalled by saves after the last step of an attempt."""

    @property
    def productive_s(self) -> float:
        """Steps that count, without waiting, and evaluations."""
        return self.training_s - self.data_wait_s - self.step_stall_s + self.evaluation_s

    @property
    def checkpoint_stall_s(self) -> float:
        """All that training waited for checkpoints."""
        return self.step_stall_s + self.final_stall_s


def split_work(history: RunHistory, attempt_weights: Sequence[float] | None = None) -> WorkSplit:
    """Sum up what the attempts worked and waited. `attempt_weights`: devices of each attempt; None: wall time."""
    attempts, steps = history.attempts, history.steps
    began = [attempt.started_at for attempt in attempts]
    weights = np.ones(len(attempts)) if attempt_weights is None else np.asarray(attempt_weights, dtype=np.float64)
    attempt_of_step = np.maximum(np.searchsorted(began, steps.time, side="right") - 1, 0)
    step_weights = weights[attempt_of_step] if len(steps) and attempts else np.zeros(len(steps))

    def component_s(name: str) -> float:
        return float(np.nansum(step_weights * steps.breakdown_s[:, STEP_COMPONENTS.index(name)]))

    def attempt_index(time: float) -> int:
        return max(0, bisect_right(began, time) - 1)

    final_stall_s = 0.0
    for save in history.of(CheckpointSaved) if attempts else ():
        index = attempt_index(save.time)
        if save.step >= attempts[index].last_step:
            final_stall_s += float(weights[index]) * save.stall_s
    evaluations = history.evaluations if attempts else ()
    return WorkSplit(
        training_s=float(np.nansum(step_weights * steps.step_s)),
        evaluation_s=sum(float(weights[attempt_index(each.time)]) * each.duration_s for each in evaluations),
        data_wait_s=component_s("data_wait"),
        step_stall_s=component_s("checkpoint_stall"),
        final_stall_s=final_stall_s,
    )


def startup_seconds(attempt: AttemptRecord) -> float:
    """Seconds from the start of an attempt to its first step, or to its end where it did none."""
    return max(0.0, (attempt.first_step_started_at or attempt.last_event_at) - attempt.started_at)


@dataclass(frozen=True)
class RunDurations:
    """Seconds. wall = training + evaluation + startup + wasted + unavailable + other; time between a proper end and the
    next start (`paused_s`) does not count as wall."""

    wall_s: float = 0.0
    productive_s: float = 0.0
    """Steps that count, without waiting for data and checkpoints, and evaluations: as in `device_time`."""
    training_s: float = 0.0
    """Steps that count, with waiting."""
    wasted_s: float = 0.0
    evaluation_s: float = 0.0
    startup_s: float = 0.0
    compilation_s: float = 0.0
    """Part of startup: torch.compile before the first step."""
    resolving_s: float = 0.0
    """Part of startup: preparing data and resolving `auto` before the workers start."""
    load_s: float = 0.0
    """Part of resolving: importing torch and the recipe's code."""
    trace_s: float = 0.0
    """Part of resolving: tracing the model."""
    trials_s: float = 0.0
    """Part of resolving: other trials."""
    unavailable_s: float = 0.0
    """From the last step, evaluation or save of an attempt that died to the next start."""
    other_s: float = 0.0
    paused_s: float = 0.0

    @property
    def ettr(self) -> float | None:
        """The ratio of ETTR_DEFINITION."""
        return self.productive_s / self.wall_s if self.wall_s > 0 else None


def summarize_durations(history: RunHistory) -> RunDurations:
    """Where the run's wall time went."""
    if not history.attempts:
        return RunDurations()
    attempts = history.attempts
    unavailable = paused = 0.0
    for previous, next_attempt in pairwise(attempts):
        idle = previous.unavailable_seconds(next_attempt.started_at)
        unavailable += idle
        ended_at = previous.last_work_at + idle if previous.has_died else previous.last_event_at
        paused += max(0.0, next_attempt.started_at - ended_at)
    startup = sum(map(startup_seconds, attempts))
    wall = max(0.0, attempts[-1].last_event_at - attempts[0].started_at - paused)
    wasted = sum(attempt.wasted_s for attempt in attempts)
    work, resolved = split_work(history), history.of(RecipeResolved)
    return RunDurations(
        wall_s=wall,
        productive_s=work.productive_s,
        training_s=work.training_s,
        wasted_s=wasted,
        evaluation_s=work.evaluation_s,
        startup_s=startup,
        compilation_s=sum(event.duration_s for event in history.of(Compiled)),
        resolving_s=sum(event.duration_s for event in resolved),
        load_s=sum(event.load_s for event in resolved),
        trace_s=sum(event.trace_s for event in resolved),
        trials_s=sum(event.trials_s for event in resolved),
        unavailable_s=unavailable,
        other_s=max(0.0, wall - work.training_s - wasted - work.evaluation_s - startup - unavailable),
        paused_s=paused,
    )


@dataclass(frozen=True)
class FailureCost:
    """What one fault cost, in device-seconds."""

    time: float
    description: str
    """Rank and kind: "rank 1: SIGKILL"; what followed an attempt that left no word is "no end was written"."""
    detection_s: float
    """Seconds from the last work of the attempt to the event that reports the fault."""
    wasted_s: float
    unavailable_s: float
    startup_s: float

    @property
    def total_s(self) -> float:
        """Device-seconds of all parts."""
        return self.wasted_s + self.unavailable_s + self.startup_s


@dataclass(frozen=True)
class DeviceTime:
    """Seconds x devices. allocated = productive + blocked + wasted + unavailable. Time between a clean stop and the
    next start is not counted: no devices are held then."""

    allocated_s: float = 0.0
    productive_s: float = 0.0
    """Steps that counted, without waiting, and evaluations."""
    startup_s: float = 0.0
    """Part of blocked: from a start to the first step."""
    data_wait_s: float = 0.0
    """Part of blocked: waiting for data."""
    checkpoint_stall_s: float = 0.0
    """Part of blocked: stalled by checkpoints."""
    other_blocked_s: float = 0.0
    """Part of blocked: the rest, between steps and at the end."""
    wasted_s: float = 0.0
    """Steps and evaluations that were repeated."""
    unavailable_s: float = 0.0
    """From the last work of an attempt that died to the next start, or to the RunEnded that says that there is none."""
    failure_costs: tuple[FailureCost, ...] = ()

    @property
    def blocked_s(self) -> float:
        """Alive, and not at work."""
        return self.startup_s + self.data_wait_s + self.checkpoint_stall_s + self.other_blocked_s

    @property
    def goodput_share(self) -> float | None:
        """Productive share of the allocation."""
        return self.productive_s / self.allocated_s if self.allocated_s > 0 else None


def compute_device_time(history: RunHistory) -> DeviceTime:
    """The account of a run."""
    attempts = history.attempts
    if not attempts:
        return DeviceTime()
    work = split_work(history, [attempt.world_size for attempt in attempts])
    starting = sum(attempt.world_size * startup_seconds(attempt) for attempt in attempts)
    unavailable_gaps = [before.unavailable_seconds(after.started_at) for before, after in pairwise(attempts)]
    unavailable = sum(before.world_size * gap for before, gap in zip(attempts, unavailable_gaps, strict=False))
    attempt_device_s = sum(before.world_size * _attempt_seconds(before, after) for before, after in pairwise(attempts))
    attempt_device_s += attempts[-1].world_size * max(0.0, attempts[-1].last_event_at - attempts[-1].started_at)
    # What an attempt does again was lost by those before it, with as many devices as they had.
    wasted_s = sum(before.world_size * after.wasted_s for before, after in pairwise(attempts))
    wasted_s += attempts[0].world_size * attempts[0].wasted_s
    productive = work.productive_s
    other_s = attempt_device_s - productive - work.data_wait_s - work.checkpoint_stall_s - starting - wasted_s
    if other_s < 0:  # clocks of several processes: an evaluation ends a hair after the attempt's last event
        productive, other_s = max(0.0, productive + other_s), 0.0
    return DeviceTime(
        allocated_s=attempt_device_s + unavailable,
        productive_s=productive,
        startup_s=starting,
        data_wait_s=work.data_wait_s,
        checkpoint_stall_s=work.checkpoint_stall_s,
        other_blocked_s=other_s,
        wasted_s=wasted_s,
        unavailable_s=unavailable,
        failure_costs=tuple(_failure_costs(history, unavailable_gaps)),
    )


def _attempt_seconds(attempt: AttemptRecord, next_attempt: AttemptRecord) -> float:
    """Seconds from its start to its end, or to the last thing that it did."""
    ended_at = attempt.last_work_at if attempt.has_died else attempt.last_event_at
    return max(0.0, min(ended_at, next_attempt.started_at) - attempt.started_at)


def _failure_costs(history: RunHistory, gaps: Sequence[float]) -> list[FailureCost]:
    """Return the cost of each attempt that died, described by the fault event of it."""
    costs = []
    for (before, after), gap in zip(pairwise(history.attempts), gaps, strict=True):
        if not before.has_died:
            continue
        fault_events = [one for one in history.of(WorkerFailure) if before.started_at <= one.time <= after.started_at]
        time, description, detection_s = before.last_work_at, "no end was written", gap
        if fault_events:
            time, description = fault_events[0].time, f"rank {fault_events[0].rank}: {fault_events[0].what}"
            detection_s = max(0.0, time - before.last_work_at)
        costs.append(
            FailureCost(
                time=time,
                description=description,
                detection_s=detection_s,
                wasted_s=before.world_size * after.wasted_s,
                unavailable_s=before.world_size * gap,
                startup_s=after.world_size * startup_seconds(after),
            )
        )
    return costs


JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class EnergySummary:
    """Energy of a run in all attempts, repeated steps included."""

    energy_j: float
    """Joules of GPUs and CPUs, as far as they were measured."""
    device_j: float
    """Part of it: the run's GPUs, by their own counters."""
    num_devices: int
    cpu_j: float
    """Part of it: all CPU packages of the nodes."""
    cpu_is_estimate: bool
    energy_j_per_unit: float | None
    """Joules for a token (or sample) that counted; None where GPUs of some nodes were not measured."""
    energy_j_per_step: float | None
    """The same for a step that counted."""
    energy_j_at_end: float | None
    """What it will be at the last step, at the same rate; None for a run that is over."""


def summarize_energy(run: Run, history: RunHistory, is_over: bool) -> EnergySummary | None:
    """Summarize what agents have recorded; None without a node that has recorded any. GPUs do not count where agents
    counted others than the run has workers: they did not know which are the run's."""
    recorded: list[NodeEnergy] = []
    cpu_is_estimate = False
    for path in sorted(run.telemetry.glob("*.jsonl")):
        try:
            newest = read_newest_energy(path)
        except (OSError, DataError):  # no file; the run may come from a stranger
            continue
        if newest is not None and newest.run_energy is not None:
            recorded.append(newest.run_energy)
            cpu_is_estimate = cpu_is_estimate or newest.cpu_power_is_estimate
    if not recorded:
        return None
    last = history.attempts[-1] if history.attempts else None
    device_j, num_devices, is_complete = 0.0, 0, last is None or last.device == "cpu"
    num_recorded_devices = sum(node.num_devices for node in recorded)
    max_world_size = max((attempt.world_size for attempt in history.attempts), default=0)
    if not is_complete and num_recorded_devices == max_world_size:
        device_j, num_devices = sum(node.device_j for node in recorded), num_recorded_devices
        is_complete = len(recorded) >= history.num_nodes and not any(node.missing_device_s for node in recorded)
    units, cpu_j = float(np.nansum(history.steps.tokens)), sum(node.cpu_j for node in recorded)
    energy_j, steps, planned = device_j + cpu_j, len(history.steps), history.planned_steps
    return EnergySummary(
        energy_j=energy_j,
        device_j=device_j,
        num_devices=num_devices,
        cpu_j=cpu_j,
        cpu_is_estimate=cpu_is_estimate,
        energy_j_per_unit=energy_j / units if is_complete and units > 0 else None,
        energy_j_per_step=energy_j / steps if is_complete and steps else None,
        energy_j_at_end=energy_j / steps * planned if steps and planned and not is_over else None,
    )


@dataclass(frozen=True)
class CostSummary:
    """Costs of a run in all attempts, and for a million tokens (or samples) that counted. None: not known."""

    currency: str
    pue: float
    site_kwh: float | None
    """Energy of GPUs and CPUs as measured, times `pue`."""
    carbon_kg: float | None
    """Kilograms of CO2 equivalents for `site_kwh`."""
    cost: float | None
    """Rent of devices where they have a price, else the price of `site_kwh`."""
    site_kwh_per_million: float | None
    carbon_kg_per_million: float | None
    cost_per_million: float | None


def read_run_prices(cluster: Mapping[str, Any] | None) -> Prices | None:
    """Return the prices in a run's cluster.json; None without any that can be read: the file may be damaged."""
    try:
        return None if not cluster or "prices" not in cluster else Prices.model_validate(cluster["prices"])
    except ValidationError:
        return None


def compute_cost(device_s: float, energy_j: float | None, prices: Prices) -> float | None:
    """Rent of devices where they have a price, else energy at the building; None without prices."""
    if prices.device_hour is not None:
        return device_s / 3600 * prices.device_hour
    if prices.kwh is not None and energy_j is not None:
        return energy_j / JOULES_PER_KWH * prices.pue * prices.kwh
    return None


def summarize_cost(prices: Prices, device_s: float, energy: EnergySummary | None, num_units: float) -> CostSummary:
    """Summarize a run. Where the energy is not that of all devices, none is given for a million."""
    energy_j = None if energy is None else energy.energy_j
    is_complete = energy is not None and energy.energy_j_per_step is not None
    site_kwh = None if energy_j is None else energy_j / JOULES_PER_KWH * prices.pue
    carbon_g = prices.carbon_g_per_kwh
    carbon_kg = None if site_kwh is None or carbon_g is None else site_kwh * carbon_g / 1e3
    cost = compute_cost(device_s, energy_j, prices)
    millions = num_units / 1e6

    def share(value: float | None, is_known: bool) -> float | None:
        return value / millions if value is not None and is_known and millions > 0 else None

    return CostSummary(
        currency=prices.currency,
        pue=prices.pue,
        site_kwh=site_kwh,
        carbon_kg=carbon_kg,
        cost=cost,
        site_kwh_per_million=share(site_kwh, is_complete),
        carbon_kg_per_million=share(carbon_kg, is_complete),
        cost_per_million=share(cost, is_complete or prices.device_hour is not None),
    )
