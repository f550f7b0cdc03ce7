"""The energy of a run on all its nodes, as their agents have recorded it in RUN/telemetry."""

from dataclasses import dataclass

import numpy as np

from phalanx.errors import DataError
from phalanx.observe.history import RunHistory
from phalanx.run import Run
from phalanx.run.event_types import EnergyUsed
from phalanx.run.telemetry_minutes import NodeEnergy, read_newest_energy


@dataclass(frozen=True)
class RecordedEnergy:
    """Joules of all nodes so far, and of what."""

    device_j: float
    num_devices: int
    cpu_j: float
    cpu_is_estimate: bool
    num_nodes: int
    missing_device_s: float


def read_run_energy(run: Run) -> RecordedEnergy | None:
    """The energy of a run; None without a node that has recorded any. Reads the newest minute of each node only."""
    energies: list[NodeEnergy] = []
    is_estimate = False
    for path in sorted(run.telemetry.glob("*.jsonl")):
        try:
            newest = read_newest_energy(path)
        except (OSError, DataError):  # no file; the run may come from a stranger
            continue
        if newest is not None and newest.run_energy is not None:
            energies.append(newest.run_energy)
            is_estimate = is_estimate or newest.cpu_power_is_estimate
    if not energies:
        return None
    return RecordedEnergy(
        device_j=sum(each.device_j for each in energies),
        num_devices=sum(each.num_devices for each in energies),
        cpu_j=sum(each.cpu_j for each in energies),
        cpu_is_estimate=is_estimate,
        num_nodes=len(energies),
        missing_device_s=sum(each.missing_device_s for each in energies),
    )


@dataclass(frozen=True)
class EnergySummary:
    """Energy of a run in all attempts, repeated steps included."""

    energy_j: float
    """Joules of GPUs and CPUs, as far as they were measured."""
    device_j: float
    """Part of it: the run's GPUs, by their own counters."""
    num_devices: int
    cpu_j: float | None
    """Part of it: all CPU packages of the nodes; None where nothing was recorded."""
    cpu_is_estimate: bool
    energy_j_per_unit: float | None
    """Joules for a token (or sample) that counted; None where GPUs of some nodes were not measured."""
    energy_j_per_step: float | None
    """The same for a step that counted."""
    energy_j_at_end: float | None
    """What it will be at the last step, at the same rate; None for a run that is over."""


def summarize_energy(run: Run, history: RunHistory, is_over: bool) -> EnergySummary | None:
    """Summarize what agents have recorded. GPUs count by events where agents counted other GPUs than the run has
    workers: they did not know which are the run's."""
    recorded, drawn = read_run_energy(run), history.of(EnergyUsed)
    last = history.attempts[-1] if history.attempts else None
    device_j, num_devices, is_complete = 0.0, 0, last is None or last.device == "cpu"
    if recorded is not None and last is not None and not is_complete and recorded.num_devices == last.world_size:
        device_j, num_devices = recorded.device_j, recorded.num_devices
        is_complete = recorded.num_nodes >= history.num_nodes and recorded.missing_device_s == 0
    elif drawn:
        device_j, num_devices = sum(event.energy_j for event in drawn), drawn[-1].num_gpus
        is_complete = history.num_nodes == 1
    elif recorded is None:
        return None
    cpu_j, units = None if recorded is None else recorded.cpu_j, float(np.nansum(history.steps.tokens))
    energy_j, steps, planned = device_j + (cpu_j or 0.0), len(history.steps), history.planned_steps
    return EnergySummary(
        energy_j=energy_j,
        device_j=device_j,
        num_devices=num_devices,
        cpu_j=cpu_j,
        cpu_is_estimate=recorded is not None and recorded.cpu_is_estimate,
        energy_j_per_unit=energy_j / units if is_complete and units > 0 else None,
        energy_j_per_step=energy_j / steps if is_complete and steps else None,
        energy_j_at_end=energy_j / steps * planned if steps and planned and not is_over else None,
    )
