"""Pages of nodes, power and cooling, and of a simulation, in a real browser."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chromium import Page
from make_run import healthy
from phalanx.telemetry.agent_endpoint import AgentEndpoint
from phalanx.telemetry.sample import DeviceSample, NodeSample
from phalanx_fleet.pages.site_history import HistoryWriter
from phalanx_fleet.simulate.page import render_simulation_html
from phalanx_fleet.simulate.variants import simulate_variants
from serve_process import ServeProcess, find_violations, wait_until

FLEET = Path(__file__).parents[2] / "examples" / "fleet.yaml"
NODE = os.uname().nodename
PAGES = ("/nodes", "/power", "/cooling", f"/nodes/{NODE}")


@pytest.fixture(scope="module")
def page(browser: str) -> Iterator[Page]:
    with Page(browser) as page:
        yield page


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentEndpoint]:
    """The agent of this machine, of which readings arrive each second."""
    try:
        socket.gethostbyname(NODE)
    except OSError:
        pytest.skip(f"the host name {NODE} has no address")
    endpoint = AgentEndpoint(NODE, 0)
    endpoint.publish(make_sample(350.0))
    yield endpoint
    endpoint.close()


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory, agent: AgentEndpoint) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("serve")
    healthy(folder / "runs" / "first")
    write_history(folder / "state" / "history-hall-a.db")
    arguments = [str(folder / "runs"), "--fleet", str(FLEET), "--agent-port", str(agent.port)]
    server = ServeProcess(*arguments, PHALANX_STATE_DIR=str(folder / "state"))
    yield server
    assert server.end() == (0, "")


def write_history(path: Path) -> None:
    """A day, a point each 10 minutes."""
    history, now = HistoryWriter(path), time.time()
    for back in range(86_400, 0, -600):
        draws = {(NODE, "draw_w"): 300.0, (NODE, "margin_k"): 20.0, ("rack r01", "draw_w"): 30_000.0 + back % 1800}
        history.write(now - back, draws)
    history.close()


def make_sample(power_w: float) -> NodeSample:
    return NodeSample(1.0, devices=(DeviceSample(id="GPU-a", name="H100", power_mean_w=power_w),))


def test_the_page_of_a_node_has_its_last_day_and_its_devices_each_second(
    page: Page, serve: ServeProcess, agent: AgentEndpoint
) -> None:
    def shows(power_w: float) -> bool:
        agent.publish(make_sample(power_w))
        text: str = page.evaluate("document.querySelector('#node')?.textContent ?? ''")
        return f"GPU-a H100{power_w:.0f} W" in text

    page.visit(f"{serve.base}/nodes")
    wait_until(lambda: page.evaluate(f"document.querySelector('#nodes a[href=\"nodes/{NODE}\"]') != null"))
    page.visit(f"{serve.base}/nodes/{NODE}")
    wait_until(lambda: shows(350.0))
    assert page.evaluate("document.querySelectorAll('#charts canvas').length") == 2
    wait_until(lambda: shows(400.0))


def test_the_page_of_power_has_a_bar_and_a_line_of_a_level_and_nodes_below_racks(
    page: Page, serve: ServeProcess
) -> None:
    page.visit(f"{serve.base}/power")
    rack = "[...document.querySelectorAll('tbody tr')].find((row) => row.textContent.includes('rack r01'))"
    wait_until(lambda: page.evaluate(f"{rack}?.querySelector('svg.spark polyline') != null"))
    assert page.evaluate(f"{rack}.querySelectorAll('svg.power-bar rect').length") >= 2
    assert page.evaluate(f"{rack}.nextElementSibling.querySelector('a').textContent") == "node r01-1"


def test_no_page_has_a_serious_finding_of_accessibility(page: Page, serve: ServeProcess) -> None:
    for path in PAGES:
        page.visit(f"{serve.base}{path}")
        assert find_violations(page) == [], path


def test_pages_are_used_on_a_phone_in_the_dark(page: Page, serve: ServeProcess) -> None:
    page.resize(390, 800)
    page.prefer_colors("dark")
    for path in PAGES:
        page.visit(f"{serve.base}{path}")
        assert page.evaluate("document.documentElement.scrollWidth <= 390"), path
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    page.resize(1100, 900)
    page.prefer_colors("light")


def test_the_page_of_a_simulation_is_accessible_and_asks_for_nothing(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "simulation.html"
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(FLEET.read_text().replace("days: 90", "days: 5"))
    path.write_text(render_simulation_html(simulate_variants(fleet, ["spares=0.1"], None, 1)))
    page.visit("about:blank")  # which ends the stream of the last test's server
    page.messages.clear()
    page.requests.clear()
    page.open(path)
    assert page.evaluate("document.querySelectorAll('figure.chart canvas').length") >= 4
    assert find_violations(page) == []
    assert page.messages == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []
