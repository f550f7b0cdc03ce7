"""The live page in a real browser, while a real job trains next to it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from chromium import Page

import phalanx
from make_run import Maker, healthy, troubled
from phalanx.app.job_handle import JobHandle
from phalanx.app.simulate import simulate_variants
from phalanx.app.simulation_page import render_simulation_html
from phalanx.jobs.spec import JobState
from phalanx.run import read_events
from phalanx.run.event_types import StepDone, WorkerStarted

RECIPE = """\
name: small
model: {build: "phalanx.models:transformer", args: {layers: 1, hidden_size: 16, num_heads: 2}}
data: {source: {text: "*.txt"}, seq_len: 16}
evaluation: {every: null}
batch: {global_size: 4, micro_size: 4}
steps: 1000000
precision: fp32
compile: false
num_threads: 1
checkpoint: {every: 200}
"""
FLEET = Path(__file__).parents[2] / "examples" / "fleet.yaml"
TIMEOUT_S = 60.0
TOKEN = "a-token-for-the-test"
CHART_POINTS = "drawnCharts[0]?.plot.data[0].length ?? 0"


def wait_until(check: Callable[[], Any]) -> Any:
    """What `check` returns once that is true."""
    until = time.monotonic() + TIMEOUT_S
    while not (found := check()):
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.1)
    return found


class ServeProcess:
    """A `phalanx serve` of its own."""

    def __init__(self, *arguments: str, **environment: str):
        access = [] if "PHALANX_SERVE_TOKEN" in environment else ["--no-token"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "phalanx", "serve", "--port", "0", *arguments, *access],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("serving "), line + self.process.stdout.read()
        self.address = line.split()[1]
        self.base = self.address.partition("/?")[0].rstrip("/")

    def end(self) -> tuple[int, str]:
        """Press Ctrl-C; exit code and what it printed since."""
        self.process.send_signal(signal.SIGINT)
        output, _ = self.process.communicate(timeout=20)
        return self.process.returncode, output


@pytest.fixture(scope="module")
def page(browser: str) -> Iterator[Page]:
    with Page(browser) as page:
        yield page


@pytest.fixture(autouse=True)
def _forget(page: Page) -> None:
    page.messages.clear()
    page.requests.clear()
    page.send("Network.clearBrowserCookies")


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobHandle]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("a few words of no meaning. " * 200)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    job = phalanx.submit(tmp_path / "recipe.yaml")
    yield job
    job.cancel()
    job.wait(timeout_s=TIMEOUT_S)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for number, name in enumerate(("first", "second")):
        healthy(tmp_path / "runs" / name, seed=number)
    troubled(tmp_path / "runs" / "troubled")
    return tmp_path / "runs"


@pytest.fixture
def serve(runs: Path) -> Iterator[ServeProcess]:
    server = ServeProcess(str(runs), "--fleet", str(FLEET))
    yield server
    assert server.end() == (0, "")


def text_of(page: Page, selector: str) -> str:
    return page.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText") or ""


def open_run(page: Page, server: ServeProcess, name: str) -> None:
    page.visit(f"{server.base}/")
    link = f"[...document.querySelectorAll('table.list a')].find((a) => a.innerText.includes('{name}'))?.href"
    page.visit(wait_until(lambda: page.evaluate(link)))


def test_a_job_is_watched_through_a_fault_and_cancelled_with_the_token_only(page: Page, job: JobHandle) -> None:
    server = ServeProcess("--allow-actions", PHALANX_SERVE_TOKEN=TOKEN)
    try:
        steps = lambda: [event for event in read_events(job.run.events) if isinstance(event, StepDone)]  # noqa: E731
        wait_until(lambda: len(steps()) > 20)
        page.visit(server.address)
        assert TOKEN not in page.evaluate("location.href")
        open_run(page, server, "small")
        before = wait_until(lambda: page.evaluate(CHART_POINTS))
        wait_until(lambda: page.evaluate(CHART_POINTS) > before)
        assert text_of(page, "#connection") == "live"

        (worker,) = [event for event in read_events(job.run.events) if isinstance(event, WorkerStarted)]
        os.kill(worker.pid, signal.SIGKILL)
        wait_until(lambda: "rank 0: SIGKILL" in text_of(page, "#events"))
        wait_until(lambda: "attempt 1 with 1 worker" in text_of(page, "#events"))

        page.visit(f"{server.base}/jobs")
        cancel = "document.querySelector('button.act')"
        page.send("Network.clearBrowserCookies")
        page.evaluate("window.confirm = () => true")
        page.evaluate(f"{cancel}.click()")
        wait_until(lambda: "address with the token" in text_of(page, "#answer"))
        assert job.status().state is JobState.RUNNING

        page.visit(server.address)
        page.visit(f"{server.base}/jobs")
        page.evaluate("window.confirm = () => true")
        wait_until(lambda: page.evaluate(f"{cancel} !== null"))
        page.evaluate(f"{cancel}.click()")
        wait_until(lambda: "cancelled" in text_of(page, "#jobs .status"))
        assert job.wait(timeout_s=TIMEOUT_S).state is JobState.CANCELLED
        outside = [url for url in page.requests if not url.startswith((server.base, "data:"))]
        assert outside == []
        assert [message for message in page.messages if "403" not in message] == []
    finally:
        server.end()


def find_violations(page: Page) -> list[str]:
    """Serious findings of axe on the page."""
    page.evaluate(resources.files("axe_core_python").joinpath("axe.min.js").read_text())
    page.send("Runtime.evaluate", expression="axe.run().then((found) => { window.found = found; })", awaitPromise=True)
    found: list[str] = page.evaluate(
        "found.violations.filter((each) => ['serious', 'critical'].includes(each.impact))"
        ".map((each) => `${each.id}: ${each.nodes[0].html}`)"
    )
    return found


def test_no_page_has_a_serious_finding_of_accessibility(page: Page, serve: ServeProcess) -> None:
    open_run(page, serve, "troubled")
    run_page = page.evaluate("location.pathname")
    ids = [wait_until(lambda: page.evaluate("location.pathname.split('/').pop()"))] * 2
    for path in (
        "/",
        "/jobs",
        "/cluster",
        "/nodes",
        "/power",
        "/cooling",
        f"/nodes/{os.uname().nodename}",
        run_page,
        f"{run_page}/logs",
        f"/compare?run={ids[0]}&run={ids[1]}",
        "/nothing",
    ):
        page.visit(f"{serve.base}{path}")
        assert find_violations(page) == [], path


def test_the_page_of_a_simulation_is_accessible_and_asks_for_nothing(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "simulation.html"
    path.write_text(render_simulation_html(simulate_variants(FLEET, ["spares=0.1"], None, 1, ["simulate.days=5"])))
    page.open(path)
    assert page.evaluate("document.querySelectorAll('figure.chart canvas').length") >= 4
    assert find_violations(page) == []
    assert page.messages == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []


def test_pages_are_used_on_a_phone_in_the_dark_and_by_keyboard(page: Page, serve: ServeProcess) -> None:
    page.resize(390, 800)
    page.dark()
    open_run(page, serve, "troubled")
    run_page = page.evaluate("location.pathname")
    for path in ("/", "/jobs", "/nodes", "/power", "/cooling", "/cluster", run_page, f"{run_page}/logs"):
        page.visit(f"{serve.base}{path}")
        assert page.evaluate("document.documentElement.scrollWidth <= 390"), path
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    page.resize(1100, 900)
    page.visit(f"{serve.base}/")
    for key in ("Tab",) * 3:
        for kind in ("rawKeyDown", "keyUp"):
            page.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=9)
    assert page.evaluate("document.activeElement.innerText") == "Jobs"


def test_runs_are_ticked_and_compared_while_the_list_is_renewed(page: Page, serve: ServeProcess, runs: Path) -> None:
    page.visit(f"{serve.base}/")
    wait_until(lambda: page.evaluate("document.querySelectorAll('tbody input').length") == 3)
    page.evaluate(
        "document.querySelectorAll('tbody input')[0].click(), document.querySelectorAll('tbody input')[1].click()"
    )
    maker = Maker(runs / "new")
    maker.start()
    maker.step(1)
    wait_until(lambda: page.evaluate("document.querySelectorAll('tbody input').length") == 4)
    assert page.evaluate("document.querySelectorAll('tbody input:checked').length") == 2
    page.evaluate(
        "[...document.querySelectorAll('button')].find((each) => each.innerText.startsWith('Compare')).click()"
    )
    wait_until(lambda: "Recipe keys that differ" in text_of(page, "main"))


def test_a_page_says_that_its_server_is_gone(page: Page, runs: Path) -> None:
    server = ServeProcess(str(runs))
    open_run(page, server, "first")
    wait_until(lambda: text_of(page, "#connection") == "live")
    server.process.kill()
    server.process.communicate()
    wait_until(lambda: text_of(page, "#connection").startswith("no connection"))


HOSTILE = '"><script>document.title="ran"</script><img src=x onerror=\'document.title="ran"\'>\x1b[31m\u202e'


def test_a_hostile_run_directory_is_shown_and_nothing_of_it_runs(page: Page, tmp_path: Path) -> None:
    run = troubled(tmp_path / "runs" / f"x{HOSTILE.replace('/', '')}")
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    for line in lines:
        line.update({key: value + HOSTILE for key, value in line.items() if isinstance(value, str) and key != "kind"})
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "half a line")
    (run / "logs").mkdir()
    (run / "logs" / "attempt-0-rank-0.log").write_text(HOSTILE * 100)
    server = ServeProcess(str(tmp_path / "runs"))
    try:
        open_run(page, server, "script")
        wait_until(lambda: text_of(page, "#connection") == "live")
        run_page = page.evaluate("location.pathname")
        for path in ("/", run_page, f"{run_page}/logs", f"{run_page}/logs?q=%3Cscript%3E"):
            page.visit(f"{server.base}{path}")
            assert "script" in text_of(page, "main")
            assert page.evaluate("document.title") != "ran"
            assert page.evaluate("document.querySelectorAll('main img, main script:not([type])').length") == 0
    finally:
        server.end()


def test_a_second_server_on_a_port_says_so(serve: ServeProcess) -> None:
    port = serve.base.rpartition(":")[2]
    second = subprocess.run(
        [sys.executable, "-m", "phalanx", "serve", "--port", port], capture_output=True, text=True, timeout=60
    )
    assert second.returncode == 64
    assert f"port {port} is in use" in second.stderr
    assert "Traceback" not in second.stderr


def test_a_machine_without_runs_shows_a_page_that_says_so(page: Page, tmp_path: Path) -> None:
    server = ServeProcess(str(tmp_path / "nothing"))
    try:
        page.visit(f"{server.base}/")
        wait_until(lambda: "No runs here yet" in text_of(page, "main"))
    finally:
        server.end()
