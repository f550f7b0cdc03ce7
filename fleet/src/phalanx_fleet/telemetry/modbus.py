"""Read a coolant distribution unit (CDU) by Modbus TCP, by the register map of the nodes file. Nothing is written.

Nothing in the map is guessed: neither the order of words nor a unit has a default, since a wrong one gives plausible
numbers. Modbus has neither times nor quality: a value is as old as its reading, and a counter of the controller, where
the map has one, says that the controller lives."""

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from phalanx.cluster.spec import StrictModel
from phalanx.errors import UsageError
from phalanx.recipe.field_types import NUMBER_NOT_BOOL
from phalanx.telemetry.sample import SourceUnavailableError
from phalanx_fleet.telemetry.service_reading import (
    LATE_AFTER_INTERVALS,
    LIQUID_LIMITS,
    STATE_COLUMNS,
    PolledSource,
    PollingThread,
    RackSample,
    RefusalError,
    ServiceError,
    ServiceReading,
    StartPollingFn,
    check_liquid_value,
)

RegisterType = Literal["int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64"]
RegisterTable = Literal["holding", "input", "coil", "discrete"]
WordOrder = Literal["big", "little"]
NUM_REGISTERS: dict[str, int] = {
    "int16": 1, "uint16": 1, "int32": 2, "uint32": 2, "float32": 2, "int64": 4, "uint64": 4, "float64": 4,
}  # fmt: skip
LIQUID_UNITS: dict[str, dict[str, tuple[float, float]]] = {
    "c": {"C": (1.0, 0.0), "F": (5 / 9, -160 / 9), "K": (1.0, -273.15)},
    "l_per_min": {"L/min": (1.0, 0.0), "m3/h": (1000 / 60, 0.0), "L/s": (60.0, 0.0), "gpm": (3.785411784, 0.0)},
    "pa": {"Pa": (1.0, 0.0), "kPa": (1e3, 0.0), "bar": (1e5, 0.0), "mbar": (1e2, 0.0), "psi": (6894.757, 0.0)},
    "w": {"W": (1.0, 0.0), "kW": (1e3, 0.0)},
    "position": {"%": (0.01, 0.0), "1": (1.0, 0.0)},
    "": {"1": (1.0, 0.0)},
}
"""Factor and offset to the base unit, by what the name of a value ends with."""
LiquidColumn = Literal[
    "supply_temperature_c", "return_temperature_c", "set_point_c", "flow_l_per_min", "differential_pressure_pa",
    "valve_position", "power_w", "failed_pumps", "has_leak", "has_leak_sensor_fault",
]  # fmt: skip
assert set(LiquidColumn.__args__) == set(LIQUID_LIMITS)  # type: ignore[attr-defined]
DEFAULT_PORT = 502


class RegisterPoint(StrictModel):
    """One number of the device."""

    table: RegisterTable
    address: int = Field(ge=0, le=65535)
    """As it is sent, from 0 on: 40101 of a manual that counts from 40001 is address 100."""
    type: RegisterType | None = None
    """Needed but for a coil or a discrete input, which are one bit."""
    word_order: WordOrder | None = None
    """Which word comes first; needed where the type is wider than a register."""
    scale: Annotated[float, NUMBER_NOT_BOOL] | None = None
    """What one count is, in `unit`. Needed with a type."""
    unit: str | None = None
    """Needed with a type; 1 for a number without a unit."""
    missing: tuple[int, ...] = ()
    """Counts by which the device says that it has no value, such as 32767."""

    @model_validator(mode="after")
    def check_type(self) -> "RegisterPoint":
        """Refuse a map that leaves something to a guess."""
        is_bit = self.table in ("coil", "discrete")
        if is_bit and (self.type, self.word_order, self.scale, self.unit) != (None, None, None, None):
            raise ValueError(f"a {self.table} is one bit: without type, word_order, scale and unit")
        if not is_bit:
            lacking = [name for name in ("type", "scale", "unit") if getattr(self, name) is None]
            if lacking:
                raise ValueError(f"expected {', '.join(lacking)}, as the manual of the device has it")
            if self.scale == 0:
                raise ValueError("scale: 0 makes every count 0; expected what one count is, such as 0.1")
            if NUM_REGISTERS[str(self.type)] > 1 and self.word_order is None:
                raise ValueError(f"{self.type} is several registers: expected word_order: big, or little")
        return self

    @property
    def num_registers(self) -> int:
        """Registers, or bits, that it takes."""
        return 1 if self.type is None else NUM_REGISTERS[self.type]


class ModbusEntry(StrictModel):
    """A CDU that is read by Modbus TCP. Only numbers that the map names are read."""

    url: str
    """Such as modbus://cdu1.example.com:502."""
    device_id: int = Field(ge=0, le=255)
    """Unit identifier, as the manual or the gateway has it."""
    interval_s: float = Field(5.0, gt=0, le=1e6)
    """Seconds from one reading to the next. A value is missing when it is older than three."""
    timeout_s: float = Field(2.0, gt=0, le=3600)
    points: dict[LiquidColumn, RegisterPoint]
    alive: RegisterPoint | None = None
    """A counter that the controller moves: while it does not, all values are missing. Without it, a gateway may answer
    for a controller that has stopped."""

    @model_validator(mode="after")
    def check_units(self) -> "ModbusEntry":
        """Refuse a unit that is none of its value's."""
        for column, point in self.points.items():
            known = find_units(column)
            if point.unit is not None and point.unit not in known:
                raise ValueError(f"{column}: unit {point.unit}: expected one of {', '.join(known)}")
            if point.type is None and "1" not in known:
                raise ValueError(f"{column}: a {point.table} is one bit; expected a register")
        return self


def find_units(column: str) -> dict[str, tuple[float, float]]:
    """Return the units of a value: factor and offset to its base unit."""
    for ending in ("l_per_min", "position", "pa", "c", "w"):
        if column.endswith(f"_{ending}"):
            return LIQUID_UNITS[ending]
    return LIQUID_UNITS[""]


def to_base_unit(point: RegisterPoint, count: float, units: dict[str, tuple[float, float]]) -> float | None:
    """Return a value in its base unit; None for a count that says that there is none."""
    if count in point.missing:
        return None
    factor, offset = units[point.unit or "1"]
    return count * (1.0 if point.scale is None else point.scale) * factor + offset


class ModbusSource(PolledSource):
    """The liquid of one CDU. Other arguments, and errors, as of PolledSource."""

    def __init__(
        self,
        id: str,
        entry: ModbusEntry,
        client: "PymodbusClient",
        clock: Callable[[], float] = time.monotonic,
        start_polling: StartPollingFn = PollingThread,
    ):
        self._id, self._entry, self._client, self._clock = id, entry, client, clock
        self._refused: dict[str, str] = {}
        self._alive: tuple[float, float] | None = None
        """The controller's counter, and since when it has this value."""
        empty = ServiceReading(racks=(RackSample(id=id, equipment="CDU"),))
        super().__init__(entry.url, entry.interval_s, client, empty, clock, start_polling)

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
        return self._empty if self._is_stopped() else super().read()

    def _is_stopped(self) -> bool:
        limit_s = LATE_AFTER_INTERVALS * self._entry.interval_s
        return self._alive is not None and self._clock() - self._alive[1] > limit_s

    def ask(self) -> ServiceReading:
        """A point that the device refuses is missing; RefusalError where it refuses all."""
        entry = self._entry
        if entry.alive is not None:
            begin = self._clock()
            count = self._client.read(entry.alive)
            if self._alive is None or self._alive[0] != count:
                self._alive = count, begin
        found: dict[str, float | bool | None] = {}
        refused: dict[str, str] = {}
        for column, point in entry.points.items():
            try:
                count = self._client.read(point)
            except RefusalError as error:
                refused[column] = str(error)
                continue
            value = check_liquid_value(column, to_base_unit(point, count, find_units(column)))
            found[column] = value if value is None or column not in STATE_COLUMNS else bool(value)
        if refused and len(refused) == len(entry.points):
            raise RefusalError(next(iter(refused.values())))
        self._refused = refused
        return ServiceReading(racks=(RackSample(id=self._id, equipment="CDU", **found),))  # type: ignore[arg-type]


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
        self._client.close()  # type: ignore[no-untyped-call]

    def _ask(self, call: Callable[[], object], point: RegisterPoint) -> object:
        try:
            if not self._client.connected and not self._client.connect():  # type: ignore[no-untyped-call]
                raise ServiceError("cannot be reached")
            answer = call()
        except (self._errors, OSError) as error:
            self._client.close()  # type: ignore[no-untyped-call]
            raise ServiceError(f"does not answer ({str(error) or type(error).__name__})") from None
        if answer.isError():  # type: ignore[attr-defined]
            code = getattr(answer, "exception_code", None)
            raise RefusalError(f"refuses {point.table} {point.address} (Modbus exception {code})")
        return answer
