"""The power limit of a whole node, set through its management controller (BMC) by Redfish.

Newer controllers have it in EnvironmentMetrics (PowerLimitWatts with SetPoint and ControlMode), older ones in Power
(PowerControl with PowerLimit). The controller keeps the limit when this process ends, and over a restart of the node.
"""

import os
from collections.abc import Mapping
from typing import Protocol

from phalanx.errors import UsageError
from phalanx.telemetry.sample import SourceUnavailableError
from phalanx_fleet.power.devices import CapError, CapLimits, to_device_units
from phalanx_fleet.telemetry.json_values import read_number
from phalanx_fleet.telemetry.redfish import RedfishOptions, SushyClient
from phalanx_fleet.telemetry.redfish_values import (
    SERVICE_ROOT,
    RedfishClient,
    RedfishStatusError,
    RedfishUnreachableError,
    Resource,
    get_link,
    get_list,
    list_member_paths,
)

MAX_TIMEOUT_S = 5.0
"""A lease cannot end while the controller is waited for."""
ENFORCED_MODES = ("Automatic", "Override")


class RedfishWriter(RedfishClient, Protocol):
    """Reads and changes the resources of one controller."""

    def patch(self, path: str, values: Mapping[str, object]) -> None:
        """Change values. Raises what `get` raises."""


class SushyWriter(SushyClient):
    """Requests to a controller through sushy, changes included."""

    def patch(self, path: str, values: Mapping[str, object]) -> None:
        """Change values of a resource, as it was read last."""
        etag = self.get(path).get("@odata.etag")
        try:
            self._connector.patch(path, data=dict(values), etag=etag)
        except self._errors.HTTPError as error:
            raise RedfishStatusError(f"refuses to change {path} with status {error.status_code}") from None
        except self._errors.SushyError:
            raise RedfishUnreachableError("does not answer") from None


class RedfishCapDevice:
    """The limit of one chassis.

    Raises CapError where the controller does not answer, or has no chassis with a limit, or several.
    """

    def __init__(self, client: RedfishWriter, url: str, chassis: str = "", max_cap_w: float | None = None):
        self._client, self._url, self._max_cap_w = client, url, max_cap_w
        found = {path: where for path in self._list_chassis(chassis) if (where := self._find_limit(path)) is not None}
        if len(found) != 1:
            names = ", ".join(path.rstrip("/").rsplit("/", 1)[-1] for path in found) or "none"
            raise CapError(f"Redfish: {url}: expected one chassis with a power limit, found {names}; set `chassis`")
        self._path, self._is_legacy = next(iter(found.values()))
        self.id = f"{url}{self._path}"

    def read_limits(self) -> CapLimits:
        """Read what the controller takes; after a restart it has no limit, so the most is its default."""
        limit = self._read_limit()
        high = read_number(limit.get("AllowableMax")) or self._max_cap_w
        if high is None:
            raise CapError(f"Redfish: {self.id}: the controller has no AllowableMax; set max_cap")
        return CapLimits(read_number(limit.get("AllowableMin")) or 0.0, high, high)

    def read_cap_w(self) -> float:
        """Read the limit; where it is not enforced, the most that the node draws."""
        limit = self._read_limit()
        watts = read_number(limit.get("LimitInWatts" if self._is_legacy else "SetPoint"))
        is_enforced = self._is_legacy or limit.get("ControlMode", "Automatic") in ENFORCED_MODES
        return watts if watts and is_enforced else self.read_limits().max_w

    def read_draw_w(self) -> float | None:
        """Read the power of the node."""
        if self._is_legacy:
            return read_number(self._read_control().get("PowerConsumedWatts"))
        reading = self._get(self._path).get("PowerWatts")
        return read_number(reading.get("Reading")) if isinstance(reading, dict) else None

    def read_temperature_c(self) -> float | None:
        """Return None: telemetry reads it."""
        return None

    def set_cap_w(self, cap_w: float) -> None:
        """Set the limit and enforce it; at the most that the controller takes, end it."""
        is_limit = cap_w < self.read_limits().max_w
        limit = (
            {"SetPoint": to_device_units(cap_w), "ControlMode": "Automatic"}
            if is_limit
            else {"ControlMode": "Disabled"}
        )
        values: dict[str, object] = {"PowerLimitWatts": limit}
        if self._is_legacy:
            values = {"PowerControl": [{"PowerLimit": {"LimitInWatts": to_device_units(cap_w) if is_limit else None}}]}
        try:
            self._client.patch(self._path, values)
        except (RedfishStatusError, RedfishUnreachableError) as error:
            raise CapError(f"Redfish: {self._url}: {error}") from error

    def _list_chassis(self, name: str) -> list[str]:
        paths = list_member_paths(self._get(get_link(self._get(SERVICE_ROOT), "Chassis") or SERVICE_ROOT))
        return [path for path in paths if not name or path.rstrip("/").rsplit("/", 1)[-1] == name]

    def _find_limit(self, chassis_path: str) -> tuple[str, bool] | None:
        """Where a chassis has its limit, and whether in the older form."""
        chassis = self._get(chassis_path)
        metrics, power = get_link(chassis, "EnvironmentMetrics"), get_link(chassis, "Power")
        if metrics is not None and isinstance(self._get(metrics).get("PowerLimitWatts"), dict):
            return metrics, False
        if power is not None and isinstance(_first_control(self._get(power)).get("PowerLimit"), dict):
            return power, True
        return None

    def _read_control(self) -> Resource:
        return _first_control(self._get(self._path))

    def _read_limit(self) -> Resource:
        limit = self._read_control().get("PowerLimit") if self._is_legacy else None
        limit = limit or self._get(self._path).get("PowerLimitWatts")
        if not isinstance(limit, dict):
            raise CapError(f"Redfish: {self.id}: the power limit is gone")
        return limit

    def _get(self, path: str) -> Resource:
        try:
            return self._client.get(path)
        except (RedfishStatusError, RedfishUnreachableError) as error:
            raise CapError(f"Redfish: {self._url}: {error}") from error


def open_redfish_device(
    options: RedfishOptions, max_cap_w: float | None = None, environment: Mapping[str, str] = os.environ
) -> RedfishCapDevice:
    """Open the controller that `options` names. Raises CapError."""
    options = options.model_copy(update={"timeout_s": min(options.timeout_s, MAX_TIMEOUT_S)})
    try:
        client = SushyWriter.open(options, environment)
    except (UsageError, SourceUnavailableError) as error:
        raise CapError(str(error)) from error
    return RedfishCapDevice(client, options.url, options.chassis, max_cap_w)


def _first_control(power: Resource) -> Resource:
    return next(iter(get_list(power, "PowerControl")), {})
