"""Readings of nodes and racks from the services of a nodes file."""

import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from phalanx.errors import RecipeError
from phalanx.telemetry.sample import DeviceSample, HostSample, SourceUnavailableError
from phalanx_fleet import nodes_file
from phalanx_fleet.fleet_node import LatestReading, merge_readings
from phalanx_fleet.nodes_file import NodeServices, load_nodes_file
from phalanx_fleet.telemetry.service_reading import RackSample, ServiceReading
from settable_clock import SettableClock

FILE = """\
nodes:
  - name: n1
    prometheus: http://n1:9400/metrics
    redfish: {url: "https://n1-bmc", interval_s: 5}
  - name: n2
    redfish: {url: "https://n2-bmc"}
  - name: n3
mqtt: {url: "mqtts://bus"}
"""
DEVICE = DeviceSample(id="a", power_mean_w=300.0, power_cap_w=700.0, energy_joules=5.0)
RACK = RackSample(id="r1", power_w=9000.0)


@dataclass
class FakeSource:
    reading: ServiceReading
    name: str = "fake"
    problems: list[str] = field(default_factory=list)
    is_closed: bool = False

    def read(self) -> ServiceReading:
        return self.reading

    def close(self) -> None:
        self.is_closed = True


@dataclass
class FakeServices:
    """What opens sources by their address; those in `down` do not answer."""

    sources: dict[str, FakeSource]
    down: set[str] = field(default_factory=set)
    opened: list[str] = field(default_factory=list)

    def open(self, options: object) -> FakeSource:
        url = options if isinstance(options, str) else str(options.url)  # type: ignore[attr-defined]
        if url in self.down:
            raise SourceUnavailableError(f"{url}: connection refused")
        self.opened.append(url)
        return self.sources[url]


@pytest.fixture
def services() -> FakeServices:
    return FakeServices(
        {
            "http://n1:9400/metrics": FakeSource(ServiceReading((DEVICE,), renewal_s=30.0)),
            "https://n1-bmc": FakeSource(ServiceReading(host=HostSample(node_power_w=1000.0), host_age_s=4.0)),
            "https://n2-bmc": FakeSource(ServiceReading(host=HostSample(node_power_w=500.0))),
            "mqtts://bus": FakeSource(ServiceReading(racks=(RACK,))),
        }
    )


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock(100.0)


@pytest.fixture
def found(
    services: FakeServices, clock: SettableClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> NodeServices:
    path = tmp_path / "nodes.yaml"
    path.write_text(FILE)
    for opener in ("PrometheusSource", "open_redfish", "open_mqtt"):
        monkeypatch.setattr(nodes_file, opener, services.open)
    return NodeServices(load_nodes_file(path), lambda: 1000.0 + clock.now, clock)


def test_a_node_has_one_reading_of_all_its_services(found: NodeServices) -> None:
    readings, problems = found.read_nodes()
    assert problems == []
    assert readings.keys() == {"n1", "n2"}
    assert readings["n1"] == LatestReading(
        1096.0, 30.0, 1000.0, "node", device_draw_w=300.0, device_cap_w=700.0, num_devices=1
    )
    assert readings["n2"].draw_w == 500.0


def test_services_stay_open_between_readings_and_are_closed_at_the_end(
    found: NodeServices, services: FakeServices
) -> None:
    for _ in range(3):
        found.read_nodes()
        found.read_racks()
    assert sorted(services.opened) == sorted(services.sources)
    found.close()
    assert all(source.is_closed for source in services.sources.values())


def test_a_service_that_is_down_is_a_problem_until_it_answers(found: NodeServices, services: FakeServices) -> None:
    services.down.add("https://n2-bmc")
    readings, problems = found.read_nodes()
    assert readings.keys() == {"n1"}
    assert problems == ["n2: https://n2-bmc: connection refused"]
    services.down.clear()
    readings, problems = found.read_nodes()
    assert (readings["n2"].draw_w, problems) == (500.0, [])


def test_a_bus_that_is_down_is_a_problem(found: NodeServices, services: FakeServices) -> None:
    services.down.add("mqtts://bus")
    assert found.read_racks() == ((), ["mqtts://bus: connection refused"])
    services.down.clear()
    assert found.read_racks() == ((RACK,), [])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nodes: [{name: n1, redfish: {url: x, password: y}}]\n", "redfish.password: unknown key"),
        ("nodes: []\nmqtt: {}\n", "mqtt.url"),
        ("nodes: [{name: n1, redfish: {url: x, interval_s: 0}}]\n", "interval_s"),
    ],
)
def test_wrong_options_are_refused_with_their_key(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=problem):
        load_nodes_file(path)


AGENT = LatestReading(
    99.0, 1.0, 400.0, "CPU and accelerators", is_estimate=True, device_draw_w=390.0, device_cap_w=700.0, margin_k=20.0
)
SUPPLIES = LatestReading(95.0, 10.0, 900.0, "node")


def test_power_at_the_supplies_counts_before_the_sum_of_parts() -> None:
    expected = replace(AGENT, draw_w=900.0, parts="node", is_estimate=False)
    assert merge_readings([SUPPLIES, None, AGENT], 100.0) == expected


def test_a_late_reading_adds_nothing() -> None:
    assert merge_readings([replace(SUPPLIES, time=10.0), AGENT], 100.0) == AGENT


def test_cap_and_margin_come_from_the_reading_that_has_them() -> None:
    newest = replace(SUPPLIES, time=99.5)
    found = merge_readings([AGENT, newest], 100.0)
    assert found == replace(newest, device_draw_w=390.0, device_cap_w=700.0, margin_k=20.0)


@pytest.mark.parametrize("url", ["https://n2-bmc", "mqtts://bus"])
def test_a_service_that_never_answers_blinds_no_other(
    found: NodeServices, services: FakeServices, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    answers = threading.Event()

    class Dripping(FakeSource):
        def read(self) -> ServiceReading:
            answers.wait(60)
            return self.reading

    monkeypatch.setattr(nodes_file, "RETRY_TIMEOUT_S", 0.0)
    services.sources[url] = Dripping(services.sources[url].reading)
    for service in [each for group in found._services.values() for each in group] + found._liquid:
        service._wait_s = 0.1 if service._url == url else 60.0
    for _ in range(3):
        readings, problems = found.read_nodes()
        problems += found.read_racks()[1]
        assert "n1" in readings
        assert problems[0].endswith("does not answer within 0.1 s")
    answers.set()
    for service in [each for group in found._services.values() for each in group] + found._liquid:
        service._wait_s = 60.0
    assert (found.read_nodes()[1], found.read_racks()) == ([], ((RACK,), []))


def test_a_source_that_fails_in_any_way_takes_its_own_reading_only(found: NodeServices, services: FakeServices) -> None:
    class Failing(FakeSource):
        def read(self) -> ServiceReading:
            raise RecursionError("too deep")

    services.sources["https://n2-bmc"] = Failing(ServiceReading())
    readings, problems = found.read_nodes()
    assert list(readings) == ["n1"]
    assert problems == ["n2: https://n2-bmc: unreadable: RecursionError: too deep"]


def test_a_source_without_any_value_gives_no_reading_and_says_why(found: NodeServices, services: FakeServices) -> None:
    services.sources["https://n2-bmc"] = FakeSource(ServiceReading(), problems=["https://n2-bmc: does not answer"])
    readings, problems = found.read_nodes()
    assert (readings.keys(), problems) == ({"n1"}, ["n2: https://n2-bmc: does not answer"])
