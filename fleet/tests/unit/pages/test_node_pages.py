"""Nodes on the page: tables, heat maps, and samples that agents send."""

import asyncio
import json
import time
from dataclasses import replace

import numpy as np
import pytest

from phalanx.errors import UsageError
from phalanx.telemetry.agent_endpoint import AgentEndpoint
from phalanx.telemetry.exposition import build_node_metrics, render_families
from phalanx.telemetry.sample import DeviceSample, HostSample, NodeSample
from phalanx_fleet.fleet_node import FleetNode, LatestReading, add_samples
from phalanx_fleet.node_list import FleetView, NodeReader
from phalanx_fleet.node_states import NodeChange, NodeState
from phalanx_fleet.pages import agent_streams
from phalanx_fleet.pages.agent_streams import AgentStreams
from phalanx_fleet.pages.node_pages import (
    MAX_TABLE_NODES,
    build_heat_map,
    build_node_charts,
    render_facts,
    render_node,
    render_nodes,
    render_nodes_page,
)
from phalanx_fleet.pages.power_page import list_margins, render_cooling
from phalanx_fleet.pages.site_history import HistoryPoint
from phalanx_fleet.telemetry.prometheus import MAX_DEVICES
from phalanx_fleet.telemetry.service_reading import RackSample

NOW = 1000.0
HOT = DeviceSample(id="a", power_mean_w=350.0, power_cap_w=700.0, thermal_margin_c=10.0, utilization=1.0)
UNKNOWN = DeviceSample(id="b")


def node(name: str = "n1", state: str = "healthy", reading: LatestReading | None = None) -> FleetNode:
    return FleetNode(name, state, None, None, reading)


@pytest.mark.parametrize(
    ("by", "values"), [("power", [50, None]), ("margin", [75, None]), ("utilization", [100, None])]
)
def test_a_heat_map_has_a_percentage_for_each_device_and_null_for_what_is_missing(
    by: str, values: list[int | None]
) -> None:
    samples = {"n1": NodeSample(NOW, devices=(HOT, UNKNOWN))}
    found = build_heat_map(add_samples([node()], samples), samples, by, NOW)
    assert found["nodes"] == [["n1", "healthy", values]]


def test_a_node_without_devices_is_one_cell() -> None:
    samples = {"n1": NodeSample(NOW, HostSample(cpu_utilization=0.5))}
    nodes = add_samples([node()], samples)
    assert build_heat_map(nodes, samples, "utilization", NOW)["nodes"] == [["n1", "healthy", [50]]]


def test_late_samples_and_silent_nodes_have_no_colour() -> None:
    late = {"n1": NodeSample(NOW - 4, devices=(HOT,))}
    assert build_heat_map([node(), node("n2")], late, "power", NOW)["nodes"] == [
        ["n1", "no reading", [None]],
        ["n2", "no reading", [None]],
    ]


def test_nodes_that_are_not_healthy_come_first_and_long_tables_are_cut() -> None:
    nodes = [node(f"n{number}") for number in range(MAX_TABLE_NODES + 5)] + [node("bad", "drained")]
    page = render_nodes(FleetView(nodes), nodes, "", NOW)
    assert page.index(">bad<") < page.index(">n0<")
    assert "and 6 nodes more" in page
    assert page.count("<tr>") == MAX_TABLE_NODES + 1
    assert render_nodes(FleetView(nodes), nodes, "drained", NOW).count("<tr>") == 2


def test_the_newer_of_two_readings_is_shown_and_none_that_is_late() -> None:
    old = node(reading=LatestReading(NOW - 10, 60.0, draw_w=1.0))
    sample = NodeSample(NOW, HostSample(node_power_w=2.0))
    (found,) = add_samples([old], {"n1": sample})
    assert found.reading is not None
    assert found.reading.draw_w == 2.0
    newer = node(reading=LatestReading(NOW + 1, 60.0, draw_w=3.0))
    assert add_samples([newer], {"n1": sample}) == [newer]
    late = node(reading=LatestReading(NOW - 100, 1.0, draw_w=512.0))
    page = render_nodes(FleetView(), [late], "", NOW)
    assert "512 W" not in page
    assert "(late)" in page


def test_nodes_that_cannot_be_read_stay_with_a_problem() -> None:
    answers = [FleetView([node()]), UsageError("slurm does not answer")]

    def read() -> FleetView:
        found = answers.pop(0)
        if isinstance(found, UsageError):
            raise found
        return found

    reader = NodeReader(lambda: read)
    reader.update()
    reader.update()
    assert [each.name for each in reader.view.nodes] == ["n1"]
    assert reader.view.problems == ["slurm does not answer"]
    assert not reader.view.is_current


def test_names_and_reasons_are_escaped() -> None:
    evil = FleetNode("<b>", "drained", "<script>", None, None)
    pages = [
        render_nodes(FleetView(problems=["<u>"]), [evil], "", NOW),
        render_node(evil, None, [NodeChange("<b>", NodeState.DRAINED, "<script>", "<u>", NOW)], {}, True, NOW),
        render_nodes_page("", "power", '"><script>'),
    ]
    for page in pages:
        assert "<script>" not in page
        assert "<b>" not in page
        assert "<u>" not in page


def test_a_rack_with_a_leak_comes_first_and_what_is_missing_is_empty() -> None:
    racks = [RackSample(id="r1", flow_l_per_min=90.0), RackSample(id="r2", has_leak=True)]
    page = render_nodes(FleetView([node()], racks=racks), [node()], "", NOW)
    assert page.index(">r2<") < page.index(">r1<")
    assert "LEAK" in page
    assert "90.0 l/min" in page
    assert "None" not in page


def test_the_charts_of_a_node_have_the_last_day_and_break_where_nothing_was_read() -> None:
    now = 200_040.0
    watts = {120: 100.0, 2: 200.0, 1: 300.0}
    points = [HistoryPoint(now - 60 * minutes, 1, each, each, each) for minutes, each in watts.items()]
    power, margin = build_node_charts({"draw_w": points, "margin_k": points[:1], "device_draw_w": []}, now)
    assert (power.title, margin.title, len(power.series)) == ("Power", "Temperature margin", 1)
    x, y = power.series[0].x, power.series[0].y
    assert list(y[np.isfinite(y)]) == [100.0, 200.0, 300.0]
    assert list(x[np.isfinite(y)]) == [pytest.approx(-2.0), pytest.approx(-2 / 60), pytest.approx(-1 / 60)]
    assert build_node_charts({"draw_w": []}, now) == []


def test_the_page_of_a_node_has_a_table_of_its_devices_while_they_are_read() -> None:
    sample = NodeSample(NOW, devices=(replace(HOT, name="<H100>"), UNKNOWN))
    page = render_node(node(), sample, [], {}, False, NOW)
    assert "<td>a &lt;H100&gt;</td><td>350 W</td><td>700 W</td><td>-</td><td>10 K</td>" in page
    assert "Nothing is recorded of this node so far" in page
    assert "phalanx serve --agent-port PORT" in render_facts(node(), sample, NOW + 10)
    assert "350 W" not in render_facts(node(), None, NOW)


def sample_of(power_w: float) -> NodeSample:
    return NodeSample(1.0, HostSample(cpu_power_w=power_w))


async def until_sample(streams: AgentStreams, name: str, power_w: float) -> None:
    async with asyncio.timeout(10):
        while name not in (found := streams.read_samples()) or found[name].host.cpu_power_w != power_w:
            await asyncio.sleep(0.01)


def test_agents_are_followed_and_one_that_returns_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_streams, "FIRST_RETRY_S", 0.01)

    async def follow() -> None:
        first = AgentEndpoint("n1", 0)
        port = first.port
        streams = AgentStreams(lambda: {"n1": ("127.0.0.1", port)})
        task = asyncio.create_task(streams.run())
        first.publish(sample_of(1.0))
        await until_sample(streams, "n1", 1.0)
        await asyncio.to_thread(first.close)
        second = AgentEndpoint("n1", port)
        second.publish(sample_of(2.0))
        await until_sample(streams, "n1", 2.0)
        task.cancel()
        await asyncio.to_thread(second.close)

    asyncio.run(follow())


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 404 no\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\nnot json\n", b"\x00" * 9999]
)
def test_a_port_of_something_else_gives_no_sample_and_stops_nothing(answer: bytes) -> None:
    async def follow() -> bool:
        asked = asyncio.Event()

        async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(answer)
            writer.close()
            asked.set()

        server = await asyncio.start_server(reply, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        streams = AgentStreams(lambda: {"n1": ("127.0.0.1", port)})
        task = asyncio.create_task(streams.run())
        await asyncio.wait_for(asked.wait(), 10)
        await asyncio.sleep(0)
        is_running = not task.done()
        task.cancel()
        server.close()
        return is_running and not streams.read_samples()

    assert asyncio.run(follow())


def test_a_node_that_leaves_the_fleet_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_streams, "SYNC_INTERVAL_S", 0.01)

    async def follow() -> None:
        endpoint = AgentEndpoint("n1", 0)
        addresses = {"n1": ("127.0.0.1", endpoint.port)}
        streams = AgentStreams(lambda: addresses)
        task = asyncio.create_task(streams.run())
        endpoint.publish(sample_of(1.0))
        await until_sample(streams, "n1", 1.0)
        addresses.clear()
        async with asyncio.timeout(10):
            while streams.read_samples():
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.to_thread(endpoint.close)

    asyncio.run(follow())


def make_streams(lines: dict[str, bytes]) -> AgentStreams:
    streams = AgentStreams(dict)
    for name, line in lines.items():
        streams._take(name, line)
    return streams


GOOD = b'{"time": 1, "host": {"node_power_w": 500}, "devices": []}'
HOSTILE = [
    b"[" * 200_000,
    b'{"time": ' + b"9" * 400 + b', "host": {}, "devices": []}',
    b'{"time": 1, "host": {"power_mean_w": 1}, "devices": [{"id": "a", "power_mean_w": 1' + b"0" * 400 + b"}]}",
    b'{"host": []}',
    b'{"time": 1, "host": {}, "devices": 5}',
    b'{"time": 1, "host": {}, "devices": [[]]}',
    b"null",
    b"\xff\xfe",
]


@pytest.mark.parametrize("line", HOSTILE, ids=range(len(HOSTILE)))
def test_a_line_that_is_no_sample_takes_its_own_node_only(line: bytes) -> None:
    streams = make_streams({"bad": line, "good": GOOD})
    assert list(streams.read_samples()) == ["good"]
    assert streams.list_problems() == ["bad: what its agent sends is unreadable"]
    streams._take("bad", GOOD)
    assert (sorted(streams.read_samples()), streams.list_problems()) == (["bad", "good"], [])


def test_values_that_no_sensor_gives_are_missing() -> None:
    line = (
        b'{"time": 1, "host": {"node_power_w": -5e9, "inlet_temperature_c": 1e300}, "devices": '
        b'[{"id": "a", "thermal_margin_c": 1e300, "power_mean_w": -5e9, "utilization": 7, "core_temperature_c": 60}]}'
    )
    sample = make_streams({"n1": line}).read_samples()["n1"]
    assert sample.host == HostSample()
    assert sample.devices == (DeviceSample(id="a", core_temperature_c=60.0),)


def test_devices_that_change_their_names_each_second_are_a_bounded_number_of_series() -> None:
    streams, names = make_streams({}), set()
    for second in range(50):
        devices = [{"id": f"{second}-{number}"} for number in range(200)]
        streams._take("n1", json.dumps({"time": 1, "host": {}, "devices": devices}).encode())
        names |= {device.id for device in streams.read_samples()["n1"].devices}
    assert len(names) == MAX_DEVICES


def test_the_time_of_a_sample_is_that_of_its_arrival_whatever_clock_its_node_has() -> None:
    streams = make_streams({"n1": GOOD.replace(b'"time": 1', b'"time": 9e9')})
    assert abs(streams.read_samples()["n1"].time - time.time()) < 60


@pytest.mark.parametrize(
    "text", ["\x00\x1b[2J", "\u202e\u2066", "<script>", "\ud800", "x" * 5000, "a\nb", "\ufffe", "`"], ids=ascii
)
def test_every_text_of_a_sample_goes_through_every_page_as_bytes(text: str) -> None:
    line = json.dumps({"time": 1, "host": {}, "devices": [{"id": text, "name": text, "power_mean_w": 1}]}).encode()
    samples = make_streams({"n1": line}).read_samples()
    nodes = [node(text), node("n1", text)]
    racks = [RackSample(id=text, name=text, has_leak=True)]
    pages = [
        render_nodes(FleetView(nodes, [text], racks), nodes, text, NOW),
        json.dumps(build_heat_map(nodes, samples, "power", NOW)),
        render_cooling(racks, list_margins(nodes, samples, NOW)),
    ]
    for page in pages:
        assert page.encode(errors="backslashreplace")
        assert "<script>" not in page or page is pages[1]
    render_families(build_node_metrics(samples))


def test_a_row_that_cannot_be_rendered_is_unreadable_and_the_others_are_there() -> None:
    broken = replace(node("bad", reading=LatestReading(NOW, 1.0)), backend=5)  # type: ignore[arg-type]
    page = render_nodes(FleetView(), [broken, node("good")], "", NOW)
    assert ">unreadable<" in page
    assert ">good<" in page


def test_a_healthy_node_without_news_is_not_shown_as_healthy() -> None:
    fresh, late = LatestReading(NOW, 1.0), LatestReading(NOW - 100, 1.0)
    nodes = [node("a", reading=fresh), node("b", reading=late), node("c"), node("d", "drained")]
    page = render_nodes(FleetView(nodes), nodes, "", NOW)
    assert "4 nodes, 1 not healthy, 2 without a reading" in page
    assert [page.count(f'class="status {each}"') for each in ("healthy", "stale", "no-reading", "drained")] == [1] * 4
