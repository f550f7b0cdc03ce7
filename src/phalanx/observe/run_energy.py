"""The energy of a run on all its nodes, as their agents have recorded it in RUN/telemetry."""

from dataclasses import dataclass

from phalanx.errors import DataError
from phalanx.run import Run
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
