"""Parts of Redfish resources: links, states, numbers. A value that is null, absent, disabled or a code is None."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from phalanx_fleet.telemetry.polling import AccessError, RefusalError
from phalanx_fleet.telemetry.service_reading import read_number

if TYPE_CHECKING:
    from phalanx_fleet.telemetry.redfish import SushyClient

Resource = Mapping[str, object]

SERVICE_ROOT = "/redfish/v1/"
BLANK_POWERS_W = frozenset((2**15 - 1, 2**16 - 1, 2**31 - 1, 2**32 - 1))
"""The largest numbers of a controller's types: "no value"."""
MAX_TEMPERATURE_C = 200.0
"""Above it is a code, such as 255."""


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
