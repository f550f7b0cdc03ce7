"""What services outside a node give: readings of the node and of its rack, with their age; and how they are asked, once
or again and again, in a thread of its own."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeVar

from phalanx.telemetry.sample import SourceReading, SourceUnavailableError, TelemetrySource

LIQUID_LIMITS: dict[str, tuple[float, float]] = {
    "supply_temperature_c": (-40.0, 150.0),
    "return_temperature_c": (-40.0, 150.0),
    "set_point_c": (-40.0, 150.0),
    "flow_l_per_min": (0.0, 30_000.0),
    "differential_pressure_pa": (-1e6, 1e7),
    "valve_position": (0.0, 1.0),
    "power_w": (0.0, 1e7),
    "failed_pumps": (0.0, 100.0),
    "has_leak": (0.0, 1.0),
    "has_leak_sensor_fault": (0.0, 1.0),
}
STATE_COLUMNS = ("has_leak", "has_leak_sensor_fault")
"""Of which 0 is no and 1 is yes; anything else is no value."""
logger = logging.getLogger(__name__)
STOP_TIMEOUT_S = 5.0
"""Seconds to wait for a call that has begun: a service may never answer."""
LATE_AFTER_INTERVALS = 3
"""A value that is older is missing."""
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True, kw_only=True)
class RackSample:
    """The liquid and power of a rack or of a coolant distribution unit (CDU), by the building management system, by
    Modbus or by Redfish. Of a CDU: its secondary side, which the racks are on."""

    id: str
    """Of a rack its location id, which building and cluster share; of a CDU the building's object id."""
    name: str = ""
    equipment: Literal["rack", "CDU"] = "rack"
    supply_temperature_c: float | None = None
    return_temperature_c: float | None = None
    flow_l_per_min: float | None = None
    differential_pressure_pa: float | None = None
    valve_position: float | None = None
    """0 closed, 1 open."""
    power_w: float | None = None
    has_leak: bool | None = None
    has_leak_sensor_fault: bool | None = None
    set_point_c: float | None = None
    """What the controller of a CDU holds its supply at."""
    failed_pumps: float | None = None
    """Pumps of a CDU that do not turn, or that it reports as failed."""
    age_s: float | None = None
    """Seconds since the oldest of these values was measured; None without any."""
    ages_s: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Of single values, where they are not all of one age."""


@dataclass(frozen=True, slots=True)
class ServiceReading(SourceReading):
    """What a service reads at one time: devices, parts of the host, racks."""

    racks: tuple[RackSample, ...] = ()
    host_age_s: float = 0.0
    """Seconds since the values of the host were measured: a service that answers slowly is asked in the background."""
    renewal_s: float = 0.0
    """Seconds between new values of devices where the service renews them more slowly than it is read; else 0."""


class ServiceSource(TelemetrySource, Protocol):
    """Reads a service."""

    def read(self) -> ServiceReading:
        """Read all values now. A value that cannot be read is None; the source itself never raises for that."""
        ...


def check_liquid_value(column: str, value: float | None) -> float | None:
    """Return the value; None where no sensor of this kind gives it."""
    low, high = LIQUID_LIMITS[column]
    if value is None or not math.isfinite(value) or not low <= value <= high:
        return None
    return None if column in STATE_COLUMNS and value not in (0.0, 1.0) else value


def read_number(value: object) -> float | None:
    """A number in the JSON of a service, which may be anything; None for all but a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def sum_of_all(values: Iterable[float | None]) -> float | None:
    """Return the sum; None without values."""
    known = take_all(values)
    return sum(known) if known else None


def take_all(values: Iterable[float | None]) -> list[float]:
    """Return the values; none where one is missing: the sum of some accelerators would be taken for that of all."""
    found = list(values)
    return [] if None in found else [value for value in found if value is not None]


def start_call(function: Callable[[], ValueT], name: str) -> "Future[ValueT]":
    """Call a function in a thread that ends with the process. `result` of the future raises what it raised."""
    future: Future[ValueT] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class PollingThread:
    """Calls `poll` each `interval_s` seconds until `stop`. A call that takes longer delays the next one; a quarter of
    the interval is always left between two."""

    def __init__(self, poll: Callable[[], None], interval_s: float, clock: Callable[[], float] = time.monotonic):
        self._poll, self._interval_s, self._clock = poll, interval_s, clock
        self._stop_requested = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry-poll", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop calling. A call that does not return in time is left behind."""
        self._stop_requested.set()
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.info("telemetry: a service did not answer for %g s", STOP_TIMEOUT_S)

    def _run(self) -> None:
        due = self._clock() + self._interval_s
        while not self._stop_requested.wait(max(self._interval_s / 4, due - self._clock())):
            due = self._clock() + self._interval_s
            try:
                self._poll()
            except Exception:  # the next call comes nevertheless: what polls must not end silently
                logger.exception("telemetry: a poll has failed")


class ServiceError(Exception):
    """A service does not answer, or not as expected; the text says why."""


class RefusalError(ServiceError):
    """A service refuses what it is asked for."""


class AccessError(RefusalError):
    """A service refuses its user."""


class ServiceClient(Protocol):
    """The connection to a service."""

    def close(self) -> None:
        """End it."""


StartPollingFn = Callable[[Callable[[], None], float], PollingThread]


class PolledSource:
    """The newest values of a service that takes long to answer. Subclasses `ask` it, and describe its `problems`.

    Args:
        url: Its address, for texts.
        interval_s: Seconds from one reading to the next.
        client: Is closed at the end.
        empty: What is read where values are late, or the service does not answer.
        clock: Seconds of a monotonic clock.
        start_polling: Calls a function at an interval in the background.

    Raises SourceUnavailableError where the service does not answer at first; later its values are missing.
    """

    def __init__(
        self,
        url: str,
        interval_s: float,
        client: ServiceClient,
        empty: ServiceReading,
        clock: Callable[[], float],
        start_polling: StartPollingFn,
    ):
        self.name, self._interval_s, self._service, self._empty, self._clock = url, interval_s, client, empty, clock
        self._is_refused, self._failure = False, ""
        try:
            self._newest: tuple[float, ServiceReading] | None = (clock(), self.ask())
        except ServiceError as error:
            client.close()
            raise SourceUnavailableError(f"{url}: {error}") from error
        self._polling = start_polling(self._poll, interval_s)

    def ask(self) -> ServiceReading:
        """Read all values. Raises ServiceError."""
        raise NotImplementedError

    def read(self) -> ServiceReading:
        """The newest values with their age; none of them where they are late."""
        newest = self._newest  # the polling thread may replace it
        if newest is None:
            return self._empty
        asked_at, reading = newest
        age_s = self._clock() - asked_at
        if age_s > LATE_AFTER_INTERVALS * self._interval_s:
            return replace(self._empty, host_age_s=age_s)
        racks = tuple(replace(rack, age_s=max(0.0, age_s)) for rack in reading.racks)
        return replace(reading, racks=racks, host_age_s=age_s)

    def close(self) -> None:
        self._polling.stop()
        self._service.close()

    def _poll(self) -> None:
        """Ask once. Where the service does not answer, all values are missing until it does."""
        if self._is_refused:
            return
        asked_at = self._clock()
        try:
            self._newest, self._failure = (asked_at, self.ask()), ""
        except AccessError as error:
            logger.warning("telemetry: %s: %s; it is asked no more, since this may lock the user", self.name, error)
            self._newest, self._is_refused = None, True
        except ServiceError as error:
            if self._newest is not None:
                logger.info("telemetry: %s: %s", self.name, error)
            self._newest, self._failure = None, str(error)
