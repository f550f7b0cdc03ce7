"""What a node's GPUs draw during an attempt, as events EnergyUsed."""

import threading
from collections.abc import Callable

from phalanx.run import Event
from phalanx.run.event_types import EnergyUsed

EnergyMeter = Callable[[int], float | None]
"""Joules that the first so many GPUs of a node have drawn since some moment; None where nothing counts."""
READ_INTERVAL_S = 60.0
"""Seconds between two readings, at most so much is lost with an agent."""
STOP_TIMEOUT_S = 5.0
"""Seconds to wait for the last reading: a driver may never answer."""


class EnergyRecorder:
    """Reads a meter of so many GPUs in a thread of its own, since a driver that hangs must not hold up the agent.
    `emit_readings` and `stop` emit what was drawn between two readings."""

    def __init__(self, meter: EnergyMeter, emit: Callable[[Event], None], num_gpus: int):
        self._meter, self.emit, self._num_gpus = meter, emit, num_gpus
        self._readings: list[float] = []
        self._stop_requested = threading.Event()
        self._thread = threading.Thread(target=self._read_meter, name="energy", daemon=True)
        self._thread.start()

    def emit_readings(self) -> None:
        """Emit what has been read since."""
        while len(self._readings) > 1:
            before = self._readings.pop(0)
            if (joules := self._readings[0] - before) >= 0:  # the driver was loaded again
                self.emit(EnergyUsed(energy_j=joules, num_gpus=self._num_gpus))

    def stop(self) -> None:
        """Read once more, and emit."""
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
