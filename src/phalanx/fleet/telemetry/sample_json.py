"""Samples as JSON values and back, as they travel from an agent to a server. Missing values are left out."""

from dataclasses import fields
from typing import Any

from phalanx.fleet.telemetry.sample import DeviceSample, HostSample, NodeSample, SlowReason
from phalanx.fleet.telemetry.sample_limits import MAX_DEVICES, MAX_NAME_CHARS, check_sample_value
from phalanx.std_streams import escape_control_chars

SAMPLES_PATH = "/samples"
"""Where an agent sends them."""
TEXT_FIELDS = {"id", "name"}
FIELD_NAMES = {kind: frozenset(each.name for each in fields(kind)) for kind in (HostSample, DeviceSample)}


def to_json(sample: NodeSample) -> dict[str, Any]:
    """A sample as JSON values."""
    return {
        "time": sample.time,
        "host": _values_of(sample.host),
        "devices": [_values_of(device) for device in sample.devices],
    }


def from_json(found: Any) -> NodeSample:
    """The sample of such values, without those that no sensor gives. An Exception where they are none."""
    host = _read_values(HostSample, found["host"])
    host["cpu_power_is_estimate"] = bool(host.get("cpu_power_is_estimate", False))
    return NodeSample(
        time=float(found["time"]),
        host=HostSample(**host),
        devices=tuple(_read_device(each) for each in found["devices"][:MAX_DEVICES]),
    )


def _read_device(found: Any) -> DeviceSample:
    values = _read_values(DeviceSample, found)
    if (reasons := values.get("slow_reasons")) is not None:
        values["slow_reasons"] = SlowReason(int(reasons) & sum(SlowReason))
    return DeviceSample(id=_read_text(found["id"]), name=_read_text(found.get("name", "")), **values)


def _read_text(value: object) -> str:
    """One line that can be written as UTF-8."""
    text = str(value)[:MAX_NAME_CHARS].encode(errors="backslashreplace").decode()
    return escape_control_chars(text)


def _values_of(value: HostSample | DeviceSample) -> dict[str, Any]:
    found = {name: getattr(value, name) for name in FIELD_NAMES[type(value)]}
    return {name: each for name, each in found.items() if each is not None and each is not False}


def _read_values(kind: type[HostSample | DeviceSample], found: Any) -> dict[str, Any]:
    known = FIELD_NAMES[kind]
    values = {name: float(each) for name, each in found.items() if name in known and name not in TEXT_FIELDS}
    return {name: each for name, each in values.items() if check_sample_value(name, each) is not None}
