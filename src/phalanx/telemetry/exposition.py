"""Readings of nodes as metrics in Prometheus's text format: own names with base units, and dcgm-exporter's names, with
which dashboards that people have already work. A value that is missing is left out."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from phalanx.telemetry.sample import SLOW_REASON_LABELS, DeviceSample, NodeSample

if TYPE_CHECKING:
    from prometheus_client import Metric


@dataclass(frozen=True)
class MetricDefinition:
    """A gauge, or a counter where the name ends in `_total`."""

    name: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def is_counter(self) -> bool:
        """Whether it only grows, but for restarts at zero."""
        return self.name.endswith("_total")

    def build(self, rows: Iterable[tuple[Sequence[str], float | None]]) -> Iterator["Metric"]:
        """The metric with a row of values of labels, and a value, each; None is left out. Nothing without a value."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        make: Any = CounterMetricFamily if self.is_counter else GaugeMetricFamily
        metric: Metric = make(self.name, self.help, labels=self.labels)
        for texts, value in rows:
            if value is not None:
                # A path or a name that is no UTF-8 has its other bytes as escapes.
                encodable = [text.encode(errors="backslashreplace").decode() for text in texts]
                metric.add_metric(encodable, float(value))  # type: ignore[attr-defined]
        if metric.samples:
            yield metric


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
}
"""Names of metrics, the fields of a sample that they give, and the factor to base units."""

DEVICE_METRICS = {
    "power_instant_w": ("power_instant_watts", "Power over milliseconds"),
    "power_mean_w": ("power_watts", "Mean power over about a second"),
    "power_cap_w": ("power_cap_watts", "Power cap that the device enforces"),
    "energy_joules": ("energy_joules_total", "Energy since the driver started"),
    "core_temperature_c": ("temperature_celsius", "Core temperature"),
    "memory_temperature_c": ("memory_temperature_celsius", "Memory temperature"),
    "thermal_margin_c": ("temperature_margin_kelvins", "Kelvins up to the temperature from which it slows down"),
    "core_clock_hz": ("clock_hertz", "Core clock"),
    "memory_clock_hz": ("memory_clock_hertz", "Memory clock"),
    "utilization": ("utilization_ratio", "Share of time in which a kernel ran, 0 to 1"),
    "memory_used_bytes": ("memory_used_bytes", "Memory in use"),
    "memory_size_bytes": ("memory_size_bytes", "Memory"),
    "ecc_corrected_total": ("ecc_corrected_errors_total", "Memory errors that were corrected"),
    "ecc_uncorrected_total": ("ecc_uncorrected_errors_total", "Memory errors that could not be corrected"),
    "xid": ("xid", "Number of the newest Xid error; 0 before the first"),
    "xids_total": ("xid_errors_total", "Xid errors since the agent started"),
    "pcie_replays_total": ("pcie_replays_total", "PCIe transfers that were repeated"),
    "nvlink_sent_bytes_total": ("nvlink_sent_bytes_total", "Sent over NVLink"),
    "nvlink_received_bytes_total": ("nvlink_received_bytes_total", "Received over NVLink"),
    "nvlink_errors_total": ("nvlink_errors_total", "Errors of NVLink"),
}
"""Names and helps of a device's values; each name follows `phalanx_device_`."""
HOST_METRICS = {
    "cpu_energy_joules": ("cpu_energy_joules_total", "Energy of all CPU packages"),
    "cpu_power_w": ("cpu_power_watts", "Power of all CPU packages; see phalanx_node_cpu_power_is_estimate"),
    "node_power_w": ("power_watts", "Power at the supplies of the node, by its management controller"),
    "cpu_temperature_c": ("cpu_temperature_celsius", "Temperature of the warmest CPU package"),
    "inlet_temperature_c": ("inlet_temperature_celsius", "Temperature of the air or liquid that comes in"),
    "cpu_utilization": ("cpu_utilization_ratio", "Share of the cores that is busy, 0 to 1"),
    "memory_used_bytes": ("memory_used_bytes", "Memory in use"),
    "memory_size_bytes": ("memory_size_bytes", "Memory"),
}
"""Names and helps of a host's values; each name follows `phalanx_node_`."""
DEVICE_LABELS = ("node", "device", "name")
_HOST_DEFINITIONS = {
    column: MetricDefinition(f"phalanx_node_{name}", help, ("node",)) for column, (name, help) in HOST_METRICS.items()
}
_DEVICE_DEFINITIONS = {
    column: MetricDefinition(f"phalanx_device_{name}", help, DEVICE_LABELS)
    for column, (name, help) in DEVICE_METRICS.items()
}
CPU_POWER_IS_ESTIMATE = MetricDefinition("phalanx_node_cpu_power_is_estimate", "1: CPU power is estimated", ("node",))
READ_TIME = MetricDefinition("phalanx_node_read_time_seconds", "When the node was read, unix seconds", ("node",))
DEVICE_SLOW = MetricDefinition(
    "phalanx_device_slow", "1: clocks are low because of this reason", (*DEVICE_LABELS, "reason")
)
DCGM_LABELS = ("gpu", "UUID", "device", "modelName", "Hostname")

NodeReadings = Mapping[str, NodeSample]
"""The newest sample of each node."""


def render_families(metrics: Iterable["Metric"]) -> bytes:
    """The page of these metrics."""
    from prometheus_client import generate_latest

    registry: Any = SimpleNamespace(collect=lambda: metrics)  # all that is asked of a registry
    return generate_latest(registry)


def list_node_metrics() -> list[MetricDefinition]:
    """The metrics of nodes and their devices, without dcgm-exporter's names."""
    return [*_HOST_DEFINITIONS.values(), CPU_POWER_IS_ESTIMATE, READ_TIME, *_DEVICE_DEFINITIONS.values(), DEVICE_SLOW]


def build_node_metrics(readings: NodeReadings) -> Iterator["Metric"]:
    """The metrics of nodes and their devices that have a value, also under dcgm-exporter's names."""
    for column, host_metric in _HOST_DEFINITIONS.items():
        yield from host_metric.build(((node,), getattr(sample.host, column)) for node, sample in readings.items())
    estimates = [((node,), float(sample.host.cpu_power_is_estimate)) for node, sample in readings.items()]
    yield from CPU_POWER_IS_ESTIMATE.build(estimates)
    yield from READ_TIME.build(((node,), sample.time) for node, sample in readings.items())
    for column, device_metric in _DEVICE_DEFINITIONS.items():
        yield from device_metric.build((labels, getattr(device, column)) for labels, device in _label_devices(readings))
    yield from DEVICE_SLOW.build(
        ((*labels, label), float(reason in device.slow_reasons))
        for labels, device in _label_devices(readings)
        if device.slow_reasons is not None
        for reason, label in SLOW_REASON_LABELS.items()
    )
    yield from _build_aliases(readings)


def _build_aliases(readings: NodeReadings) -> Iterator["Metric"]:
    """The same under dcgm-exporter's names, units and labels."""
    seen: set[str] = set()
    for name, (column, factor) in DCGM_FIELDS.items():
        if column in seen:  # older and newer names of one value: the first is what dashboards ask for
            continue
        seen.add(column)
        rows = [
            ((str(index), device.id, f"nvidia{index}", device.name, node), float(value) / factor)
            for node, sample in readings.items()
            for index, device in enumerate(sample.devices)
            if (value := getattr(device, column)) is not None
        ]
        yield from MetricDefinition(name, f"As of dcgm-exporter; see {column}", DCGM_LABELS).build(rows)


def _label_devices(readings: NodeReadings) -> Iterator[tuple[tuple[str, ...], DeviceSample]]:
    for node, sample in readings.items():
        for device in sample.devices:
            yield (node, device.id, device.name), device
