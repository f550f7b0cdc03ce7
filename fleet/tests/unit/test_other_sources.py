"""AMD's driver and metrics endpoints as samples: units, blank values, late values, services that fail."""

import urllib.error

import pytest

from fake_amdsmi import FakeAmdsmi
from phalanx.telemetry.gpu_sources import AmdsmiSource
from phalanx.telemetry.sample import SlowReason, SourceUnavailableError
from phalanx_fleet.telemetry.prometheus import PrometheusSource

MI300X = {
    "get_gpu_device_uuid": "amd-uuid",
    "get_gpu_asic_info": {"market_name": "AMD Instinct MI300X OAM"},
    "get_power_info": {"current_socket_power": 712, "average_socket_power": "N/A"},
    "get_power_cap_info": {"power_cap": 750_000_000},
    "get_energy_count": {"energy_accumulator": 1_000_000, "counter_resolution": 15.3},
    "get_gpu_metrics_info": {
        "temperature_hotspot": 84,
        "temperature_mem": 70,
        "current_gfxclk": 2100,
        "current_uclk": 1300,
        "average_gfx_activity": 97,
        "pcie_replay_count_acc": 2**64 - 1,
        "xgmi_read_data_acc": [1, 2, "N/A"],
        "xgmi_write_data_acc": ["N/A", "N/A"],
    },
    "get_temp_metric": 100,
    "get_gpu_vram_usage": {"vram_total": 196_592, "vram_used": 1024},
    "get_gpu_total_ecc_count": {"correctable_count": 3, "uncorrectable_count": 0},
    "get_violation_status": {"active_ppt_pwr": True, "active_socket_thrm": False, "active_hbm_thrm": "N/A"},
}


def test_amd_readings_are_in_base_units() -> None:
    (found,) = AmdsmiSource(FakeAmdsmi(MI300X)).read().devices
    assert (found.id, found.name) == ("amd-uuid", "AMD Instinct MI300X OAM")
    assert (found.power_instant_w, found.power_mean_w, found.power_cap_w) == (712, None, 750)
    assert found.energy_joules == pytest.approx(15.3)
    assert (found.core_temperature_c, found.memory_temperature_c, found.thermal_margin_c) == (84, 70, 16)
    assert (found.core_clock_hz, found.utilization, found.memory_used_bytes) == (2.1e9, 0.97, 2**30)
    assert found.slow_reasons == SlowReason.POWER_CAP
    assert (found.nvlink_received_bytes_total, found.nvlink_sent_bytes_total) == (3 * 1024, None)
    assert found.pcie_replays_total is None


def test_an_amd_gpu_that_answers_nothing_has_a_sample_without_values() -> None:
    (found,) = AmdsmiSource(FakeAmdsmi({})).read().devices
    assert (found.id, found.power_w, found.energy_joules, found.slow_reasons) == ("amd-0", None, None, None)


@pytest.mark.parametrize(
    ("library", "text"),
    [(FakeAmdsmi(init_error="no driver"), "amdsmi: no driver"), (FakeAmdsmi(), "the driver lists no GPU")],
)
def test_without_amd_driver_or_gpu_it_is_unavailable(library: FakeAmdsmi, text: str) -> None:
    with pytest.raises(SourceUnavailableError, match=text):
        AmdsmiSource(library)
    assert library.num_open == 0


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
