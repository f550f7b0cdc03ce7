"""Read a node's power at its supplies, temperatures and fans from its management controller (BMC), by Redfish.

A controller takes from tenths of a second to many seconds for an answer, so a thread asks it, and a reading has an age.

EnvironmentMetrics, PowerSubsystem and ThermalSubsystem are read where a controller serves them, else the older Power
and Thermal, which are all that many controllers have.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Protocol, Self

from pydantic import Field

from phalanx.cluster.spec import StrictModel
from phalanx.errors import UsageError
from phalanx.telemetry.sample import HostSample, SourceUnavailableError
from phalanx_fleet.telemetry.credentials import Credentials, check_ca_file, find_credentials, parse_service_url
from phalanx_fleet.telemetry.service_reading import (
    AccessError,
    PolledSource,
    PollingThread,
    RefusalError,
    ServiceError,
    ServiceReading,
    StartPollingFn,
    read_number,
    sum_of_all,
)

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
FIELD_LABELS = {
    "node_power_w": "node power",
    "inlet_temperature_c": "inlet temperature",
    "cpu_temperature_c": "CPU temperature",
    "failed_fans": "state of fans",
}
SENSOR_LINKS = ("EnvironmentMetrics", "PowerSubsystem", "ThermalSubsystem", "Power", "Thermal")
POWER_LINKS = ("PowerSubsystem", "Power")
INLET_CONTEXTS = ("Intake",)
CPU_CONTEXTS = ("CPU", "CPUSubsystem")
"""Values of PhysicalContext."""
Resource = Mapping[str, object]

SERVICE_ROOT = "/redfish/v1/"
BLANK_POWERS_W = frozenset((2**15 - 1, 2**16 - 1, 2**31 - 1, 2**32 - 1))
"""The largest numbers of a controller's types: "no value"."""
MAX_TEMPERATURE_C = 200.0
"""Above it is a code, such as 255."""


class ControllerOptions(StrictModel):
    """How a management controller is read."""

    url: str
    """Such as https://node1-bmc.example.com."""
    interval_s: float = Field(10.0, gt=0, le=1e6)
    """Seconds from one reading to the next. A value is missing when it is older than three."""
    timeout_s: float = Field(20.0, gt=0, le=3600)
    """Seconds for an answer to one request."""
    verify_tls: bool = True
    ca_file: Path | None = None
    """Certificates that sign the controller's; without it, those of the system."""
    credentials_file: Path | None = None
    """In the form of .netrc; else PHALANX_REDFISH_USER and PHALANX_REDFISH_PASSWORD."""


class RedfishOptions(ControllerOptions):
    """How a node's controller is read."""

    chassis: str = ""
    """Id of the chassis that is the node; needed where several outermost ones have sensors."""


class ResourceReader(Protocol):
    """Reads what is wanted of one controller."""

    def read_service(self) -> ServiceReading:
        """Read all values. A value that is refused, null, absent or a blank code is None."""
        ...


class ControllerSource(PolledSource):
    """What a controller serves. `make_reader` finds where it has its values. Others as of PolledSource."""

    def __init__(
        self,
        options: ControllerOptions,
        client: "SushyClient",
        make_reader: "Callable[[SushyClient], ResourceReader]",
        empty: ServiceReading,
        clock: Callable[[], float],
        start_polling: StartPollingFn,
    ):
        self._client, self._make_reader = client, make_reader
        self._reader: ResourceReader | None = None
        super().__init__(options.url, options.interval_s, client, empty, clock, start_polling)

    def ask(self) -> ServiceReading:
        try:
            self._reader = self._reader or self._make_reader(self._client)
            return self._reader.read_service()
        except ServiceError:
            self._reader = None  # after a restart its resources may be others
            raise


class RedfishSource(ControllerSource):
    """The power, temperatures and fans of one node. Arguments and errors as of PolledSource."""

    def __init__(
        self,
        options: RedfishOptions,
        client: "SushyClient",
        clock: Callable[[], float] = time.monotonic,
        start_polling: StartPollingFn = PollingThread,
    ):
        empty = ServiceReading(host=HostSample())
        super().__init__(options, client, lambda c: ChassisReader(c, options.chassis), empty, clock, start_polling)
        first = self.read().host
        lacking = [label for column, label in FIELD_LABELS.items() if getattr(first, column) is None]
        self.problems = [f"{options.url}: serves no {', no '.join(lacking)}"] if lacking else []


def open_redfish(options: RedfishOptions, environment: Mapping[str, str] = os.environ) -> RedfishSource:
    """Open the controller that `options` names.

    Raises:
        SourceUnavailableError: it does not answer, or refuses.
        UsageError: its address or credentials are wrong.
    """
    return RedfishSource(options, SushyClient.open(options, environment))


class SushyClient:
    """Requests to a controller through sushy: a session, renewed when it expires, or basic authentication."""

    @classmethod
    def open(cls, options: ControllerOptions, environment: Mapping[str, str] = os.environ) -> Self:
        """Return a client of the controller that `options` names. UsageError where its address or credentials are
        wrong."""
        address = parse_service_url("REDFISH", options.url, ("https", "http"))
        check_ca_file("REDFISH", options.ca_file)
        credentials = find_credentials("REDFISH", address.hostname or "", options.credentials_file, environment)
        if credentials is not None and address.scheme == "http":
            raise UsageError(f"{options.url}: a password is not sent without TLS; use https://")
        return cls(options, credentials)

    def __init__(self, options: ControllerOptions, credentials: Credentials | None):
        try:
            import sushy
            import sushy.auth
            import sushy.connector
        except ImportError:
            raise SourceUnavailableError("Redfish: sushy is not installed: pip install 'phalanx-fleet'") from None
        self._errors = sushy.exceptions
        self._options, self._auth, self._is_logged_in = options, None, False
        self._connector = sushy.connector.Connector(
            options.url,
            verify=str(options.ca_file) if options.ca_file and options.verify_tls else options.verify_tls,
            server_side_retries=1,  # the next reading is the next try
            default_request_timeout=options.timeout_s,
            connect_timeout=CONNECT_TIMEOUT_S,
        )
        self._connector._session.trust_env = False  # neither a proxy nor ~/.netrc; sushy has no option for it
        if credentials is not None:
            self._auth = sushy.auth.SessionOrBasicAuth(credentials.user, credentials.password)

    def get(self, path: str) -> Resource:
        found = self._ask(lambda: self._connector.get(path).json(), path)
        if not isinstance(found, dict):
            raise RefusalError(f"{path} is no resource of Redfish")
        return found

    def close(self) -> None:
        try:
            if self._auth is not None:
                self._auth.close()
        except self._errors.SushyError:
            logger.debug("telemetry: %s: the session was not ended", self._options.url)
        self._connector.close()

    def _ask(self, call: Callable[[], object], path: str) -> object:
        """Call, and log in before the first time."""
        try:
            if self._auth is not None and not self._is_logged_in:
                self._log_in()
            return call()
        except self._errors.HTTPError as error:
            if error.status_code == HTTPStatus.UNAUTHORIZED:
                raise AccessError(self._describe_refusal()) from None
            raise RefusalError(f"answers with status {error.status_code} to {path}") from None
        except self._errors.ConnectionError as error:
            raise ServiceError(_describe_connection_error(str(error))) from None
        except (self._errors.SushyError, ValueError, TypeError, AttributeError):  # sushy trusts the form of errors
            raise RefusalError(f"{path} is no resource of Redfish") from None

    def _describe_refusal(self) -> str:
        if self._auth is not None:
            return "refuses the user or the password"
        return "wants PHALANX_REDFISH_USER and PHALANX_REDFISH_PASSWORD, or credentials_file"

    def _log_in(self) -> None:
        import sushy

        sushy.Sushy(self._options.url, auth=self._auth, connector=self._connector)
        self._is_logged_in = True


def _describe_connection_error(text: str) -> str:
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return "its certificate is not trusted; set ca_file to the one that signs it"
    if "timed out" in text:
        return "does not answer in time"
    if "refused" in text:
        return "connection refused"
    return "cannot be reached"


class ChassisReader:
    """Reads one chassis. Its constructor finds where the chassis has its values, which takes several requests."""

    def __init__(self, client: SushyClient, chassis_id: str = ""):
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

    def read_service(self) -> ServiceReading:
        """Read all values, as those of a host."""
        return ServiceReading(host=self.read())

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
            return sum_of_all(read_power(get_resource(each, "InputPowerWatts"), "Reading") for each in metrics)
        power = self._get(self._power)
        for control in get_list(power, "PowerControl")[:1]:  # the first one is the chassis, others are parts of it
            if "PowerConsumedWatts" in control:
                return read_power(control, "PowerConsumedWatts")
        supplies = [each for each in get_list(power, "PowerSupplies") if read_state(each) != "Absent"]
        return sum_of_all(read_power(each, "PowerInputWatts") for each in supplies)

    def _find_supply_metrics(self, power: Resource) -> list[str]:
        """The paths of all supplies' metrics; none unless each supply has them."""
        supplies = [self._get(path) for path in list_member_paths(self._follow(power, "PowerSupplies"))]
        paths = [get_link(each, "Metrics") for each in supplies if read_state(each) != "Absent"]
        return [path for path in paths if path is not None] if None not in paths else []

    def _follow(self, resource: Resource, key: str) -> Resource:
        return self._get(get_link(resource, key))

    def _get(self, path: str | None) -> Resource:
        return get_optional(self._client, path)


def _find_chassis(client: SushyClient, chassis_id: str) -> Resource:
    """The chassis of this id; without an id the outermost one that has sensors."""
    collection = get_link(client.get(SERVICE_ROOT), "Chassis")
    paths = [] if collection is None else list_member_paths(client.get(collection))
    if chassis_id:
        for path in paths:
            if path.rstrip("/").rsplit("/", 1)[-1] == chassis_id:
                return client.get(path)
        raise ServiceError(f"has no chassis {chassis_id}; it has {list_names(paths)}")
    found = {path: client.get(path) for path in paths}
    found = {path: each for path, each in found.items() if any(key in each for key in SENSOR_LINKS)}
    for is_preferred in (_is_outermost, _has_power_supplies):
        found = {path: each for path, each in found.items() if is_preferred(each)} or found
    if not found:
        raise ServiceError(f"has no chassis with sensors among {list_names(paths)}")
    if len(found) > 1:
        raise ServiceError(f"has several chassis with sensors; set chassis to one of {list_names(found)}")
    return next(iter(found.values()))


def _is_outermost(chassis: Resource) -> bool:
    return not get_resource(chassis, "Links").get("ContainedBy")


def _has_power_supplies(chassis: Resource) -> bool:
    return any(key in chassis for key in POWER_LINKS)


def _find_temperatures(entries: Iterable[Resource], contexts: Sequence[str]) -> list[float]:
    found = [read_temperature(entry) for entry in entries if entry.get("PhysicalContext") in contexts]
    return [value for value in found if value is not None]


def list_names(paths: Iterable[str]) -> str:
    """Join the ids at the end of paths."""
    return ", ".join(path.rstrip("/").rsplit("/", 1)[-1] for path in paths) or "none"


def list_member_paths(collection: Resource) -> list[str]:
    links = [get_path(each.get("@odata.id")) for each in get_list(collection, "Members")]
    return [path for path in links if path is not None]


def get_link(resource: Resource, key: str) -> str | None:
    return get_path(get_resource(resource, key).get("@odata.id"))


def get_path(value: object) -> str | None:
    """Return a path of this controller. An address of another host is none: the session's token would be sent there."""
    is_path = isinstance(value, str) and value.startswith("/") and not value.startswith("//")
    return str(value) if is_path else None


def get_resource(resource: Resource, key: str) -> Resource:
    """Return the object of a key; an empty one where there is none."""
    value = resource.get(key)
    return value if isinstance(value, dict) else {}


def get_list(resource: Resource, key: str) -> Sequence[Resource]:
    """Return the objects of a list."""
    value = resource.get(key)
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def read_state(entry: Resource) -> str:
    """Return Status.State; Enabled without one."""
    return str(get_resource(entry, "Status").get("State", "Enabled"))


def read_enabled_number(entry: Resource, key: str) -> float | None:
    """Read a number of a sensor that is enabled."""
    return read_number(entry.get(key)) if read_state(entry) == "Enabled" else None


def read_power(entry: Resource, key: str) -> float | None:
    """Read watts. A controller answers while its node is off, too; then its own draw is there: 0 is no measurement."""
    value = read_enabled_number(entry, key)
    return None if value is None or value <= 0 or value in BLANK_POWERS_W else value


def read_temperature(entry: Resource) -> float | None:
    """Read degrees Celsius. Sensors of processors that are off read 0."""
    value = read_enabled_number(entry, "Reading" if "Reading" in entry else "ReadingCelsius")
    return None if value is None or not 0 < value <= MAX_TEMPERATURE_C else value


def find_first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def get_optional(client: "SushyClient", path: str | None) -> Resource:
    """Return a resource; an empty one where there is none, or the controller refuses this one. Raises
    AccessError where it refuses the user."""
    if path is None:
        return {}
    try:
        return client.get(path)
    except AccessError:
        raise
    except RefusalError:
        return {}


def list_members(client: "SushyClient", resource: Resource, key: str) -> list[Resource]:
    paths = list_member_paths(get_optional(client, get_link(resource, key)))
    return [get_optional(client, path) for path in paths]


def count_failed_rotors(rotors: Iterable[tuple[Resource, Resource]]) -> float | None:
    """Count fans or pumps that do not turn or are reported as failed; None where there is none, or one of unknown
    state. `rotors`: each with what has its speed."""
    states = [_is_rotor_failed(rotor, speed) for rotor, speed in rotors if read_state(rotor) != "Absent"]
    return None if not states or None in states else float(sum(map(bool, states)))


def _is_rotor_failed(rotor: Resource, speed: Resource) -> bool | None:
    turns = find_first(read_enabled_number(speed, "Reading"), read_enabled_number(speed, "SpeedRPM"))
    if get_resource(rotor, "Status").get("Health") == "Critical" or turns == 0:
        return True
    return None if turns is None else False
