"""A real Prometheus scrapes a real `phalanx serve` and an agent; our Grafana dashboard finds data there."""

import json
import re
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from made_samples import full_node
from make_run import Maker, healthy
from phalanx.serve.app import DASHBOARD_FILE
from phalanx.telemetry.agent_endpoint import AgentEndpoint
from server_processes import find_free_port, find_program, run_server

PROMETHEUS = find_program("prometheus")
TOKEN = "a-token-for-prometheus"
NODE = "localhost"


@pytest.fixture(scope="module")
def agent() -> Iterator[int]:
    """The port of an agent that samples eight devices."""
    endpoint, is_over, start = AgentEndpoint(NODE, 0), threading.Event(), time.time()

    def publish() -> None:
        while not is_over.is_set():
            endpoint.publish(full_node(time.time(), time.time() - start))
            is_over.wait(0.5)

    thread = threading.Thread(target=publish)
    thread.start()
    yield endpoint.port
    is_over.set()
    thread.join()
    endpoint.close()


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server with a running run, and one that is done."""
    folder, port = tmp_path_factory.mktemp("serve"), find_free_port()
    healthy(folder / "runs" / "done")
    Maker(folder / "runs" / "now").start().steps(1, 120)
    words = ["PHALANX_SERVE_TOKEN=" + TOKEN, f"PHALANX_STATE_DIR={folder / 'state'}", sys.executable, "-m", "phalanx"]
    words += ["serve", str(folder / "runs"), "--port", str(port)]
    with run_server(["env", *words], port, folder / "serve.log"):
        yield port


@pytest.fixture(scope="module")
def prometheus(serve: int, agent: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that scrapes both every three seconds."""
    if PROMETHEUS is None:
        pytest.skip("NOTHING IS TESTED ON A REAL PROMETHEUS: there is no prometheus")
    folder, port = tmp_path_factory.mktemp("prometheus"), find_free_port()
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 3s, scrape_timeout: 3s}\n"
        "scrape_configs:\n"
        f"  - {{job_name: serve, authorization: {{credentials: {TOKEN}}}, "
        f"static_configs: [{{targets: ['127.0.0.1:{serve}']}}]}}\n"
        f"  - {{job_name: agents, static_configs: [{{targets: ['127.0.0.1:{agent}']}}]}}\n"
    )
    words = [PROMETHEUS, f"--config.file={config}", f"--web.listen-address=127.0.0.1:{port}"]
    words += [f"--storage.tsdb.path={folder / 'data'}", "--log.level=warn"]
    with run_server(words, port, folder / "prometheus.log", "/-/ready"):
        yield f"http://127.0.0.1:{port}"


def query(prometheus: str, expression: str) -> list[Any]:
    """The series that an expression of a dashboard gives, with every variable at "All"."""
    text = expression.replace("$__rate_interval", "20s")
    for variable in ("$run", "$node", "$instance", "$gpu"):
        text = text.replace(variable, ".*")
    url = f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': text})}"
    with urllib.request.urlopen(url, timeout=20) as response:
        answer = json.load(response)
    assert answer["status"] == "success", answer
    return list(answer["data"]["result"])


def dashboard_expressions() -> list[str]:
    panels = json.loads(DASHBOARD_FILE.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


@pytest.mark.parametrize("expression", dashboard_expressions())
def test_an_expression_of_the_dashboard_finds_data(
    prometheus: str, expression: str, wait_until: Callable[[Callable[[], bool]], None]
) -> None:
    wait_until(lambda: bool(query(prometheus, expression)))


def test_what_is_shown_is_what_is_so(prometheus: str, wait_until: Callable[[Callable[[], bool]], None]) -> None:
    def value(expression: str) -> float | None:
        found = query(prometheus, expression)
        return float(found[0]["value"][1]) if len(found) == 1 else None

    wait_until(lambda: value("sum by (node) (phalanx_device_power_watts)") == 8 * 650.0)
    wait_until(lambda: value('phalanx_runs{status="running"}') == 1)
    assert value('phalanx_runs{status="done"}') == 1
    assert value("phalanx_run_step") == 120
    assert value('phalanx_jobs{state="queued"}') == 0
    assert value("min(phalanx_device_temperature_margin_kelvins)") == 13.0
    assert value('DCGM_FI_DEV_SM_CLOCK{gpu="3"}') == 1755.0


def test_promtool_finds_no_fault_in_the_configurations_of_the_docs(tmp_path: Path) -> None:
    if (promtool := find_program("promtool")) is None:
        pytest.skip("NOTHING IS TESTED WITH PROMTOOL: there is none")
    (tmp_path / "token").write_text(TOKEN)
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "metrics.md").read_text()
    blocks = re.findall(r"```yml\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        (tmp_path / "prometheus.yml").write_text(block.replace("/etc/prometheus/phalanx-token", "token"))
        words = [promtool, "check", "config", str(tmp_path / "prometheus.yml")]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
