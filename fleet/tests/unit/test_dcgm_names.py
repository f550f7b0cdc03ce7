"""Readings under dcgm-exporter's names."""

from prometheus_client.parser import text_string_to_metric_families

from phalanx.telemetry.exposition import build_node_metrics, render_families
from phalanx.telemetry.sample import DeviceSample, NodeSample, SlowReason
from phalanx_fleet.telemetry.prometheus import read_dcgm_metrics

DEVICE = DeviceSample(
    id="GPU-1",
    name="H100",
    power_mean_w=400.5,
    energy_joules=1e6,
    core_temperature_c=61.0,
    core_clock_hz=1.98e9,
    slow_reasons=SlowReason.POWER_CAP | SlowReason.SW_THERMAL,
    utilization=0.97,
    memory_used_bytes=float(2**30),
    xid=79.0,
)


def test_metrics_under_dcgm_exporters_names_are_read_back_as_the_same_devices() -> None:
    page = render_families(build_node_metrics({"node-1": NodeSample(1.0, devices=(DEVICE,))})).decode()
    samples = (each for family in text_string_to_metric_families(page) for each in family.samples)
    assert list(read_dcgm_metrics(samples, 0.0)) == [DEVICE]
