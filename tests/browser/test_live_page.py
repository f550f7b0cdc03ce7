"""The live page in a real browser, while a real job trains next to it."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

import faults
import phalanx
from chromium import Page
from fake_nodes import add_minute
from make_run import T0, Maker, healthy, troubled
from phalanx.app.job_handle import JobHandle
from phalanx.jobs.spec import JobState
from phalanx.run import Run, read_events
from phalanx.run.event_types import StepDone, WorkerStarted
from serve_process import TIMEOUT_S, ServeProcess, find_violations, wait_until
from train_harness import plan_fault, write_faults

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
checkpoint: {every: 10}
callbacks: ["faults:Faults"]
"""
TOKEN = "a-token-for-the-test"
CHART_POINTS = "drawnCharts[0]?.plot.data[0].length ?? 0"


@pytest.fixture(scope="module")
def page(browser: str) -> Iterator[Page]:
    with Page(browser) as page:
        yield page


@pytest.fixture(autouse=True)
def _forget(page: Page) -> None:
    page.visit("about:blank")  # else the page of the test before asks for its stream, at a server that has ended
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
    shutil.copy(faults.__file__, tmp_path)
    # steps without a pause would keep a core busy with nothing that the pages show
    write_faults(Run(tmp_path / "runs" / "small"), [plan_fault(1, "slow", delay=0.05, attempt=None)])
    job = phalanx.submit(tmp_path / "recipe.yaml")
    yield job
    job.cancel()
    job.wait(timeout_s=TIMEOUT_S)


def make_runs(folder: Path) -> Path:
    for number, name in enumerate(("first", "second")):
        healthy(folder / name, seed=number)
    troubled(folder / "troubled")
    return folder


@pytest.fixture(scope="module")
def shared_serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A server for tests that only look at its pages."""
    folder = tmp_path_factory.mktemp("shared")
    state = {"PHALANX_STATE_DIR": str(folder / "state"), "PHALANX_CACHE_DIR": str(folder / "cache")}
    server = ServeProcess(str(make_runs(folder / "runs")), **state)
    yield server
    assert server.end() == (0, "")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return make_runs(tmp_path / "runs")


@pytest.fixture
def serve(runs: Path) -> Iterator[ServeProcess]:
    server = ServeProcess(str(runs))
    yield server
    assert server.end() == (0, "")


def text_of(page: Page, selector: str) -> str:
    return page.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText") or ""


def press(page: Page, key: str, code: int) -> None:
    for kind in ("keyDown", "keyUp"):
        text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
        page.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)


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
        wait_until(lambda: "killed by SIGKILL" in text_of(page, "#events"))
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


def test_no_page_has_a_serious_finding_of_accessibility(page: Page, shared_serve: ServeProcess) -> None:
    open_run(page, shared_serve, "troubled")
    run_page = page.evaluate("location.pathname")
    ids = [wait_until(lambda: page.evaluate("location.pathname.split('/').pop()"))] * 2
    for path in (
        "/",
        "/jobs",
        run_page,
        f"{run_page}/logs",
        f"/compare?run={ids[0]}&run={ids[1]}",
        "/nothing",
    ):
        page.visit(f"{shared_serve.base}{path}")
        assert find_violations(page) == [], path


def test_no_page_is_wider_than_a_phone_of_400_pixels(page: Page, shared_serve: ServeProcess, tmp_path: Path) -> None:
    page.resize(400, 800)
    open_run(page, shared_serve, "troubled")
    run_page = page.evaluate("location.pathname")
    for name, path in {"run": run_page, "runs": "/", "jobs": "/jobs", "logs": f"{run_page}/logs"}.items():
        page.visit(f"{shared_serve.base}{path}")
        (tmp_path / f"{name}-400.png").write_bytes(page.picture())
        widths = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert widths == [400, 400], path
    page.resize(1100, 900)


def test_dark_colors_change_the_background(page: Page, shared_serve: ServeProcess, tmp_path: Path) -> None:
    open_run(page, shared_serve, "troubled")
    run_page = page.evaluate("location.pathname")
    for name, path in {"run": run_page, "runs": "/"}.items():
        page.visit(f"{shared_serve.base}{path}")
        corners = []
        for scheme in ("light", "dark"):
            page.prefer_colors(scheme)
            picture = page.picture()
            (tmp_path / f"{name}-{scheme}.png").write_bytes(picture)
            corners.append(Image.open(io.BytesIO(picture)).convert("L").getpixel((3, 850)))
        assert corners[0] > 240, path
        assert corners[1] < 40, path
    page.prefer_colors("light")


def test_the_pages_are_in_reach_of_the_keyboard(page: Page, shared_serve: ServeProcess) -> None:
    page.visit(f"{shared_serve.base}/")
    for _ in range(3):
        press(page, "Tab", 9)
    assert page.evaluate("document.activeElement.innerText") == "Jobs"


def test_a_column_is_sorted_by_keyboard_and_stays_sorted_while_the_list_is_renewed(
    page: Page, serve: ServeProcess, runs: Path
) -> None:
    names = "[...document.querySelectorAll('tbody a')].map((link) => link.innerText)"
    focus = "document.querySelector('[data-key=\"sort run\"]').focus()"
    page.visit(f"{serve.base}/")
    wait_until(lambda: page.evaluate(f"{names}.length") == 3)
    for order in ("ascending", "descending"):
        page.evaluate(focus)
        press(page, "Enter", 13)
        wait_until(
            lambda order=order: page.evaluate(f"document.querySelector('[aria-sort={order}]')?.innerText") == "run"
        )
    wait_until(lambda: page.evaluate(names) == ["troubled", "second", "first"])
    page.evaluate(focus)
    Maker(runs / "new").start().step(1)
    wait_until(lambda: page.evaluate(names) == ["troubled", "second", "new", "first"])
    assert page.evaluate("document.activeElement.dataset.key") == "sort run"
    assert page.evaluate("document.querySelector('[aria-sort]').getAttribute('aria-sort')") == "descending"


def test_a_run_is_shown_over_time_with_its_nodes_and_its_log_while_it_is_renewed(
    page: Page, serve: ServeProcess, runs: Path
) -> None:
    maker = Maker(runs / "alive").start().steps(1, 30)
    (maker.path / "telemetry").mkdir()
    (maker.path / "logs").mkdir()
    add_minute(maker.path, "node-1", T0, watts=123.0)
    page.visit(f"{serve.base}/")
    wait_until(lambda: "alive" in text_of(page, "#runs"))
    open_run(page, serve, "alive")
    assert text_of(page, ".axis [aria-current]") == "step"
    page.evaluate("[...document.querySelectorAll('.axis a')].find((link) => link.innerText === 'time').click()")
    wait_until(lambda: text_of(page, ".axis [aria-current]") == "time")
    ends = "drawnCharts.map((chart) => chart.plot.scales.x.max)"
    before = wait_until(lambda: page.evaluate(ends))
    assert "CPU power, W" in text_of(page, "#charts")
    assert len(set(before)) == 1
    maker.steps(31, 200)
    (maker.path / "logs" / "attempt-0-rank-0.log").write_text("a line that was added\n")
    wait_until(lambda: page.evaluate(ends)[0] > before[0])
    wait_until(lambda: "a line that was added" in text_of(page, "#log-tail"))
    assert page.messages == []


def test_runs_are_ticked_and_compared_while_the_list_is_renewed(page: Page, serve: ServeProcess, runs: Path) -> None:
    page.visit(f"{serve.base}/")
    wait_until(lambda: page.evaluate("document.querySelectorAll('tbody input').length") == 3)
    page.evaluate(
        "document.querySelectorAll('tbody input')[0].click(), document.querySelectorAll('tbody input')[1].click()"
    )
    Maker(runs / "new").start().step(1)
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


def test_a_second_server_on_a_port_says_so(shared_serve: ServeProcess) -> None:
    port = shared_serve.base.rpartition(":")[2]
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
