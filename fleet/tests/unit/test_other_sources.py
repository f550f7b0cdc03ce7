"""Metrics endpoints as samples: units, blank values, late values, services that fail."""

import urllib.error

import pytest

from phalanx.telemetry.sample import SlowReason, SourceUnavailableError
from phalanx_fleet.telemetry.prometheus import PrometheusSource

PAGE = """
# HELP DCGM_FI_DEV_POWER_USAGE Power draw (in W).
# TYPE DCGM_FI_DEV_POWER_USAGE gauge
DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-a",modelName="NVIDIA H100"} 688.25
DCGM_FI_DEV_POWER_USAGE{gpu="1",UUID="GPU-b",modelName="NVIDIA H100"} 9223372036854775794
# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION counter
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu="0",UUID="GPU-a",modelName="NVIDIA H100"} 6233211
DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-a",modelName="NVIDIA H100"} NaN
DCGM_FI_DEV_MEMORY_TEMP{gpu="0",UUID="GPU-a",modelName="NVIDIA H100"} 2147483632
DCGM_FI_DEV_CLOCKS_EVENT_REASONS{gpu="0",UUID="GPU-a",modelName="NVIDIA H100"} 68
DCGM_FI_DEV_SM_CLOCK{gpu="0",UUID="GPU-a",modelName="NVIDIA H100"} 1485 1000000000000
DCGM_FI_DEV_MEM_CLOCK{gpu="0",UUID="GPU-a",modelName="NVIDIA H100"} 2619 999000000000
node_load1 0.5
DCGM_FI_DEV_FB_USED{gpu="0"} 5
"""


def test_a_metrics_page_becomes_samples_and_blank_and_late_values_are_missing() -> None:
    source = PrometheusSource("http://n1:9400/metrics", lambda: 1_000_000_050.0, lambda url: PAGE)
    a, b = source.read().devices
    assert (a.id, a.name, a.power_mean_w, b.id, b.power_mean_w) == ("GPU-a", "NVIDIA H100", 688.25, "GPU-b", None)
    assert a.energy_joules == pytest.approx(6233.211)
    assert (a.core_temperature_c, a.memory_temperature_c) == (None, None)
    assert a.slow_reasons == SlowReason.POWER_CAP | SlowReason.HW_THERMAL
    assert (a.core_clock_hz, a.memory_clock_hz) == (1.485e9, None)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            urllib.error.URLError(ConnectionRefusedError(111, "Connection refused")),
            "Connection refused; is the exporter",
        ),
        (TimeoutError(), "does not answer in time"),
        (urllib.error.HTTPError("http://n1", 404, "Not Found", None, None), "answers with status 404"),  # type: ignore[arg-type]
        (ValueError("unknown url type: 'n1'"), "unknown url type"),
    ],
)
def test_an_endpoint_that_never_answers_is_unavailable(error: Exception, text: str) -> None:
    def fetch(url: str) -> str:
        raise error

    with pytest.raises(SourceUnavailableError, match=text):
        PrometheusSource("http://n1:9400/metrics", lambda: 0.0, fetch)


def test_an_endpoint_without_accelerators_is_unavailable() -> None:
    with pytest.raises(SourceUnavailableError, match="has no metric of an accelerator"):
        PrometheusSource("http://n1:9100/metrics", lambda: 0.0, lambda url: "node_load1 0.5\n")
