"""Requests of a set point by Modbus: only registers that the map declares for it are written."""

import time
from collections.abc import Callable

from phalanx.fleet.telemetry.liquid_limits import check_liquid_value
from phalanx.fleet.telemetry.modbus import ModbusError, RegisterClient
from phalanx.fleet.telemetry.modbus_map import (
    LIQUID_UNITS,
    ModbusRequestEntry,
    RegisterPoint,
    find_units,
    to_base_unit,
    to_count,
)
from phalanx.fleet.thermal.request_session import ControllerState

MAX_BEAT = 30_000
"""The counter begins again from 1: it fits a register of any type."""


class ModbusRequestChannel:
    """Writes the request registers of one device. `held`: where the set point that the controller holds is read."""

    def __init__(
        self,
        client: RegisterClient,
        entry: ModbusRequestEntry,
        held: RegisterPoint,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._client, self._entry, self._held, self._clock = client, entry, held, clock
        self._beat = 0
        self._sent_at: dict[int, float] = {}
        self._echoed_at: float | None = None

    def read_state(self) -> ControllerState:
        """Read set point, echo, and whether an operator is in charge. A device that does not answer takes none."""
        try:
            count = to_base_unit(self._held, self._client.read(self._held), find_units("set_point_c"))
            echo = int(self._client.read(self._entry.echo))
            in_charge = self._entry.in_charge
            is_operator = in_charge is not None and self._client.read(in_charge) != 0
        except ModbusError as error:
            return ControllerState(str(error), None, None)
        if echo in self._sent_at:  # as old as our heartbeat that it repeats
            self._echoed_at = max(self._sent_at[echo], self._echoed_at or self._sent_at[echo])
        age_s = None if self._echoed_at is None else self._clock() - self._echoed_at
        return ControllerState(None, check_liquid_value("set_point_c", count), age_s, is_operator)

    def describe_writes(self, supply_c: float) -> list[str]:
        """Return the registers and counts of a request."""
        entry = self._entry
        rows = [
            (entry.set_point, f"{self._find_count(supply_c):g}", f"set point {supply_c:g} °C"),
            (entry.enable, "1", "the request may be followed"),
            (entry.heartbeat, "1, 2, 3, ...", "heartbeat, each 10 s; at the end the permission becomes 0"),
        ]
        return [f"{point.table} {point.address} = {count}  ({text})" for point, count, text in rows]

    def beat(self) -> None:
        """Write the next number of the heartbeat."""
        self._beat = self._beat % MAX_BEAT + 1
        now = self._clock()
        self._sent_at = {**{beat: at for beat, at in self._sent_at.items() if now - at < 300}, self._beat: now}
        self._client.write(self._entry.heartbeat, self._beat)

    def request(self, supply_c: float) -> None:
        """Write the set point, then the permission to follow it."""
        self._client.write(self._entry.set_point, self._find_count(supply_c))
        self._client.write(self._entry.enable, 1)

    def withdraw(self) -> None:
        """Take the permission back."""
        self._client.write(self._entry.enable, 0)

    def close(self) -> None:
        """End the connection."""
        self._client.close()

    def _find_count(self, supply_c: float) -> float:
        return to_count(self._entry.set_point, supply_c, LIQUID_UNITS["c"])
