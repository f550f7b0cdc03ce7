"""What a node's GPUs draw during an attempt, as events EnergyUsed."""

import threading
from collections.abc import Callable

from phalanx.run import Event
from phalanx.run.event_types import EnergyUsed

Meter = Callable[[int], float | None]
"""Joules that the first so many GPUs of a node have drawn since some moment; None where nothing counts."""
EVERY = 60.0
"""Seconds between two readings, at most so much is lost with an agent."""
PATIENCE = 5.0
"""Seconds to wait for the last reading: a driver may never answer."""


class EnergyLog:
    """Reads a meter of so many GPUs in a thread of its own, since a driver that hangs must not hold up the agent.
    `look` and `end` emit what was drawn between two readings."""

    def __init__(self, meter: Meter, emit: Callable[[Event], None], devices: int):
        self._meter, self.emit, self._devices = meter, emit, devices
        self._readings: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="energy", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Emit what has been read since."""
        while len(self._readings) > 1:
            before = self._readings.pop(0)
            if (drawn := self._readings[0] - before) >= 0:  # the driver was loaded again
                self.emit(EnergyUsed(energy_j=drawn, num_gpus=self._devices))

    def end(self) -> None:
        """Read once more, and emit."""
        self._over.set()
        self._thread.join(PATIENCE)
        self.look()

    def _read(self) -> None:
        over = False
        while (found := self._meter(self._devices)) is not None:
            self._readings.append(found)
            if over:
                return
            over = self._over.wait(EVERY)
