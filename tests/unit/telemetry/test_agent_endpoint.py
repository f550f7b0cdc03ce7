"""What an agent answers over HTTP, and metrics of samples."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from phalanx.errors import UsageError
from phalanx.run import Run
from phalanx.run.fields import to_json
from phalanx.telemetry.agent_endpoint import AgentEndpoint
from phalanx.telemetry.exposition import build_node_metrics, render_families
from phalanx.telemetry.record import PORT_VARIABLE, record_telemetry
from phalanx.telemetry.sample import DeviceSample, HostSample, NodeSample, SlowReason

DEVICE = DeviceSample(
    id="GPU-1",
    name="H100",
    power_mean_w=400.5,
    energy_joules=1e6,
    core_temperature_c=61.0,
    core_clock_hz=1.98e9,
    slow_reasons=SlowReason.POWER_CAP | SlowReason.SW_THERMAL,
    utilization=0.97,
    memory_used_bytes=float(2**30),
    xid=79.0,
)
SAMPLE = NodeSample(
    1000.5, HostSample(cpu_power_w=50.0, cpu_power_is_estimate=True), (DEVICE, DeviceSample(id="GPU-2"))
)


def values_of(page: bytes) -> dict[str, dict[tuple[str, ...], float]]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(page.decode()):
        for each in family.samples:
            labels = [each.labels[key] for key in ("node", "device", "name", "reason") if key in each.labels]
            found.setdefault(each.name, {})[tuple(labels)] = each.value
    return found


def get(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
        return bytes(response.read())


@pytest.fixture
def endpoint() -> Iterator[AgentEndpoint]:
    found = AgentEndpoint("node-1", 0)
    yield found
    found.close()


def test_metrics_have_base_units_and_leave_out_what_is_missing() -> None:
    found = values_of(render_families(build_node_metrics({"node-1": SAMPLE})))
    assert found["phalanx_device_power_watts"] == {("node-1", "GPU-1", "H100"): 400.5}
    assert found["phalanx_device_energy_joules_total"] == {("node-1", "GPU-1", "H100"): 1e6}
    assert found["phalanx_device_clock_hertz"] == {("node-1", "GPU-1", "H100"): 1.98e9}
    assert found["phalanx_node_cpu_power_is_estimate"] == {("node-1",): 1.0}
    slow = {labels[-1] for labels, value in found["phalanx_device_slow"].items() if value}
    assert slow == {"power cap", "thermal (driver)"}
    assert "phalanx_device_memory_temperature_celsius" not in found


def test_a_label_cannot_break_the_format() -> None:
    device = DeviceSample(id='a"} 1\nx{b="', name="\\", power_mean_w=1.0)
    found = values_of(render_families(build_node_metrics({'n"\n': NodeSample(1.0, devices=(device,))})))
    assert found["phalanx_device_power_watts"] == {('n"\n', 'a"} 1\nx{b="', "\\"): 1.0}


def test_an_agent_shows_its_newest_sample(endpoint: AgentEndpoint) -> None:
    assert get(endpoint.port, "/metrics").strip() == b""
    endpoint.publish(SAMPLE)
    assert values_of(get(endpoint.port, "/metrics"))["phalanx_node_read_time_seconds"] == {("node-1",): 1000.5}
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        get(endpoint.port, "/other")
    caught.value.close()


def test_a_stream_has_each_sample_from_the_newest_on(endpoint: AgentEndpoint) -> None:
    endpoint.publish(SAMPLE)
    with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/samples", timeout=10) as stream:
        assert json.loads(stream.readline()) == {"node": "node-1", **to_json(SAMPLE)}
        endpoint.publish(NodeSample(2000.0))
        line = json.loads(stream.readline())
        assert (line["node"], line["time"]) == ("node-1", 2000.0)


def test_closing_ends_the_streams() -> None:
    endpoint = AgentEndpoint("node-1", 0)
    endpoint.publish(SAMPLE)
    with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/samples", timeout=10) as stream:
        stream.readline()
        endpoint.close()
        assert stream.read() == b""


@pytest.mark.parametrize("given", ["x", "-1", "70000", "1.5"])
def test_a_port_that_is_none_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv(PORT_VARIABLE, given)
    with pytest.raises(UsageError, match="expected a port"), record_telemetry(Run(tmp_path)):
        pass


def test_an_agent_answers_while_it_records_and_a_port_in_use_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setenv(PORT_VARIABLE, str(port))
        with record_telemetry(Run(tmp_path)):
            pass
    assert f"no metrics on port {port}" in caplog.text
    with record_telemetry(Run(tmp_path)), urllib.request.urlopen(f"http://127.0.0.1:{port}/samples") as stream:
        assert json.loads(stream.readline())["host"]["memory_size_bytes"] > 0
