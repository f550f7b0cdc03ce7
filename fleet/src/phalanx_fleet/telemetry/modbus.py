"""Read a coolant distribution unit (CDU) by Modbus TCP. This source writes nothing.

Modbus has neither times nor quality: a value is as old as its reading, and a counter of the controller, where the map
has one, says that the controller lives.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from phalanx.errors import UsageError
from phalanx.telemetry.sample import SourceUnavailableError
from phalanx_fleet.telemetry.modbus_map import (
    STATE_COLUMNS,
    ModbusEntry,
    RegisterPoint,
    check_liquid_value,
    find_units,
    to_base_unit,
)
from phalanx_fleet.telemetry.polling import PollingThread
from phalanx_fleet.telemetry.service_reading import RackSample, ServiceReading

logger = logging.getLogger(__name__)

DEFAULT_PORT = 502
LATE_AFTER_INTERVALS = 3


class ModbusError(Exception):
    """The device does not answer, or refuses; the text says why."""


class ModbusUnreachableError(ModbusError):
    """The device does not answer."""


class ModbusSource:
    """The liquid of one CDU. `start_polling` calls a function at an interval in the background.

    Raises SourceUnavailableError where the device does not answer at first; later its values are missing.
    """

    def __init__(
        self,
        id: str,
        entry: ModbusEntry,
        client: "PymodbusClient",
        clock: Callable[[], float] = time.monotonic,
        start_polling: Callable[[Callable[[], None], float], PollingThread] = PollingThread,
    ):
        self.name = entry.url
        self._id, self._entry, self._client, self._clock = id, entry, client, clock
        self._newest: tuple[float, RackSample] | None = None
        self._refused: dict[str, str] = {}
        self._failure = ""
        self._alive: tuple[float, float] | None = None
        """The controller's counter, and since when it has this value."""
        try:
            self._newest = self._read_points()
        except ModbusError as error:
            client.close()
            raise SourceUnavailableError(f"{entry.url}: {error}") from error
        self._polling = start_polling(self._poll, entry.interval_s)

    @property
    def problems(self) -> Sequence[str]:
        """Points that cannot be read, and a controller that has stopped."""
        found = [f"{self.name}: {self._failure}"] if self._failure else []
        found += [f"{self.name}: {column}: {text}" for column, text in sorted(self._refused.items())]
        if self._is_stopped():
            found.append(f"{self.name}: the counter of the controller stands: its values are missing")
        return found

    def read(self) -> ServiceReading:
        """The newest values with their age; none of them where they are late, or the controller has stopped."""
        newest, empty = self._newest, RackSample(id=self._id, equipment="CDU")
        if newest is None or self._is_stopped():
            return ServiceReading(racks=(empty,))
        age_s = self._clock() - newest[0]
        if age_s > LATE_AFTER_INTERVALS * self._entry.interval_s:
            return ServiceReading(racks=(empty,))
        return ServiceReading(racks=(replace(newest[1], age_s=max(0.0, age_s)),))

    def close(self) -> None:
        """Stop asking, and end the connection."""
        self._polling.stop()
        self._client.close()

    def _is_stopped(self) -> bool:
        limit_s = LATE_AFTER_INTERVALS * self._entry.interval_s
        return self._alive is not None and self._clock() - self._alive[1] > limit_s

    def _poll(self) -> None:
        try:
            self._newest, self._failure = self._read_points(), ""
        except ModbusError as error:
            if self._newest is not None:
                logger.info("telemetry: %s: %s", self.name, error)
            self._newest, self._failure = None, str(error)

    def _read_points(self) -> tuple[float, RackSample]:
        """A time before the values were read, and the values. A point that the device refuses is missing; ModbusError
        where it refuses all."""
        begin, entry = self._clock(), self._entry
        if entry.alive is not None:
            count = self._client.read(entry.alive)
            if self._alive is None or self._alive[0] != count:
                self._alive = count, begin
        found: dict[str, float | bool | None] = {}
        refused: dict[str, str] = {}
        for column, point in entry.points.items():
            try:
                count = self._client.read(point)
            except ModbusUnreachableError:
                raise
            except ModbusError as error:
                refused[column] = str(error)
                continue
            value = check_liquid_value(column, to_base_unit(point, count, find_units(column)))
            found[column] = value if value is None or column not in STATE_COLUMNS else bool(value)
        if refused and len(refused) == len(entry.points):
            raise ModbusError(next(iter(refused.values())))
        self._refused = refused
        sample = RackSample(id=self._id, equipment="CDU", **found)  # type: ignore[arg-type]
        return begin, sample


def open_modbus(id: str, entry: ModbusEntry) -> ModbusSource:
    """Open the device of an entry, which samples name by `id`.

    Raises:
        SourceUnavailableError: It does not answer, or refuses all points.
        UsageError: Its address is none.
    """
    return ModbusSource(id, entry, PymodbusClient(entry))


class PymodbusClient:
    """A connection through pymodbus; it connects again by the next call after a loss."""

    def __init__(self, entry: ModbusEntry):
        address = urlsplit(entry.url)
        try:
            is_address = address.scheme == "modbus" and bool(address.hostname) and address.port != 0
        except ValueError:  # a port that is none
            is_address = False
        if not is_address:
            raise UsageError(f"modbus: url: expected an address such as modbus://cdu1:502, found {entry.url!r}")
        try:
            from pymodbus.client import ModbusTcpClient
            from pymodbus.exceptions import ModbusException
        except ImportError:
            raise SourceUnavailableError("Modbus: pymodbus is not installed: pip install 'phalanx-fleet'") from None
        self._errors, self._device_id = ModbusException, entry.device_id
        self._client = ModbusTcpClient(
            address.hostname or "", port=address.port or DEFAULT_PORT, timeout=entry.timeout_s, retries=0
        )

    def read(self, point: RegisterPoint) -> float:
        """Read a number, in counts. NaN where the register has a floating-point one that is none."""
        table, client = point.table, self._client
        read = {
            "holding": client.read_holding_registers,
            "input": client.read_input_registers,
            "coil": client.read_coils,
            "discrete": client.read_discrete_inputs,
        }[table]
        answer = self._ask(lambda: read(point.address, count=point.num_registers, device_id=self._device_id), point)
        if point.type is None:
            return float(answer.bits[0])  # type: ignore[attr-defined]
        kind = client.DATATYPE[point.type.upper()]
        registers = answer.registers  # type: ignore[attr-defined]
        return float(client.convert_from_registers(registers, kind, word_order=point.word_order or "big"))  # type: ignore[arg-type]

    def close(self) -> None:
        """End the connection."""
        self._client.close()  # type: ignore[no-untyped-call]

    def _ask(self, call: Callable[[], object], point: RegisterPoint) -> object:
        try:
            if not self._client.connected and not self._client.connect():  # type: ignore[no-untyped-call]
                raise ModbusUnreachableError("cannot be reached")
            answer = call()
        except (self._errors, OSError) as error:
            self._client.close()  # type: ignore[no-untyped-call]
            raise ModbusUnreachableError(f"does not answer ({str(error) or type(error).__name__})") from None
        if answer.isError():  # type: ignore[attr-defined]
            code = getattr(answer, "exception_code", None)
            raise ModbusError(f"refuses {point.table} {point.address} (Modbus exception {code})")
        return answer
