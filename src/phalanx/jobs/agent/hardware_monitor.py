"""What the agent asks of its node's hardware: health checks before each attempt, and the energy of its GPUs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx.cluster.gpu_energy import read_local_gpu_joules
from phalanx.cluster.health.finding import HealthFinding
from phalanx.jobs.agent.energy_recorder import EnergyMeter


@dataclass(frozen=True)
class HardwareMonitor:
    """Functions that read the state of this node's hardware."""

    preflight: Callable[[], Sequence[HealthFinding]] = lambda: ()
    """Returns the findings of health checks; called before each attempt."""
    meter: EnergyMeter = read_local_gpu_joules
