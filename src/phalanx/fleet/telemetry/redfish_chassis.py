"""Read a node's power, temperatures and fans from the Redfish resources of its chassis.

EnvironmentMetrics, PowerSubsystem and ThermalSubsystem are read where a controller serves them, else the older Power
and Thermal, which are all that many controllers have.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from phalanx.fleet.telemetry.json_values import read_number
from phalanx.fleet.telemetry.sample import HostSample

Resource = Mapping[str, object]

SERVICE_ROOT = "/redfish/v1/"
SENSOR_LINKS = ("EnvironmentMetrics", "PowerSubsystem", "ThermalSubsystem", "Power", "Thermal")
POWER_LINKS = ("PowerSubsystem", "Power")
INLET_CONTEXTS = ("Intake",)
CPU_CONTEXTS = ("CPU", "CPUSubsystem")
"""Values of PhysicalContext."""
BLANK_POWERS_W = frozenset((2**15 - 1, 2**16 - 1, 2**31 - 1, 2**32 - 1))
"""The largest numbers of a controller's types: "no value"."""
MAX_TEMPERATURE_C = 200.0
"""Above it is a code, such as 255."""


class RedfishClient(Protocol):
    """Reads the resources of one controller."""

    def get(self, path: str) -> Resource:
        """Read a resource. RedfishStatusError where it is refused, RedfishUnreachableError without an answer."""
        ...

    def close(self) -> None:
        """End the session at the controller."""
        ...


class RedfishStatusError(Exception):
    """The controller refuses a resource; the text says why."""


class RedfishAccessError(RedfishStatusError):
    """The controller refuses the credentials."""


class RedfishUnreachableError(Exception):
    """The controller does not answer; the text says why."""


class RedfishLayoutError(Exception):
    """The controller has no chassis with sensors, or several; the text says which."""


class ChassisReader:
    """Reads one chassis. Its constructor finds where the chassis has its values, which takes several requests."""

    def __init__(self, client: RedfishClient, chassis_id: str = ""):
        self._client = client
        chassis = _find_chassis(client, chassis_id)
        self.chassis_id = str(chassis.get("Id", ""))
        power, thermal = self._follow(chassis, "PowerSubsystem"), self._follow(chassis, "ThermalSubsystem")
        environment = self._follow(chassis, "EnvironmentMetrics")
        self._environment = _get_link(chassis, "EnvironmentMetrics")
        self._has_power = bool(_get_resource(environment, "PowerWatts"))
        self._has_fans = bool(_get_list(environment, "FanSpeedsPercent"))
        self._supplies = [] if self._has_power else self._find_supply_metrics(power)
        self._thermal_metrics = _get_link(thermal, "ThermalMetrics")
        self._power = None if self._has_power or self._supplies else _get_link(chassis, "Power")
        has_temperatures = bool(_get_list(self._get(self._thermal_metrics), "TemperatureReadingsCelsius"))
        self._thermal = None if has_temperatures and self._has_fans else _get_link(chassis, "Thermal")

    def read(self) -> HostSample:
        """Read all values. A value that is refused, null, absent or a blank code is None."""
        environment = self._get(self._environment if self._has_power or self._has_fans else None)
        metrics, thermal = self._get(self._thermal_metrics), self._get(self._thermal)
        temperatures = _get_list(metrics, "TemperatureReadingsCelsius") or _get_list(thermal, "Temperatures")
        intake = _get_resource(_get_resource(metrics, "TemperatureSummaryCelsius"), "Intake")
        return HostSample(
            node_power_w=self._read_power(environment),
            inlet_temperature_c=_first(_read_temperature(intake), *_find_temperatures(temperatures, INLET_CONTEXTS)),
            cpu_temperature_c=max(_find_temperatures(temperatures, CPU_CONTEXTS), default=None),
            failed_fans=_count_failed_fans(_get_list(environment, "FanSpeedsPercent") or _get_list(thermal, "Fans")),
        )

    def _read_power(self, environment: Resource) -> float | None:
        if self._has_power:
            return _read_power(_get_resource(environment, "PowerWatts"), "Reading")
        if self._supplies:
            metrics = [self._get(path) for path in self._supplies]
            return _sum_all(_read_power(_get_resource(each, "InputPowerWatts"), "Reading") for each in metrics)
        power = self._get(self._power)
        for control in _get_list(power, "PowerControl")[:1]:  # the first one is the chassis, others are parts of it
            if "PowerConsumedWatts" in control:
                return _read_power(control, "PowerConsumedWatts")
        supplies = [each for each in _get_list(power, "PowerSupplies") if _read_state(each) != "Absent"]
        return _sum_all(_read_power(each, "PowerInputWatts") for each in supplies)

    def _find_supply_metrics(self, power: Resource) -> list[str]:
        """The paths of all supplies' metrics; none unless each supply has them."""
        supplies = [self._get(path) for path in _get_members(self._follow(power, "PowerSupplies"))]
        paths = [_get_link(each, "Metrics") for each in supplies if _read_state(each) != "Absent"]
        return [path for path in paths if path is not None] if None not in paths else []

    def _follow(self, resource: Resource, key: str) -> Resource:
        return self._get(_get_link(resource, key))

    def _get(self, path: str | None) -> Resource:
        """A resource; an empty one where there is none, or the controller refuses this one."""
        if path is None:
            return {}
        try:
            return self._client.get(path)
        except RedfishAccessError:
            raise
        except RedfishStatusError:
            return {}


def _find_chassis(client: RedfishClient, chassis_id: str) -> Resource:
    """The chassis of this id; without an id the outermost one that has sensors."""
    collection = _get_link(client.get(SERVICE_ROOT), "Chassis")
    paths = [] if collection is None else _get_members(client.get(collection))
    if chassis_id:
        for path in paths:
            if path.rstrip("/").rsplit("/", 1)[-1] == chassis_id:
                return client.get(path)
        raise RedfishLayoutError(f"has no chassis {chassis_id}; it has {_list_names(paths)}")
    found = {path: client.get(path) for path in paths}
    found = {path: each for path, each in found.items() if any(key in each for key in SENSOR_LINKS)}
    for is_preferred in (_is_outermost, _has_power_supplies):
        found = {path: each for path, each in found.items() if is_preferred(each)} or found
    if not found:
        raise RedfishLayoutError(f"has no chassis with sensors among {_list_names(paths)}")
    if len(found) > 1:
        raise RedfishLayoutError(f"has several chassis with sensors; set chassis to one of {_list_names(found)}")
    return next(iter(found.values()))


def _is_outermost(chassis: Resource) -> bool:
    return not _get_resource(chassis, "Links").get("ContainedBy")


def _has_power_supplies(chassis: Resource) -> bool:
    return any(key in chassis for key in POWER_LINKS)


def _list_names(paths: Iterable[str]) -> str:
    return ", ".join(path.rstrip("/").rsplit("/", 1)[-1] for path in paths) or "none"


def _get_members(collection: Resource) -> list[str]:
    links = [_get_path(each.get("@odata.id")) for each in _get_list(collection, "Members")]
    return [path for path in links if path is not None]


def _get_link(resource: Resource, key: str) -> str | None:
    return _get_path(_get_resource(resource, key).get("@odata.id"))


def _get_path(value: object) -> str | None:
    """A path of this controller. An address of another host is none: the session's token would be sent there."""
    is_path = isinstance(value, str) and value.startswith("/") and not value.startswith("//")
    return str(value) if is_path else None


def _get_resource(resource: Resource, key: str) -> Resource:
    value = resource.get(key)
    return value if isinstance(value, dict) else {}


def _get_list(resource: Resource, key: str) -> Sequence[Resource]:
    value = resource.get(key)
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _read_state(entry: Resource) -> str:
    return str(_get_resource(entry, "Status").get("State", "Enabled"))


def _read_number(entry: Resource, key: str) -> float | None:
    """A number of a sensor that is enabled."""
    return read_number(entry.get(key)) if _read_state(entry) == "Enabled" else None


def _read_power(entry: Resource, key: str) -> float | None:
    """Watts. A controller answers while its node is off, too; then its own draw is there: 0 is no measurement."""
    value = _read_number(entry, key)
    return None if value is None or value <= 0 or value in BLANK_POWERS_W else value


def _read_temperature(entry: Resource) -> float | None:
    """Degrees Celsius. Sensors of processors that are off read 0."""
    value = _read_number(entry, "Reading" if "Reading" in entry else "ReadingCelsius")
    return None if value is None or not 0 < value <= MAX_TEMPERATURE_C else value


def _find_temperatures(entries: Iterable[Resource], contexts: Sequence[str]) -> list[float]:
    found = [_read_temperature(entry) for entry in entries if entry.get("PhysicalContext") in contexts]
    return [value for value in found if value is not None]


def _count_failed_fans(fans: Iterable[Resource]) -> float | None:
    """Fans that do not turn or are reported as failed; None where there is no fan, or one of unknown state."""
    present = [fan for fan in fans if _read_state(fan) != "Absent"]
    states = [_is_fan_failed(fan) for fan in present]
    return None if not states or None in states else float(sum(map(bool, states)))


def _is_fan_failed(fan: Resource) -> bool | None:
    speed = _first(_read_number(fan, "Reading"), _read_number(fan, "SpeedRPM"))
    if _get_resource(fan, "Status").get("Health") == "Critical" or speed == 0:
        return True
    return None if speed is None else False


def _sum_all(values: Iterable[float | None]) -> float | None:
    """The sum; None without values, or where one of them is missing: a part of the supplies is not the node."""
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) if known and len(known) == len(found) else None


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
