"""Readings of nodes as metrics in Prometheus's text format: own names with base units, and dcgm-exporter's names, with
which dashboards that people have already work. A value that is missing is left out."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phalanx.fleet.telemetry.prometheus import DCGM_FIELDS
from phalanx.fleet.telemetry.sample import SLOW_REASON_LABELS, DeviceSample, NodeSample

if TYPE_CHECKING:
    from prometheus_client import Metric

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
    "pcie_sent_bytes_per_s": ("pcie_sent_bytes_per_second", "Sent to the host"),
    "pcie_received_bytes_per_s": ("pcie_received_bytes_per_second", "Received from the host"),
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
    "disk_read_bytes_total": ("disk_read_bytes_total", "Read from disks"),
    "disk_written_bytes_total": ("disk_written_bytes_total", "Written to disks"),
    "network_sent_bytes_total": ("network_sent_bytes_total", "Sent to networks"),
    "network_received_bytes_total": ("network_received_bytes_total", "Received from networks"),
}
"""Names and helps of a host's values; each name follows `phalanx_node_`."""
DCGM_LABELS = ("gpu", "UUID", "device", "modelName", "Hostname")

NodeReadings = Mapping[str, NodeSample]
"""The newest sample of each node."""


def render_metrics(readings: NodeReadings, more: Iterable["Metric"] = ()) -> bytes:
    """The page of these nodes, with further metrics behind theirs."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Collector([*build_node_metrics(readings), *more]))
    return generate_latest(registry)


def build_node_metrics(readings: NodeReadings) -> Iterator["Metric"]:
    """The metrics of nodes and their devices."""
    for column, (name, help) in HOST_METRICS.items():
        rows = [((node,), getattr(sample.host, column)) for node, sample in readings.items()]
        yield from _build_metric(f"phalanx_node_{name}", help, ("node",), rows)
    estimates = [((node,), float(sample.host.cpu_power_is_estimate)) for node, sample in readings.items()]
    yield from _build_metric("phalanx_node_cpu_power_is_estimate", "1: CPU power is estimated", ("node",), estimates)
    ages = [((node,), sample.time) for node, sample in readings.items()]
    yield from _build_metric("phalanx_node_read_time_seconds", "When the node was read, unix seconds", ("node",), ages)
    for column, (name, help) in DEVICE_METRICS.items():
        device_rows = [(_own_labels(node, device), getattr(device, column)) for node, device in _devices(readings)]
        yield from _build_metric(f"phalanx_device_{name}", help, ("node", "device", "name"), device_rows)
    yield from _build_slow_reasons(readings)
    yield from _build_aliases(readings)


def _build_slow_reasons(readings: NodeReadings) -> Iterator["Metric"]:
    rows = [
        ((*_own_labels(node, device), label), float(reason in device.slow_reasons))
        for node, device in _devices(readings)
        if device.slow_reasons is not None
        for reason, label in SLOW_REASON_LABELS.items()
    ]
    labels = ("node", "device", "name", "reason")
    yield from _build_metric("phalanx_device_slow", "1: clocks are low because of this reason", labels, rows)


def _build_aliases(readings: NodeReadings) -> Iterator["Metric"]:
    """The same under dcgm-exporter's names, units and labels."""
    seen: set[str] = set()
    for name, (column, factor) in DCGM_FIELDS.items():
        if column in seen:  # older and newer names of one value: the first is what dashboards ask for
            continue
        seen.add(column)
        rows = [
            (labels, float(value) / factor)
            for labels, device in _label_for_dcgm(readings)
            if (value := getattr(device, column)) is not None
        ]
        yield from _build_metric(name, f"As of dcgm-exporter; see {column}", DCGM_LABELS, rows)


def _label_for_dcgm(readings: NodeReadings) -> Iterator[tuple[tuple[str, ...], DeviceSample]]:
    for node, sample in readings.items():
        for index, device in enumerate(sample.devices):
            yield (str(index), device.id, f"nvidia{index}", device.name, node), device


def _devices(readings: NodeReadings) -> Iterator[tuple[str, DeviceSample]]:
    for node, sample in readings.items():
        for device in sample.devices:
            yield node, device


def _own_labels(node: str, device: DeviceSample) -> tuple[str, ...]:
    return node, device.id, device.name


def _build_metric(
    name: str, help: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], float | None]]
) -> Iterator["Metric"]:
    """A gauge, or a counter where the name ends in `_total`; none without a value."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    make: Any = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    metric: Metric = make(name, help, labels=labels)
    for values, value in rows:
        if value is not None:
            metric.add_metric(list(values), float(value))  # type: ignore[attr-defined]
    if metric.samples:
        yield metric


class _Collector:
    """Metrics that are there already, for a registry."""

    def __init__(self, metrics: list["Metric"]):
        self._metrics = metrics

    def collect(self) -> Iterator["Metric"]:
        """All of them."""
        return iter(self._metrics)
