"""Joules of a run: from counters, from power, and what is missing."""

import pytest

from phalanx.run.telemetry_minutes import NodeEnergy, NodeMinute, Rollups, ValueRollup
from phalanx.telemetry.rollup import add_minute_energy


def minute(host: Rollups, *devices: Rollups) -> NodeMinute:
    return NodeMinute(60.0, 60.0, 50, "n1", host, {str(number): device for number, device in enumerate(devices)})


def watts(column: str, mean: float) -> Rollups:
    return Rollups({column: ValueRollup(0.0, mean, 2 * mean, 50)})


@pytest.mark.parametrize(
    ("device", "joules", "missing_s"),
    [
        (Rollups(watts("power_mean_w", 300.0).values, {"energy_joules": 14_000.0}), 14_000.0, 0.0),
        (watts("power_mean_w", 300.0), 15_000.0, 0.0),
        (watts("power_instant_w", 100.0), 5_000.0, 0.0),
        (Rollups(), 0.0, 50.0),
    ],
    ids=["counter", "mean power", "power of the moment", "nothing"],
)
def test_a_counter_counts_before_power_and_without_both_seconds_are_missing(
    device: Rollups, joules: float, missing_s: float
) -> None:
    found = add_minute_energy(NodeEnergy(device_j=1.0), minute(Rollups(), device))
    assert found == NodeEnergy(1.0 + joules, 1, 0.0, 50.0, missing_s)


def test_cpus_count_by_rapl_else_by_their_power() -> None:
    by_counter = Rollups(watts("cpu_power_w", 10.0).values, {"cpu_energy_joules": 450.0})
    assert add_minute_energy(NodeEnergy(cpu_j=1.0), minute(by_counter)).cpu_j == 451.0
    assert add_minute_energy(NodeEnergy(cpu_j=1.0), minute(watts("cpu_power_w", 10.0))).cpu_j == 501.0


@pytest.mark.parametrize(("own", "joules", "num_devices"), [(["1"], 200.0, 1), ([], 300.0, 2), (["MIG-7"], 300.0, 2)])
def test_only_the_accelerators_of_the_run_count_where_they_are_known(
    own: list[str], joules: float, num_devices: int
) -> None:
    devices = (Rollups({}, {"energy_joules": each}) for each in (100.0, 200.0))
    found = add_minute_energy(NodeEnergy(), minute(Rollups(), *devices), own)
    assert (found.device_j, found.num_devices) == (joules, num_devices)
