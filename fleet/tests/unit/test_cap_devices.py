"""What sets caps: limits of whole nodes by Redfish, packages of RAPL, and the allow list."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import RecipeError
from phalanx.telemetry.host import HostSource
from phalanx_fleet.power.control import count_capped_devices
from phalanx_fleet.power.devices import CapError, CapLimits, to_device_units
from phalanx_fleet.power.fake_fleet import FakeCapDevice, FakeClock
from phalanx_fleet.power.local_devices import find_rapl_devices, open_cap_devices, select_devices
from phalanx_fleet.power.redfish_limit import RedfishCapDevice
from phalanx_fleet.power_settings import CapDeviceSettings
from phalanx_fleet.power_tree import BudgetLevel, NodePower, PoweredNode, PowerTree
from phalanx_fleet.telemetry.redfish_values import RedfishStatusError, RedfishUnreachableError


class Bmc:
    """A controller with a limit, in the newer or the older form."""

    def __init__(self, is_legacy: bool = False, **limit: Any):
        root, chassis = "/redfish/v1/", "/redfish/v1/Chassis/1"
        kind = "Power" if is_legacy else "EnvironmentMetrics"
        self.path, self.writes, self.problem = f"{chassis}/{kind}", list[Mapping[str, object]](), None
        self.limit = {"LimitInWatts": None} if is_legacy else {"SetPoint": 0, "ControlMode": "Disabled"}
        self.limit |= limit
        state = (
            {"PowerControl": [{"PowerConsumedWatts": 5100, "PowerLimit": self.limit}]}
            if is_legacy
            else {"PowerWatts": {"Reading": 5100.5}, "PowerLimitWatts": self.limit}
        )
        self.resources: dict[str, Any] = {
            root: {"Chassis": {"@odata.id": "/redfish/v1/Chassis"}},
            "/redfish/v1/Chassis": {"Members": [{"@odata.id": chassis}, {"@odata.id": "/redfish/v1/Chassis/2"}]},
            chassis: {kind: {"@odata.id": self.path}},
            "/redfish/v1/Chassis/2": {},
            self.path: state,
        }

    def get(self, path: str) -> Mapping[str, object]:
        if self.problem is not None:
            raise self.problem
        found: Mapping[str, object] = self.resources[path]
        return found

    def patch(self, path: str, values: Mapping[str, Any]) -> None:
        if self.problem is not None:
            raise self.problem
        assert path == self.path
        self.writes.append(values)
        new = values["PowerControl"][0]["PowerLimit"] if "PowerControl" in values else values["PowerLimitWatts"]
        self.limit.update(new)

    def close(self) -> None: ...


def test_a_limit_of_a_node_is_set_and_enforced() -> None:
    bmc = Bmc(AllowableMin=2000, AllowableMax=10200)
    device = RedfishCapDevice(bmc, "https://bmc")
    assert (device.read_cap_w(), device.read_limits()) == (10200.0, CapLimits(2000.0, 10200.0, 10200.0))
    device.set_cap_w(6000.4)
    assert bmc.writes == [{"PowerLimitWatts": {"SetPoint": 6000, "ControlMode": "Automatic"}}]
    assert (device.read_cap_w(), device.read_draw_w()) == (6000.0, 5100.5)
    device.set_cap_w(10200.0)
    assert (bmc.limit["ControlMode"], device.read_cap_w()) == ("Disabled", 10200.0)


def test_a_limit_in_the_older_form_is_set() -> None:
    bmc = Bmc(is_legacy=True)
    device = RedfishCapDevice(bmc, "https://bmc", max_cap_w=10200.0)
    assert device.read_cap_w() == 10200.0
    device.set_cap_w(6000.0)
    assert bmc.writes == [{"PowerControl": [{"PowerLimit": {"LimitInWatts": 6000}}]}]
    assert (device.read_cap_w(), device.read_draw_w()) == (6000.0, 5100.0)
    device.set_cap_w(10200.0)
    assert (bmc.limit["LimitInWatts"], device.read_cap_w()) == (None, 10200.0)


def test_a_limit_without_its_most_needs_max_cap() -> None:
    with pytest.raises(CapError, match="the controller has no AllowableMax; set max_cap"):
        RedfishCapDevice(Bmc(), "https://bmc").read_limits()


def test_a_controller_without_a_limit_or_an_answer_is_named() -> None:
    bmc = Bmc(AllowableMax=10200)
    device = RedfishCapDevice(bmc, "https://bmc")
    bmc.problem = RedfishUnreachableError("does not answer in time")
    with pytest.raises(CapError, match="Redfish: https://bmc: does not answer in time"):
        device.read_cap_w()
    bmc.problem = RedfishStatusError("refuses to change it with status 403")
    with pytest.raises(CapError, match="status 403"):
        device.set_cap_w(5000.0)
    bmc.problem = None
    with pytest.raises(CapError, match="expected one chassis with a power limit, found none; set `chassis`"):
        RedfishCapDevice(bmc, "https://bmc", chassis="2")


def test_caps_are_rounded_down_but_for_errors_of_multiplication() -> None:
    assert to_device_units(240.196078607, 1e6) == 240_196_078
    assert [to_device_units(number / 1e3, 1e3) for number in range(100_000, 100_999)] == [*range(100_000, 100_999)]


def make_devices() -> list[FakeCapDevice]:
    return [FakeCapDevice(f"g{i}", FakeClock(), CapLimits(200, 700, 700), lambda t: 600.0) for i in range(3)]


def test_only_listed_devices_are_capped() -> None:
    assert [device.id for device in select_devices(make_devices(), ["g2", "g1"])] == ["g2", "g1"]
    assert len(select_devices(make_devices(), None)) == 3
    with pytest.raises(CapError, match="g7: no such device; there are g0, g1, g2"):
        select_devices(make_devices(), ["g7"])


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kind": "redfish"}, "need `redfish: {url: ...}`"),
        ({"kind": "rapl", "root": "/nonexistent"}, "has no package; load the module intel_rapl_msr"),
        ({"kind": "nvml"}, "NVML"),
    ],
)
def test_a_machine_without_such_devices_is_said(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(CapError, match=problem):
        open_cap_devices(CapDeviceSettings(**settings), "n0")


TREE = PowerTree((BudgetLevel("rack", "k", None),), (PoweredNode("n", "h", NodePower(8, 700, 70, 4600, 2300), 0),))


def test_what_is_capped_is_what_the_tree_counts() -> None:
    def power(**settings: Any) -> NodePower:
        return count_capped_devices(TREE, CapDeviceSettings(**settings)).nodes[0].power

    assert power() == TREE.nodes[0].power
    assert power(kind="redfish") == NodePower(1, 10200, 2860, 0, 0, None)
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
