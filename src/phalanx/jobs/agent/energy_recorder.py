"""Record the energy of a node's GPUs during an attempt, as EnergyUsed events."""

import threading
from collections.abc import Callable

from phalanx.run import Event
from phalanx.run.event_types import EnergyUsed

EnergyMeter = Callable[[int], float | None]
"""Returns the joules of the first N GPUs of a node since a fixed time; None without energy counters."""
READ_INTERVAL_S = 60.0
"""Seconds between readings, and the most that is lost with an agent."""
STOP_TIMEOUT_S = 5.0
"""Seconds to wait for the last reading: a driver may never respond."""


class EnergyRecorder:
    """Reads the meter of `num_gpus` GPUs in a separate thread, since a driver that hangs must not block the agent.
    `emit_readings` and `stop` emit the energy between readings."""

    def __init__(self, meter: EnergyMeter, emit: Callable[[Event], None], num_gpus: int):
        self._meter, self.emit, self._num_gpus = meter, emit, num_gpus
        self._readings: list[float] = []
        self._stop_requested = threading.Event()
        self._thread = threading.Thread(target=self._read_meter, name="energy", daemon=True)
        self._thread.start()

    def emit_readings(self) -> None:
        """Emit the readings since the last call."""
        while len(self._readings) > 1:
            before = self._readings.pop(0)
            if (joules := self._readings[0] - before) >= 0:  # negative after the driver was reloaded
                self.emit(EnergyUsed(energy_j=joules, num_gpus=self._num_gpus))

    def stop(self) -> None:
        """Take a last reading and emit it."""
        self._stop_requested.set()
        self._thread.join(STOP_TIMEOUT_S)
        self.emit_readings()

    def _read_meter(self) -> None:
        is_last = False
        while (found := self._meter(self._num_gpus)) is not None:
            self._readings.append(found)
            if is_last:
                return
            is_last = self._stop_requested.wait(READ_INTERVAL_S)
