"""NVML readings as samples: units, what is missing, and faults. The stand-in is `helpers/fake_nvml.py`."""

import pytest

from fake_nvml import FakeGpu, FakeNvml
from phalanx.telemetry.gpu_sources import NvmlSource
from phalanx.telemetry.sample import DeviceSample, SlowReason, SourceUnavailableError


def read_one(gpu: FakeGpu, t: float = 10.0) -> DeviceSample:
    (sample,) = NvmlSource(FakeNvml(gpu, clock=lambda: t)).read().devices
    return sample


def test_readings_are_in_base_units() -> None:
    values = {
        "MEMORY_TEMP": 46,
        "TEMPERATURE_SLOWDOWN_TLIMIT": -2,
        "NVLINK_THROUGHPUT_DATA_TX": 3,
        "ECC_SBE_VOL_TOTAL": 5,
    }
    found = read_one(FakeGpu(values=values))
    assert found.id == "GPU-a"
    assert (found.power_instant_w, found.power_mean_w, found.power_cap_w) == (500.0, 500.0, 700.0)
    assert found.energy_joules == pytest.approx(1000 + 10 * 500)
    assert (found.core_clock_hz, found.memory_clock_hz) == (1485e6, 3201e6)
    assert (found.core_temperature_c, found.memory_temperature_c, found.thermal_margin_c) == (56, 46, 29)
    assert (found.utilization, found.memory_used_bytes) == (0.99, 60 * 2**30)
    assert found.slow_reasons == SlowReason.POWER_CAP
    assert (found.nvlink_sent_bytes_total, found.ecc_corrected_total) == (3072, 5)


def test_the_mean_follows_a_load_late_and_the_instant_at_once() -> None:
    found = read_one(FakeGpu(load_w=lambda t: 700.0 if t < 10 else 100.0, mean_s=1.0), t=10.5)
    assert found.power_instant_w == 100.0
    assert found.power_mean_w == pytest.approx(400.0)


def test_without_the_fields_of_power_a_reading_is_no_mean() -> None:
    found = read_one(FakeGpu(unsupported={"POWER_AVERAGE", "POWER_INSTANT"}))
    assert (found.power_instant_w, found.power_mean_w) == (500.0, None)


def test_what_is_not_supported_is_missing_and_not_zero() -> None:
    found = read_one(FakeGpu(unsupported={"TOTAL_ENERGY_CONSUMPTION"}))
    assert found.energy_joules is None
    assert found.memory_temperature_c is None
    assert found.nvlink_errors_total is None


@pytest.mark.parametrize("blank", [2**32 - 1, 2**64 - 1])
def test_blank_codes_are_missing(blank: int) -> None:
    found = read_one(FakeGpu(values={"MEMORY_TEMP": blank, "ECC_DBE_VOL_TOTAL": blank}, power_mw=blank))
    assert (found.memory_temperature_c, found.ecc_uncorrected_total, found.power_w) == (None, None, None)


def test_xid_errors_that_the_driver_does_not_report_are_missing_and_not_zero() -> None:
    source = NvmlSource(FakeNvml(FakeGpu(unsupported={"nvmlDeviceRegisterEvents"}), FakeGpu("GPU-b")))
    assert [(device.xid, device.xids_total) for device in source.read().devices] == [(None, None), (0, 0)]
    assert "Xid errors of GPU-a are not reported" in source.problems[0]


def test_the_margin_of_older_gpus_is_up_to_their_threshold() -> None:
    assert read_one(FakeGpu(unsupported={"nvmlDeviceGetMarginTemperature"})).thermal_margin_c == 89 - 56


def test_a_lost_gpu_has_a_sample_without_values() -> None:
    lost, other = FakeGpu("GPU-a"), FakeGpu("GPU-b")
    source = NvmlSource(FakeNvml(lost, other))
    lost.is_lost = True
    first, second = source.read().devices
    assert (first.id, first.power_w, first.energy_joules, first.core_temperature_c) == ("GPU-a", None, None, None)
    assert second.power_w == 500.0


def test_a_gpu_that_is_lost_before_is_a_problem() -> None:
    source = NvmlSource(FakeNvml(FakeGpu("GPU-a", is_lost=True), FakeGpu("GPU-b")))
    assert [device.id for device in source.read().devices] == ["GPU-b"]
    assert "GPU 0 cannot be queried" in source.problems[0]


def test_xid_errors_are_counted_and_the_newest_is_kept() -> None:
    gpu = FakeGpu(xids=[31, 79])
    source = NvmlSource(FakeNvml(gpu))
    assert [(device.xids_total, device.xid) for device in source.read().devices] == [(2, 79)]
    gpu.xids.append(48)
    assert [(device.xids_total, device.xid) for device in source.read().devices] == [(3, 48)]


@pytest.mark.parametrize(
    ("library", "text"),
    [(FakeNvml(init_error="Driver Not Loaded"), "NVML: Driver Not Loaded"), (FakeNvml(), "the driver lists no GPU")],
)
def test_without_driver_or_gpu_it_is_unavailable(library: FakeNvml, text: str) -> None:
    with pytest.raises(SourceUnavailableError, match=text):
        NvmlSource(library)
    assert library.num_open == 0
