"""Runs that are killed, resumed and sent to real trackers: each step arrives once, with its final value."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fake_tracker import GrowingRun
from phalanx.app import trackers
from phalanx.app.trackers import feed_trackers
from phalanx.errors import ExitCode
from phalanx.run import Run, read_events, select_final_steps
from phalanx.run.event_types import EvaluationDone
from read_trackers import Points, read_tensorboard, read_trackio, read_wandb
from server_processes import find_free_port
from train_harness import TrainHarness, plan_fault, wait_until, write_faults

MLFLOW_SERVER = Path(__file__).parents[2] / "build" / "mlflow" / "venv" / "bin" / "mlflow"
SERVER_START_S = 120
BLOCKED_STEP = 7


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The variables of trackers that need no network; trackio's folder."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))  # no keys
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    return tmp_path / "trackio"


@pytest.fixture(scope="module")
def mlflow_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server with SQLite."""
    if not MLFLOW_SERVER.exists():
        pytest.skip("no MLflow server here: make build/mlflow/venv/.installed")
    folder = tmp_path_factory.mktemp("mlflow")
    port = find_free_port()
    url = f"http://127.0.0.1:{port}"
    command = [MLFLOW_SERVER, "server", "--backend-store-uri", "sqlite:///runs.db", "--port", str(port)]
    command += ["--workers", "1", "--artifacts-destination", "artifacts"]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            list(map(str, command)), cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_until(lambda: is_healthy(url), SERVER_START_S, "the MLflow server")
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_healthy(url: str) -> bool:
    with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(f"{url}/health") as answer:
        return bool(answer.status == 200)
    return False


def read_mlflow(url: str, run: Run, metric: str) -> Points:
    """The points of a metric on the server, as its API gives them."""
    run_id = json.loads((run.trackers / "mlflow.json").read_text())["remote_id"]
    query = f"{url}/api/2.0/mlflow/metrics/get-history?run_id={run_id}&metric_key={metric}"
    with urllib.request.urlopen(query) as answer:
        points = json.load(answer).get("metrics", [])
    return sorted((int(point.get("step", 0)), point["value"]) for point in points)


def train_killed_and_resumed(lab: TrainHarness, names: list[str]) -> Run:
    """A run whose agent, and with it the trackers' processes, is killed after step 6 of 12, when the trackers have what
    they may have; later a worker is killed."""
    run, recipe = lab.new_run(), lab.recipe_file({"trackers": names}, "tracked")
    write_faults(run, [plan_fault(BLOCKED_STEP, "block")])
    with lab.start("train", recipe, "--run", run.path) as process:
        wait_until(lambda: all(sent_step(run, name) >= 4 for name in names), 200, "the trackers to have step 4")
        process.kill()
    write_faults(run, [plan_fault(10, "kill", attempt=1)])
    ended = lab.command("train", recipe, "--run", run.path)
    assert ended.returncode == ExitCode.DONE, ended.stderr
    return run


def sent_step(run: Run, name: str) -> int:
    with contextlib.suppress(FileNotFoundError):
        return int(json.loads((run.trackers / f"{name}.json").read_text())["sent_step"])
    return -1


def final_losses(run: Run) -> Points:
    return [(event.step, pytest.approx(event.loss, rel=1e-6)) for event in select_final_steps(read_events(run.events))]


def final_validation_losses(run: Run) -> Points:
    evaluations = [event for event in read_events(run.events) if isinstance(event, EvaluationDone)]
    by_step = {event.step: pytest.approx(event.loss, rel=1e-6) for event in evaluations}
    return sorted(by_step.items(), key=lambda item: item[0])


def test_tensorboard_wandb_and_trackio_have_each_step_of_a_killed_run_once(
    lab: TrainHarness, environment: Path
) -> None:
    run = train_killed_and_resumed(lab, ["tensorboard", "wandb", "trackio"])
    losses, validation = final_losses(run), final_validation_losses(run)
    assert [step for step, _ in losses] == list(range(1, 13))
    assert read_tensorboard(run, "train/loss") == losses
    assert read_tensorboard(run, "val/loss") == validation
    assert read_wandb(run, "train/loss") == losses
    assert read_wandb(run, "val/loss") == validation
    assert read_trackio(environment, "train/loss") == losses
    assert read_trackio(environment, "val/loss") == validation


def test_mlflow_has_each_step_of_a_killed_run_once(
    lab: TrainHarness, environment: Path, mlflow_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_url)
    run = train_killed_and_resumed(lab, ["mlflow"])
    assert read_mlflow(mlflow_url, run, "train/loss") == final_losses(run)
    assert read_mlflow(mlflow_url, run, "val/loss") == final_validation_losses(run)


def test_a_run_ends_as_usual_when_mlflow_is_down_and_report_completes_it_later(
    lab: TrainHarness, environment: Path, mlflow_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = lab.new_run()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    ended = lab.command("train", lab.recipe_file({"trackers": ["mlflow"]}, "down"), "--run", run.path)
    assert ended.returncode == ExitCode.DONE, ended.stderr
    assert "mlflow: cannot send, training continues without it: MlflowException" in ended.stderr
    assert f"mlflow: is not complete; send the rest with: phalanx report --to mlflow {run.path}" in ended.stderr
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_url)
    reported = lab.command("report", "--to", "mlflow", run.path)
    assert reported.returncode == 0, reported.stderr
    assert reported.stdout.startswith(f"{run.path} is in mlflow up to step 12: {mlflow_url}, experiment ")
    assert read_mlflow(mlflow_url, run, "train/loss") == final_losses(run)


def test_a_tracker_that_never_answers_delays_the_end_no_longer_than_its_limit(
    tmp_path: Path, environment: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path / "run")
    run.create()
    monkeypatch.setattr(trackers, "MAX_WAIT_AT_END_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with feed_trackers(run, ["mlflow"]):
            silent.accept()[0].close()  # it has asked once; the next time nothing comes
            began = time.monotonic()
    assert time.monotonic() - began < 5
    assert "mlflow: not complete after 0 s; send the rest with: phalanx report --to mlflow" in caplog.text


def test_a_signal_for_all_processes_of_a_job_does_not_end_a_tracker_before_the_run(tmp_path: Path) -> None:
    growing = GrowingRun(tmp_path / "run")
    with feed_trackers(growing.run, ["tensorboard"]):
        growing.start().train(1, 5)
        wait_until(lambda: sent_step(growing.run, "tensorboard") == 5)
        children = psutil.Process().children()
        (process,) = [each for each in children if "phalanx.observe.trackers.feed" in each.cmdline()]
        process.send_signal(signal.SIGTERM)
        growing.train(6, 9).end(9)
    assert [step for step, _ in read_tensorboard(growing.run, "train/loss")] == list(range(1, 10))


def test_wandb_without_a_key_is_named(lab: TrainHarness, environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = lab.train_reference().run
    monkeypatch.setenv("WANDB_MODE", "online")
    reported = lab.command("report", "--to", "wandb", run.path)
    assert reported.returncode == ExitCode.USAGE
    assert "wandb: cannot send: UsageError: No API key configured. Use `wandb login` to log in." in reported.stderr
