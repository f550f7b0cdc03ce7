"""Read the accelerators of nodes from a metrics endpoint: dcgm-exporter's, or any with its names.

dcgm-exporter renews values every 30 s by default, prints huge numbers for "no value", and may freeze until it is
restarted: then the energy counters do not move, and no value of it is taken. A Prometheus server has the same names
under `/federate`, with the time of each value.
"""

import http.client
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any

from phalanx.std_streams import escape_control_chars
from phalanx.telemetry.exposition import DCGM_FIELDS
from phalanx.telemetry.rollup import DeviceChecker
from phalanx.telemetry.sample import DeviceSample, HostSample, NodeSample, SlowReason, SourceUnavailableError
from phalanx_fleet.telemetry.service_reading import ServiceReading

FETCH_TIMEOUT_S = 2.0
"""Until something more of a page arrives."""
PAGE_TIMEOUT_S = 10.0
"""For all of it: an exporter that hangs may send a byte a second."""
READ_BYTES = 1 << 20
MAX_PAGE_BYTES = 64 << 20
RENEWAL_S = 30.0
"""dcgm-exporter's default interval."""
LATE_AFTER_RENEWALS = 3
"""A value that has a time of its own is missing when it is older."""
NEGATIVE_COLUMNS = ("thermal_margin_c",)
"""What may be below zero."""
BLANK_FROM = float(2**47)
"""DCGM's blank codes begin here (DCGM_FP64_BLANK); those of 64-bit integers begin at 0x7ffffffffffffff0."""
INT32_BLANKS = range(0x7FFFFFF0, 0x80000000)
PROXYLESS_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Nodes are reached without a proxy."""
MAX_DEVICES = 64
"""Of a node, with parts of devices; also names of devices that a node may ever have had."""
MAX_NAME_CHARS = 128
_LIMITS_BY_NAME = {
    "_w": (0.0, 1e6),
    "thermal_margin_c": (-300.0, 300.0),
    "_temperature_c": (-100.0, 500.0),
    "_hz": (0.0, 1e12),
    "utilization": (0.0, 1.0),
    "cpu_utilization": (0.0, 1.0),
    "failed_fans": (0.0, 1e3),
    "xid": (0.0, 1e6),
}
"""By the name of a value, or its unit."""
_OTHER_LIMITS = (0.0, 1e21)
"""Of counters, and of bytes."""
TEXT_FIELDS = {"id", "name"}
FIELD_NAMES = {kind: frozenset(each.name for each in fields(kind)) for kind in (HostSample, DeviceSample)}


def fetch_page(url: str) -> str:
    """The text at `url`. OSError where it is not answered in time, ValueError for no such address."""
    try:
        with PROXYLESS_OPENER.open(url, timeout=FETCH_TIMEOUT_S) as response:
            page, until = b"", time.monotonic() + PAGE_TIMEOUT_S
            while len(page) < MAX_PAGE_BYTES and (part := response.read1(READ_BYTES)):
                page += part
                if time.monotonic() > until:
                    raise TimeoutError
            if response.length or not page.endswith(b"\n"):  # a number that is cut off looks like another one
                raise OSError("the answer is cut off")
            return str(page.decode(errors="replace"))
    except http.client.InvalidURL as error:
        raise ValueError(str(error)) from error
    except http.client.HTTPException as error:
        raise OSError("the answer is cut off, or is no HTTP") from error


class PrometheusSource:
    """The accelerators that a metrics endpoint lists.

    Args:
        url: Such as http://node1:9400/metrics, or http://prometheus:9090/federate?match[]={Hostname="node1"}.
        now: Returns seconds since the epoch, for values that carry their time.
        fetch: Returns the text of a page, or raises OSError.
        renewal_s: Seconds between new values there.

    Raises SourceUnavailableError where the endpoint does not answer at first; later its devices are missing.
    """

    def __init__(
        self,
        url: str,
        now: Callable[[], float] = time.time,
        fetch: Callable[[str], str] = fetch_page,
        renewal_s: float = RENEWAL_S,
    ):
        self._url, self._now, self._fetch, self._renewal_s = url, now, fetch, renewal_s
        self._checker = DeviceChecker()
        self.name = url
        self.problems: list[str] = []
        try:
            found = self._read_page()
        except (OSError, ValueError) as error:
            raise SourceUnavailableError(f"{url}: {describe_fetch_error(error)}; is the exporter running?") from error
        if not found:
            names = ", ".join(sorted(DCGM_FIELDS)[:2])
            raise SourceUnavailableError(f"{url}: has no metric of an accelerator, such as {names}")

    def read(self) -> ServiceReading:
        """Read the page once. No devices where it does not answer, with the reason in `problems`."""
        try:
            reading = ServiceReading(self._read_page(), renewal_s=self._renewal_s)
            self.problems = []
            return reading
        except (OSError, ValueError) as error:
            self.problems = [f"{self._url}: {describe_fetch_error(error)}"]
            return ServiceReading()

    def close(self) -> None:
        """Nothing is held."""

    def _read_page(self) -> tuple[DeviceSample, ...]:
        from prometheus_client.parser import text_string_to_metric_families

        families, now = text_string_to_metric_families(self._fetch(self._url)), self._now()
        late_after_s = LATE_AFTER_RENEWALS * self._renewal_s
        found = read_dcgm_metrics((each for family in families for each in family.samples), now, late_after_s)
        # where the exporter has frozen, its other values are old ones, too
        return tuple(
            DeviceSample(id=each.id, name=each.name) if self._checker.is_frozen(each, now, self._renewal_s) else each
            for each in found
        )


def read_dcgm_metrics(
    metrics: Iterable[Any], now: float, late_after_s: float = LATE_AFTER_RENEWALS * RENEWAL_S
) -> tuple[DeviceSample, ...]:
    """The devices of metric samples (name, labels, value, timestamp), in the order of their appearance."""
    devices: dict[str, DeviceSample] = {}
    oldest = now - late_after_s
    for metric in metrics:
        name = metric.name.removesuffix("_total")  # which the parser adds to counters
        if name not in DCGM_FIELDS:
            continue
        id = metric.labels.get("UUID") or metric.labels.get("uuid")
        if not id:
            continue
        sample = devices.get(id) or DeviceSample(id=id, name=metric.labels.get("modelName", ""))
        column, factor = DCGM_FIELDS[name]
        devices[id] = replace(sample, **{column: _read_value(column, metric, factor, oldest)})  # type: ignore[arg-type]
    return tuple(devices.values())


def _read_value(column: str, metric: Any, factor: float, oldest: float) -> float | SlowReason | None:
    value = float(metric.value)
    if not math.isfinite(value) or value >= BLANK_FROM or value in INT32_BLANKS:
        return None
    if (value < 0 and column not in NEGATIVE_COLUMNS) or (metric.timestamp is not None and metric.timestamp < oldest):
        return None
    if column == "slow_reasons":
        return SlowReason(int(value) & sum(SlowReason))
    return check_sample_value(column, value * factor)


def describe_fetch_error(error: Exception) -> str:
    """Why a page was not read, in words."""
    if isinstance(error, urllib.error.HTTPError):
        return f"answers with status {error.code}"
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, TimeoutError):
        return "does not answer in time"
    return str(reason.strerror if isinstance(reason, OSError) and reason.strerror else reason)


def read_sample(found: Any) -> NodeSample:
    """The sample of such values, without those that no sensor gives. An Exception where they are none."""
    host = _read_values(HostSample, found["host"])
    host["cpu_power_is_estimate"] = bool(host.get("cpu_power_is_estimate", False))
    return NodeSample(
        time=float(found["time"]),
        host=HostSample(**host),
        devices=tuple(_read_device(each) for each in found.get("devices", ())[:MAX_DEVICES]),
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


def _read_values(kind: type[HostSample | DeviceSample], found: Any) -> dict[str, Any]:
    known = FIELD_NAMES[kind]
    values = {name: float(each) for name, each in found.items() if name in known and name not in TEXT_FIELDS}
    return {name: each for name, each in values.items() if check_sample_value(name, each) is not None}


def check_sample_value(column: str, value: float) -> float | None:
    """Return the value; None where no sensor of this kind gives it."""
    unit = next((unit for unit in ("_temperature_c", "_w", "_hz") if column.endswith(unit)), column)
    low, high = _LIMITS_BY_NAME.get(column) or _LIMITS_BY_NAME.get(unit) or _OTHER_LIMITS
    return value if math.isfinite(value) and low <= value <= high else None
