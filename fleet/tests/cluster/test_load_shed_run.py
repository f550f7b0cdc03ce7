"""A load target pauses a real job of the local queue; it ends with the weights of one that was not paused."""

import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

import phalanx
from phalanx.jobs.spec import JobState
from phalanx_fleet.power import job_shedder
from phalanx_fleet.power.control import load_power_fleet
from phalanx_fleet.power.guard_loop import hold_budgets
from phalanx_fleet.power.open_links import open_links

RECIPE = """\
name: small
model: {build: "phalanx.models:transformer", args: {layers: 1, hidden_size: 16, num_heads: 2}}
data: {source: {text: "*.txt"}, seq_len: 16}
evaluation: {every: null}
batch: {global_size: 4, micro_size: 4}
steps: 400
precision: fp32
compile: false
num_threads: 1
checkpoint: {every: 100000}
"""
FLEET = """\
sites: {s: {}}
feeds: {a: {site: s}}
rows: {r: {feed: a}}
racks: {k: {row: r, node_type: h, nodes: 2}}
node_types: {h: {node: dgx-h100, device_min_cap: 200 W}}
power: {averaging_s: 0.5, dead_time_s: 0.5}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PHALANX_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job_shedder, "RESUME_AFTER_S", 1.0)
    monkeypatch.setattr(job_shedder, "POLL_INTERVAL_S", 0.2)
    (tmp_path / "words.txt").write_text("a few words of no meaning. " * 200)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "fleet.yaml").write_text(FLEET)
    return tmp_path


@pytest.mark.slow
def test_a_job_that_is_shed_resumes_with_the_same_bits(folder: Path) -> None:
    whole = phalanx.submit("recipe.yaml", ["name=whole"], run="runs/whole", on="local")
    expected = whole.result(timeout_s=200)["digest"]
    job = phalanx.submit("recipe.yaml", run="runs/shed")
    (folder / "jobs.yaml").write_text(
        f'jobs: {{shed: {{nodes: k-1, job: "local:{job.id}"}}, other: {{nodes: k-2, priority: 1}}}}'
    )
    while not any(" step " in line for line in job.logs()):
        time.sleep(0.05)
    times = [datetime.fromtimestamp(time.time() + each, UTC).isoformat() for each in (0.0, 8.0)]
    (folder / "targets.yaml").write_text(
        f"targets: [{{level: feed a, limit: 15 kW, start: '{times[0]}', end: '{times[1]}'}}]"
    )
    fleet = load_power_fleet(folder / "fleet.yaml", folder / "jobs.yaml", folder / "targets.yaml")
    links = open_links(fleet, is_fake=True, is_read_only=False)
    notices: list[str] = []
    states: list[JobState] = []
    for status in hold_budgets(fleet, links, takes_over=False, duration_s=120.0):
        notices += status.notices
        states.append(job.status().state)
        if any("resuming" in text for text in notices):
            break
    assert [text.partition(" (")[0] for text in notices] == ["pausing shed", "shed", "resuming shed"]
    assert JobState.QUEUED in states
    result = job.result(timeout_s=200)
    assert (result["steps"], result["digest"]) == (400, expected)
    assert job.status().num_attempts == 2
