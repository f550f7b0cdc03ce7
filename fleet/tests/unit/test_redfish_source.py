"""Readings of a management controller: modern and legacy resources, age, what is missing. The stand-in is
`helpers/fake_bmc.py`."""

from typing import Any

import pytest

from fake_bmc import CHASSIS, FakeBmc, link
from manual_polling import ManualPolling
from phalanx.errors import UsageError
from phalanx.telemetry.sample import HostSample, SourceUnavailableError
from phalanx_fleet.telemetry.redfish import RedfishOptions, RedfishSource, open_redfish
from settable_clock import SettableClock

SERVED = HostSample(node_power_w=800.0, inlet_temperature_c=24.5, cpu_temperature_c=61.0, failed_fans=0.0)


class Opened:
    """A source of a controller, and the means to let it poll."""

    def __init__(self, bmc: FakeBmc, **options: Any):
        self.polling = ManualPolling()
        options = {"url": "https://bmc", **options}
        self.source = RedfishSource(RedfishOptions(**options), bmc, bmc.clock, self.polling.start)

    def poll(self) -> HostSample | None:
        self.polling.poll()
        return self.source.read().host


def read_one(bmc: FakeBmc, **options: Any) -> HostSample | None:
    return Opened(bmc, **options).source.read().host


@pytest.mark.parametrize("is_modern", [True, False])
def test_modern_and_legacy_controllers_give_the_same_values(is_modern: bool) -> None:
    opened = Opened(FakeBmc(SettableClock(100.0), is_modern))
    assert opened.source.read().host == SERVED
    assert opened.source.problems == []


def test_power_is_the_sum_of_all_supplies_where_the_chassis_has_no_reading() -> None:
    supplies = f"{CHASSIS}/PowerSubsystem/PowerSupplies"
    bmc = FakeBmc(SettableClock(100.0), False)
    bmc.more = {
        CHASSIS: {"Id": "1", "PowerSubsystem": link(f"{CHASSIS}/PowerSubsystem")},
        f"{CHASSIS}/PowerSubsystem": {"PowerSupplies": link(supplies)},
        supplies: {"Members": [link(f"{supplies}/{index}") for index in range(3)]},
        f"{supplies}/0": {"Metrics": link(f"{supplies}/0/Metrics")},
        f"{supplies}/1": {"Metrics": link(f"{supplies}/1/Metrics")},
        f"{supplies}/2": {"Status": {"State": "Absent"}},
        f"{supplies}/0/Metrics": {"InputPowerWatts": {"Reading": 410.0}},
        f"{supplies}/1/Metrics": {"InputPowerWatts": {"Reading": 395.5}},
    }
    assert read_one(bmc) == HostSample(node_power_w=805.5)
    bmc.more[f"{supplies}/1/Metrics"] = {"InputPowerWatts": {"Reading": None}}
    assert read_one(bmc) == HostSample()  # a part of the supplies is not the node


@pytest.mark.parametrize("is_modern", [True, False])
@pytest.mark.parametrize(
    ("name", "value", "column"),
    [
        ("power", None, "node_power_w"),
        ("power", 0, "node_power_w"),
        ("power", 65535, "node_power_w"),
        ("power", "800", "node_power_w"),
        ("power", float("nan"), "node_power_w"),
        ("inlet", None, "inlet_temperature_c"),
        ("inlet", 255, "inlet_temperature_c"),
        ("inlet", 0, "inlet_temperature_c"),
    ],
)
def test_null_zero_and_blank_codes_are_missing(is_modern: bool, name: str, value: Any, column: str) -> None:
    bmc = FakeBmc(SettableClock(100.0), is_modern, values={name: value})
    assert getattr(read_one(bmc), column) is None


def test_a_fan_that_does_not_turn_is_a_failed_one() -> None:
    for is_modern in (True, False):
        host = read_one(FakeBmc(SettableClock(100.0), is_modern, values={"fan": 0}))
        assert host is not None
        assert host.failed_fans == 1


def test_what_a_controller_does_not_serve_is_a_problem() -> None:
    opened = Opened(FakeBmc(SettableClock(100.0), failing={f"{CHASSIS}/ThermalSubsystem"}))
    assert opened.source.problems == ["https://bmc: serves no inlet temperature, no CPU temperature"]
    assert opened.source.read().host == HostSample(node_power_w=800.0, failed_fans=0.0)


def test_one_resource_that_fails_costs_only_its_values() -> None:
    bmc = FakeBmc(SettableClock(100.0))
    opened = Opened(bmc)
    bmc.failing = {f"{CHASSIS}/EnvironmentMetrics"}
    assert opened.poll() == HostSample(inlet_temperature_c=24.5, cpu_temperature_c=61.0)


def test_a_reading_has_the_age_of_its_first_request() -> None:
    bmc = FakeBmc(SettableClock(100.0), request_s=1.5)
    opened = Opened(bmc)
    bmc.clock.now += 4
    num_requests, begin = len(bmc.requests), bmc.clock.now
    assert opened.poll() == SERVED
    assert bmc.clock.now - begin == 1.5 * (len(bmc.requests) - num_requests)
    assert opened.source.read().host_age_s == bmc.clock.now - begin == 3.0


def test_a_value_older_than_three_intervals_is_missing() -> None:
    bmc = FakeBmc(SettableClock(100.0))
    opened = Opened(bmc, interval_s=10.0)
    bmc.clock.now += 30
    assert opened.source.read().host == SERVED
    bmc.clock.now += 0.1
    assert opened.source.read().host == HostSample()


def test_a_controller_that_stops_answering_has_no_values_until_it_is_back() -> None:
    bmc = FakeBmc(SettableClock(100.0))
    opened = Opened(bmc)
    bmc.is_down = True
    assert opened.poll() == HostSample()
    bmc.is_down, bmc.is_modern = False, False  # with other firmware
    assert opened.poll() == SERVED


def test_a_controller_that_refuses_the_password_is_asked_no_more(caplog: pytest.LogCaptureFixture) -> None:
    bmc = FakeBmc(SettableClock(100.0))
    opened = Opened(bmc)
    bmc.is_refused = True
    assert opened.poll() == HostSample()
    num_requests = len(bmc.requests)
    assert opened.poll() == HostSample()
    assert len(bmc.requests) == num_requests
    assert "lock the user" in caplog.text


def test_closing_stops_polling_and_ends_the_session() -> None:
    bmc = FakeBmc(SettableClock(100.0))
    opened = Opened(bmc)
    opened.source.close()
    assert (opened.polling.is_stopped, bmc.is_open) == (True, False)


def test_of_several_chassis_the_outermost_is_the_node() -> None:
    bmc = FakeBmc(SettableClock(100.0))
    chassis, part = bmc.get(CHASSIS), f"{CHASSIS}/Tray"
    bmc.more = {
        "/redfish/v1/Chassis": {"Members": [link(part), link(CHASSIS)]},
        part: {**chassis, "Id": "Tray", "Links": {"ContainedBy": link(CHASSIS)}, "EnvironmentMetrics": link("/none")},
    }
    assert read_one(bmc) == SERVED


def test_several_outermost_chassis_have_to_be_named() -> None:
    bmc = FakeBmc(SettableClock(100.0))
    other = "/redfish/v1/Chassis/HGX"
    bmc.more = {
        "/redfish/v1/Chassis": {"Members": [link(other), link(CHASSIS)]},
        other: {"Id": "HGX", "EnvironmentMetrics": link("/none")},
    }
    with pytest.raises(SourceUnavailableError, match="several chassis with sensors; set chassis to one of HGX, 1"):
        Opened(bmc)
    assert not bmc.is_open
    assert read_one(bmc, chassis="1") == SERVED
    with pytest.raises(SourceUnavailableError, match="has no chassis 2; it has HGX, 1"):
        Opened(bmc, chassis="2")


def test_a_link_to_another_host_is_not_followed() -> None:
    bmc = FakeBmc(SettableClock(100.0))
    bmc.more = {"/redfish/v1/Chassis": {"Members": [link("https://elsewhere/1"), link("//elsewhere/2"), link(CHASSIS)]}}
    Opened(bmc)
    assert not [path for path in bmc.requests if "elsewhere" in path]


@pytest.mark.parametrize("resource", [{}, {"Chassis": 5}, {"Chassis": link("/redfish/v1/Systems")}])
def test_a_service_without_chassis_is_unavailable(resource: dict[str, Any]) -> None:
    bmc = FakeBmc(SettableClock(100.0), more={"/redfish/v1/": resource, "/redfish/v1/Systems": {"Members": "none"}})
    with pytest.raises(SourceUnavailableError, match="has no chassis with sensors among none"):
        Opened(bmc)


@pytest.mark.parametrize(
    ("url", "environment", "text"),
    [
        ("bmc", {}, "expected an address such as https://"),
        ("https://root:secret@bmc", {}, "do not belong into an address"),
        ("http://bmc", {"PHALANX_REDFISH_USER": "root", "PHALANX_REDFISH_PASSWORD": "secret"}, "not sent without TLS"),
        ("https://bmc", {"PHALANX_REDFISH_USER": "root"}, "PHALANX_REDFISH_PASSWORD is not set"),
    ],
)
def test_wrong_addresses_and_credentials_are_refused(url: str, environment: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        open_redfish(RedfishOptions(url=url), environment)
    assert "secret" not in str(caught.value)
