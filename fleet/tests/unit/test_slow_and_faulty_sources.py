"""What no source may give as a value: blank codes, frozen counters, resets, negative differences, late and null values.

Here through the sampler, for each source of devices; those of the host, of controllers and racks stand in their files.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fake_amdsmi import LoadedAmdsmi
from fake_exporter import FakeExporter
from fake_nvml import FakeGpu, FakeNvml
from phalanx.telemetry.gpu_sources import AmdsmiSource, NvmlSource
from phalanx.telemetry.record import NodeSampler
from phalanx.telemetry.rollup import CounterTotal, DeviceChecker
from phalanx.telemetry.sample import DeviceSample, TelemetrySource
from phalanx_fleet.telemetry.prometheus import PrometheusSource
from settable_clock import SettableClock

URL = "http://n1:9400/metrics"


def make_nvml(gpu: FakeGpu, clock: SettableClock) -> TelemetrySource:
    return NvmlSource(FakeNvml(gpu, clock=clock))


def make_amd(gpu: FakeGpu, clock: SettableClock) -> TelemetrySource:
    return AmdsmiSource(LoadedAmdsmi(FakeNvml(gpu, clock=clock)))


def make_prometheus(gpu: FakeGpu, clock: SettableClock) -> TelemetrySource:
    return PrometheusSource(URL, clock, FakeExporter(FakeNvml(gpu, clock=clock), interval_s=1.0).fetch, renewal_s=1.0)


every_source = pytest.mark.parametrize("make_source", [make_nvml, make_amd, make_prometheus])


def sample(source: TelemetrySource, clock: SettableClock, seconds: int) -> tuple[list[DeviceSample], float]:
    """The samples of each second, and the joules at the end."""
    sampler, found, energy = NodeSampler([source], "node", clock=clock, wall_clock=clock), [], CounterTotal()
    for clock.now in range(seconds):
        found += sampler.read().devices
        energy.add(found[-1].energy_joules)
    return found, energy.total


@every_source
@pytest.mark.parametrize(("reset_at", "seconds"), [(math.inf, 60), (30.5, 30 + 29)])
def test_energy_is_the_difference_of_the_counter_and_none_where_it_restarts(
    make_source: Callable[..., TelemetrySource], reset_at: float, seconds: int
) -> None:
    _, energy_j = sample(make_source(FakeGpu(reset_at=reset_at), clock := SettableClock()), clock, 61)
    assert energy_j == pytest.approx(seconds * 500)


@every_source
def test_a_frozen_counter_is_missing(make_source: Callable[..., TelemetrySource]) -> None:
    found, energy_j = sample(make_source(FakeGpu(frozen_since=20.0), clock := SettableClock()), clock, 40)
    assert [device.energy_joules is None for device in found] == [False] * 25 + [True] * 15
    assert energy_j == pytest.approx(20 * 500)


def sample_exporter(seconds: int, **faults: Any) -> list[DeviceSample]:
    clock = SettableClock()
    exporter = FakeExporter(FakeNvml(FakeGpu(), clock=clock))
    source = PrometheusSource(URL, clock, exporter.fetch)
    for name, value in faults.items():
        setattr(exporter, name, value)
    checker, found = DeviceChecker(), list[DeviceSample]()
    for clock.now in range(seconds):
        reading = source.read()
        found += [checker.check(device, clock.now, reading.renewal_s) for device in reading.devices]
    return found


def test_an_exporter_that_renews_its_values_every_30_s_is_not_frozen() -> None:
    energies = [device.energy_joules for device in sample_exporter(301)]
    assert None not in energies
    assert energies[-1] - energies[0] == pytest.approx(300 * 500)  # type: ignore[operator]


def test_an_exporter_that_has_frozen_has_no_values() -> None:
    found = sample_exporter(301, frozen_since=100.0)
    assert found[179].power_w == 500.0
    assert found[181] == DeviceSample(id="GPU-a", name="NVIDIA H100")


def test_values_that_carry_their_time_are_missing_when_they_are_late() -> None:
    found = sample_exporter(301, frozen_since=100.0, is_blank=True, has_times=True)
    assert found[180].core_temperature_c == 56
    assert found[181] == DeviceSample(id="GPU-a", name="NVIDIA H100")


def test_a_blank_energy_is_missing_and_power_is_there() -> None:
    found = sample_exporter(61, is_blank=True)
    assert {(device.energy_joules, device.power_w) for device in found} == {(None, 500.0)}


def test_an_exporter_that_is_down_has_no_devices() -> None:
    assert sample_exporter(10, is_down=True) == []


@pytest.mark.parametrize(("name", "column"), [("POWER_USAGE", "power_w"), ("CLOCKS_EVENT_REASONS", "slow_reasons")])
def test_negative_values_are_codes(name: str, column: str) -> None:
    page = f'DCGM_FI_DEV_GPU_TEMP_LIMIT{{UUID="a"}} -3\nDCGM_FI_DEV_{name}{{UUID="a"}} -1\n'
    (device,) = PrometheusSource(URL, SettableClock(), lambda url: page).read().devices
    assert (device.thermal_margin_c, getattr(device, column)) == (-3.0, None)


def test_a_second_source_of_a_device_does_not_hide_that_its_counter_is_frozen() -> None:
    clock = SettableClock()
    gpu, other = FakeGpu(frozen_since=5.0), FakeGpu(load_w=lambda t: 499.0, frozen_since=5.0)
    sampler = NodeSampler([make_nvml(gpu, clock), make_nvml(other, clock)], "node", clock=clock, wall_clock=clock)
    for clock.now in range(20):
        (device,) = sampler.read().devices
    assert replace(device, energy_joules=None) == device
    assert device.power_mean_w == 500.0
