"""Read a node's power, temperatures and fans from the Redfish resources of its chassis.

EnvironmentMetrics, PowerSubsystem and ThermalSubsystem are read where a controller serves them, else the older Power
and Thermal, which are all that many controllers have.
"""

from collections.abc import Iterable, Sequence

from phalanx.fleet.telemetry.redfish_values import (
    SERVICE_ROOT,
    RedfishClient,
    RedfishLayoutError,
    Resource,
    count_failed_rotors,
    find_first,
    get_link,
    get_list,
    get_optional,
    get_resource,
    list_member_paths,
    list_names,
    read_power,
    read_state,
    read_temperature,
    sum_all,
)
from phalanx.fleet.telemetry.sample import HostSample

SENSOR_LINKS = ("EnvironmentMetrics", "PowerSubsystem", "ThermalSubsystem", "Power", "Thermal")
POWER_LINKS = ("PowerSubsystem", "Power")
INLET_CONTEXTS = ("Intake",)
CPU_CONTEXTS = ("CPU", "CPUSubsystem")
"""Values of PhysicalContext."""


class ChassisReader:
    """Reads one chassis. Its constructor finds where the chassis has its values, which takes several requests."""

    def __init__(self, client: RedfishClient, chassis_id: str = ""):
        self._client = client
        chassis = _find_chassis(client, chassis_id)
        self.chassis_id = str(chassis.get("Id", ""))
        power, thermal = self._follow(chassis, "PowerSubsystem"), self._follow(chassis, "ThermalSubsystem")
        environment = self._follow(chassis, "EnvironmentMetrics")
        self._environment = get_link(chassis, "EnvironmentMetrics")
        self._has_power = bool(get_resource(environment, "PowerWatts"))
        self._has_fans = bool(get_list(environment, "FanSpeedsPercent"))
        self._supplies = [] if self._has_power else self._find_supply_metrics(power)
        self._thermal_metrics = get_link(thermal, "ThermalMetrics")
        self._power = None if self._has_power or self._supplies else get_link(chassis, "Power")
        has_temperatures = bool(get_list(self._get(self._thermal_metrics), "TemperatureReadingsCelsius"))
        self._thermal = None if has_temperatures and self._has_fans else get_link(chassis, "Thermal")

    def read(self) -> HostSample:
        """Read all values. A value that is refused, null, absent or a blank code is None."""
        environment = self._get(self._environment if self._has_power or self._has_fans else None)
        metrics, thermal = self._get(self._thermal_metrics), self._get(self._thermal)
        temperatures = get_list(metrics, "TemperatureReadingsCelsius") or get_list(thermal, "Temperatures")
        intake = get_resource(get_resource(metrics, "TemperatureSummaryCelsius"), "Intake")
        fans = get_list(environment, "FanSpeedsPercent") or get_list(thermal, "Fans")
        return HostSample(
            node_power_w=self._read_power(environment),
            inlet_temperature_c=find_first(read_temperature(intake), *_find_temperatures(temperatures, INLET_CONTEXTS)),
            cpu_temperature_c=max(_find_temperatures(temperatures, CPU_CONTEXTS), default=None),
            failed_fans=count_failed_rotors((each, each) for each in fans),
        )

    def _read_power(self, environment: Resource) -> float | None:
        if self._has_power:
            return read_power(get_resource(environment, "PowerWatts"), "Reading")
        if self._supplies:
            metrics = [self._get(path) for path in self._supplies]
            return sum_all(read_power(get_resource(each, "InputPowerWatts"), "Reading") for each in metrics)
        power = self._get(self._power)
        for control in get_list(power, "PowerControl")[:1]:  # the first one is the chassis, others are parts of it
            if "PowerConsumedWatts" in control:
                return read_power(control, "PowerConsumedWatts")
        supplies = [each for each in get_list(power, "PowerSupplies") if read_state(each) != "Absent"]
        return sum_all(read_power(each, "PowerInputWatts") for each in supplies)

    def _find_supply_metrics(self, power: Resource) -> list[str]:
        """The paths of all supplies' metrics; none unless each supply has them."""
        supplies = [self._get(path) for path in list_member_paths(self._follow(power, "PowerSupplies"))]
        paths = [get_link(each, "Metrics") for each in supplies if read_state(each) != "Absent"]
        return [path for path in paths if path is not None] if None not in paths else []

    def _follow(self, resource: Resource, key: str) -> Resource:
        return self._get(get_link(resource, key))

    def _get(self, path: str | None) -> Resource:
        return get_optional(self._client, path)


def _find_chassis(client: RedfishClient, chassis_id: str) -> Resource:
    """The chassis of this id; without an id the outermost one that has sensors."""
    collection = get_link(client.get(SERVICE_ROOT), "Chassis")
    paths = [] if collection is None else list_member_paths(client.get(collection))
    if chassis_id:
        for path in paths:
            if path.rstrip("/").rsplit("/", 1)[-1] == chassis_id:
                return client.get(path)
        raise RedfishLayoutError(f"has no chassis {chassis_id}; it has {list_names(paths)}")
    found = {path: client.get(path) for path in paths}
    found = {path: each for path, each in found.items() if any(key in each for key in SENSOR_LINKS)}
    for is_preferred in (_is_outermost, _has_power_supplies):
        found = {path: each for path, each in found.items() if is_preferred(each)} or found
    if not found:
        raise RedfishLayoutError(f"has no chassis with sensors among {list_names(paths)}")
    if len(found) > 1:
        raise RedfishLayoutError(f"has several chassis with sensors; set chassis to one of {list_names(found)}")
    return next(iter(found.values()))


def _is_outermost(chassis: Resource) -> bool:
    return not get_resource(chassis, "Links").get("ContainedBy")


def _has_power_supplies(chassis: Resource) -> bool:
    return any(key in chassis for key in POWER_LINKS)


def _find_temperatures(entries: Iterable[Resource], contexts: Sequence[str]) -> list[float]:
    found = [read_temperature(entry) for entry in entries if entry.get("PhysicalContext") in contexts]
    return [value for value in found if value is not None]
