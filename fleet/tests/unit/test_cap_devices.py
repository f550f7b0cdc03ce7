"""What sets caps: packages of RAPL, and the allow list."""

from pathlib import Path
from typing import Any

import pytest

from faulty_fleet import FakeClock, FaultyCapDevice
from phalanx.errors import RecipeError
from phalanx.telemetry.host import HostSource
from phalanx_fleet.power.control import count_capped_devices
from phalanx_fleet.power.devices import (
    CapError,
    CapLimits,
    find_rapl_devices,
    open_cap_devices,
    select_devices,
    to_device_units,
)
from phalanx_fleet.power_settings import CapDeviceSettings
from phalanx_fleet.power_tree import BudgetLevel, NodePower, PoweredNode, PowerTree


def test_caps_are_rounded_down_but_for_errors_of_multiplication() -> None:
    assert to_device_units(240.196078607, 1e6) == 240_196_078
    assert [to_device_units(number / 1e3, 1e3) for number in range(100_000, 100_999)] == [*range(100_000, 100_999)]


def make_devices() -> list[FaultyCapDevice]:
    return [FaultyCapDevice(f"g{i}", FakeClock(), CapLimits(200, 700, 700), lambda t: 600.0) for i in range(3)]


def test_only_listed_devices_are_capped() -> None:
    assert [device.id for device in select_devices(make_devices(), ["g2", "g1"])] == ["g2", "g1"]
    assert len(select_devices(make_devices(), None)) == 3
    with pytest.raises(CapError, match="g7: no such device; there are g0, g1, g2"):
        select_devices(make_devices(), ["g7"])


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kind": "rapl", "root": "/nonexistent"}, "has no package; load the module intel_rapl_msr"),
        ({"kind": "nvml"}, "NVML"),
    ],
)
def test_a_machine_without_such_devices_is_said(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(CapError, match=problem):
        open_cap_devices(CapDeviceSettings(**settings))


TREE = PowerTree((BudgetLevel("rack", "k", None),), (PoweredNode("n", "h", NodePower(8, 700, 70, 4600, 2300), 0),))


def test_what_is_capped_is_what_the_tree_counts() -> None:
    def power(**settings: Any) -> NodePower:
        return count_capped_devices(TREE, CapDeviceSettings(**settings)).nodes[0].power

    assert power() == TREE.nodes[0].power
    assert power(kind="rapl", packages=2, package_power="350 W") == NodePower(2, 350, 0, 9500, 2860, None)
    with pytest.raises(RecipeError, match="rapl needs `packages`"):
        power(kind="rapl")


def make_rapl(root: Path, **names_and_counters: tuple[str, int]) -> None:
    for number, (name, counter) in enumerate(names_and_counters.values()):
        folder = root / f"sys/class/powercap/intel-rapl:{number}"
        folder.mkdir(parents=True)
        (folder / "name").write_text(f"{name}\n")
        (folder / "energy_uj").write_text(f"{counter}\n")
        (folder / "max_energy_range_uj").write_text("262143328850\n")


@pytest.mark.parametrize(
    ("domains", "ids", "watts"),
    [
        ([("package-0-die-0", 5, 680), ("package-0-die-1", 5, 680)], ["intel-rapl:0"], 68.0),
        ([("package-0-die-0", 5, 680), ("package-0-die-1", 9, 340)], ["intel-rapl:0", "intel-rapl:1"], 102.0),
        ([("package-0", 5, 680), ("package-1", 5, 680)], ["intel-rapl:0", "intel-rapl:1"], 136.0),
        ([("package-0", 5, 680), ("psys", 7, 900)], ["intel-rapl:0"], 68.0),
    ],
)
def test_counters_of_cpus_that_overlap_count_once(
    tmp_path: Path, domains: list[tuple[str, int, int]], ids: list[str], watts: float
) -> None:
    make_rapl(tmp_path, **{f"d{index}": (name, 10**6 * start) for index, (name, start, _) in enumerate(domains)})
    assert [device.id for device in find_rapl_devices(tmp_path)] == ids
    now = [0.0]
    source = HostSource(tmp_path, clock=lambda: now[0])
    source.read()
    now[0] = 10.0
    for number, (_, start, rise) in enumerate(domains):
        counter = tmp_path / f"sys/class/powercap/intel-rapl:{number}/energy_uj"
        counter.write_text(f"{10**6 * (start + rise)}\n")
    reading = source.read()
    assert reading.host is not None
    assert reading.host.cpu_power_w == pytest.approx(watts)
