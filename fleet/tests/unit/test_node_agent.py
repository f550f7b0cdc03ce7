"""An agent without a run: what it records, and how it shares a node with the agents of runs."""

import logging
import os
import time
import urllib.request
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.run import Run
from phalanx.run.node_env import find_node_name
from phalanx.telemetry.agent_endpoint import AgentEndpoint
from phalanx.telemetry.record import NodeSampler, record_telemetry
from phalanx.telemetry.sample import DeviceSample, SourceReading
from phalanx_fleet.node_agent import RETRY_INTERVAL_S, SharedPort, record_node
from server_processes import find_free_port

DEVICE = DeviceSample(id="GPU-a", name="H100", power_mean_w=512.0)


class Source:
    name, problems = "fake", ()

    def read(self) -> SourceReading:
        return SourceReading((DEVICE,))

    def close(self) -> None: ...


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    port = find_free_port()
    monkeypatch.setenv("PHALANX_METRICS_PORT", str(port))
    return port


def test_an_agent_answers_and_the_agent_of_a_later_run_leaves_it_the_port(
    port: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pages = []

    def sleep(seconds: float) -> None:
        assert 0 <= seconds <= 1
        if not pages:
            with caplog.at_level(logging.INFO), record_telemetry(Run(tmp_path / "run")):
                time.sleep(0.5)
        pages.append(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode())
        if len(pages) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record_node(open_sources=lambda: ([Source()], []), sleep=sleep)
    assert f"no metrics on port {port}: Address already in use" in caplog.text
    for page in pages:
        assert f'phalanx_device_power_watts{{device="GPU-a",name="H100",node="{find_node_name()}"}} 512.0' in page
    AgentEndpoint("n", port).close()


def test_an_agent_takes_the_port_when_the_run_that_has_it_ends(port: int, caplog: pytest.LogCaptureFixture) -> None:
    now, is_open = 0.0, []
    other_endpoint = AgentEndpoint("n", port)
    outputs = SharedPort(find_node_name(), os.environ, lambda: now)
    sampler = NodeSampler([Source()], find_node_name(), on_sample=outputs.publish)
    for step in range(4):
        if step == 2:
            other_endpoint.close()
        now = RETRY_INTERVAL_S * max(0, step - 1)  # the second comes too early for another attempt
        sampler.read()
        is_open.append(outputs.is_open)
    outputs.close()
    assert is_open == [False, False, True, True]
    assert caplog.text.count("trying again every 10 s") == 1


@pytest.mark.parametrize(
    ("given", "reason"), [("http", "=http: expected a port"), ("", ", such as PHALANX_METRICS_PORT=9440")]
)
def test_without_a_port_an_agent_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str, reason: str
) -> None:
    monkeypatch.setenv("PHALANX_METRICS_PORT", given)
    assert main(["nodes", "agent"]) == 64
    assert f"PHALANX_METRICS_PORT{reason}" in capsys.readouterr().err
