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
from dataclasses import dataclass, replace
from typing import Any

from phalanx.fleet.telemetry.counters import FrozenCounterCheck
from phalanx.fleet.telemetry.sample import DeviceSample, SlowReason
from phalanx.fleet.telemetry.sample_limits import check_sample_value
from phalanx.fleet.telemetry.source import SourceReading, SourceUnavailableError

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
DCGM_FIELDS = {
    "DCGM_FI_DEV_POWER_USAGE": ("power_mean_w", 1.0),
    "DCGM_FI_DEV_POWER_USAGE_INSTANT": ("power_instant_w", 1.0),
    "DCGM_FI_DEV_POWER_MGMT_LIMIT": ("power_cap_w", 1.0),
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": ("energy_joules", 1e-3),
    "DCGM_FI_DEV_GPU_TEMP": ("core_temperature_c", 1.0),
    "DCGM_FI_DEV_MEMORY_TEMP": ("memory_temperature_c", 1.0),
    "DCGM_FI_DEV_GPU_TEMP_LIMIT": ("thermal_margin_c", 1.0),
    "DCGM_FI_DEV_SM_CLOCK": ("core_clock_hz", 1e6),
    "DCGM_FI_DEV_MEM_CLOCK": ("memory_clock_hz", 1e6),
    "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": ("slow_reasons", 1.0),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": ("slow_reasons", 1.0),
    "DCGM_FI_DEV_GPU_UTIL": ("utilization", 0.01),
    "DCGM_FI_DEV_FB_USED": ("memory_used_bytes", float(2**20)),
    "DCGM_FI_DEV_FB_TOTAL": ("memory_size_bytes", float(2**20)),
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": ("ecc_corrected_total", 1.0),
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": ("ecc_uncorrected_total", 1.0),
    "DCGM_FI_DEV_XID_ERRORS": ("xid", 1.0),
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": ("pcie_replays_total", 1.0),
    "DCGM_FI_PROF_PCIE_TX_BYTES": ("pcie_sent_bytes_per_s", 1.0),
    "DCGM_FI_PROF_PCIE_RX_BYTES": ("pcie_received_bytes_per_s", 1.0),
}
"""Names of metrics, the fields of a sample that they give, and the factor to base units."""
PROXYLESS_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Nodes are reached without a proxy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusOptions:
    """How a metrics endpoint is read."""

    url: str
    """Such as http://node1:9400/metrics, or http://prometheus:9090/federate?match[]={Hostname="node1"}."""
    renewal_s: float = RENEWAL_S
    """Seconds between new values there."""


def open_prometheus(options: PrometheusOptions) -> "PrometheusSource":
    """Open the endpoint that `options` names. SourceUnavailableError where it does not answer or has no accelerator."""
    return PrometheusSource(options.url, time.time, renewal_s=options.renewal_s)


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
    """The accelerators that a metrics endpoint lists. `fetch` returns the text of a page, or raises OSError.

    `now` returns seconds since the epoch, for values that carry their time. Raises SourceUnavailableError where the
    endpoint does not answer at first; later its devices are missing.
    """

    def __init__(
        self,
        url: str,
        now: Callable[[], float],
        fetch: Callable[[str], str] = fetch_page,
        renewal_s: float = RENEWAL_S,
    ):
        self._url, self._now, self._fetch, self._renewal_s = url, now, fetch, renewal_s
        self._checks: dict[str, FrozenCounterCheck] = {}
        self.name = url
        self.problems: list[str] = []
        try:
            found = self._read_page()
        except (OSError, ValueError) as error:
            raise SourceUnavailableError(f"{url}: {describe_fetch_error(error)}; is the exporter running?") from error
        if not found:
            names = ", ".join(sorted(DCGM_FIELDS)[:2])
            raise SourceUnavailableError(f"{url}: has no metric of an accelerator, such as {names}")

    def read(self) -> SourceReading:
        """Read the page once. No devices where it does not answer, with the reason in `problems`."""
        try:
            reading = SourceReading(self._read_page(), renewal_s=self._renewal_s)
            self.problems = []
            return reading
        except (OSError, ValueError) as error:
            self.problems = [f"{self._url}: {describe_fetch_error(error)}"]
            return SourceReading()

    def close(self) -> None:
        """Nothing is held."""

    def _read_page(self) -> tuple[DeviceSample, ...]:
        from prometheus_client.parser import text_string_to_metric_families

        families, now = text_string_to_metric_families(self._fetch(self._url)), self._now()
        late_after_s = LATE_AFTER_RENEWALS * self._renewal_s
        found = read_dcgm_metrics((each for family in families for each in family.samples), now, late_after_s)
        return tuple(self._check(device, now) for device in found)

    def _check(self, device: DeviceSample, now: float) -> DeviceSample:
        """The device; without values where the exporter has frozen: its other values are old ones, too."""
        check = self._checks.setdefault(device.id, FrozenCounterCheck())
        if check.is_frozen(device.energy_joules, device.power_w, now, self._renewal_s):
            return DeviceSample(id=device.id, name=device.name)
        return device


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
