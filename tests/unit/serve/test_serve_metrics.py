"""Metrics of runs, jobs and agents, the dashboard that shows them, and their table in the docs."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from made_samples import full_node
from phalanx.serve import metrics
from phalanx.serve.app import DASHBOARD_FILE
from phalanx.serve.metrics import build_metrics, list_metrics
from phalanx.serve.run_index import RunRow
from phalanx.telemetry.exposition import build_node_metrics, list_node_metrics, render_families

NOW = 1_790_000_000.0
DASHBOARD = json.loads(DASHBOARD_FILE.read_text())
PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "metrics.md").read_text()


def row(path: str = "runs/one", **values: Any) -> RunRow:
    return RunRow(Path(path), None, **{"last_written_at": NOW - 1, "first_event_at": NOW - 60, **values})


def values_of(*rows: RunRow, has_all_runs: bool = True, job_states: Sequence[str] | None = ()) -> dict[str, Any]:
    """The values of each metric by run, status or state, as Prometheus reads the page."""
    return read_page(build_metrics(NOW, rows, has_all_runs, job_states))


def values_of_agent() -> dict[str, dict[str, float]]:
    """The values of each metric by node, as Prometheus reads the page of an agent."""
    return read_page(build_node_metrics({"n1": full_node(NOW)}))


def read_page(families: Iterable[Metric]) -> dict[str, dict[str, float]]:
    page = render_families(families).decode()
    values: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(page):
        for each in family.samples:
            values.setdefault(each.name, {})[each.labels.get("node") or next(iter(each.labels.values()))] = each.value
    return values


def test_a_running_run_has_its_values_and_leaves_out_what_it_has_not() -> None:
    values = values_of(row(step=7, total_steps=10, loss=2.5, units_per_s=4096.0, step_s=0.5, world_size=2))
    assert values["phalanx_run_step"] == {"runs/one": 7.0}
    assert values["phalanx_run_total_steps"] == {"runs/one": 10.0}
    assert values["phalanx_run_loss"] == {"runs/one": 2.5}
    assert values["phalanx_run_units_per_second"] == {"runs/one": 4096.0}
    assert values["phalanx_run_step_seconds"] == {"runs/one": 0.5}
    assert values["phalanx_run_workers"] == {"runs/one": 2.0}
    assert values["phalanx_run_last_written_timestamp_seconds"] == {"runs/one": NOW - 1}
    assert "phalanx_run_validation_loss" not in values


def test_only_running_runs_have_series_of_their_own_and_all_are_counted() -> None:
    done = row("runs/done", ended_as="done")
    killed = row("runs/killed", last_written_at=NOW - 1000)
    values = values_of(row(), done, killed, row("runs/bad", problem="no permission"))
    assert values["phalanx_run_step"].keys() == {"runs/one"}
    assert {status: count for status, count in values["phalanx_runs"].items() if count} == {
        "running": 1,
        "done": 1,
        "incomplete": 1,
        "unreadable": 1,
    }
    assert values["phalanx_runs"]["failed"] == 0


def test_of_more_running_runs_than_there_may_be_series_the_newest_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_RUNS", 2)
    values = values_of(*(row(f"runs/{age}", last_written_at=NOW - age) for age in (3, 1, 2)))
    assert values["phalanx_run_step"].keys() == {"runs/1", "runs/2"}
    assert values["phalanx_runs"]["running"] == 3


def test_a_path_that_is_no_utf8_or_has_markup_is_a_label_too() -> None:
    path = os.fsdecode(b'runs/\xff"\n\\{}')
    assert values_of(row(path))["phalanx_run_step"] == {'runs/\\udcff"\n\\{}': 0.0}


def test_jobs_are_counted_by_state() -> None:
    values = values_of(job_states=["queued", "queued", "done"])
    assert values["phalanx_jobs"] == {
        "queued": 2,
        "running": 0,
        "done": 1,
        "interrupted": 0,
        "failed": 0,
        "cancelled": 0,
    }


def test_jobs_that_could_not_be_read_are_missing_and_not_0() -> None:
    assert "phalanx_jobs" not in values_of(job_states=None)


def test_runs_are_not_counted_before_all_are_found() -> None:
    values = values_of(row(), has_all_runs=False)
    assert "phalanx_runs" not in values
    assert values["phalanx_run_step"] == {"runs/one": 0.0}


def test_the_list_of_metrics_is_what_a_full_snapshot_has() -> None:
    full = row(total_steps=10, loss=2.5, validation_loss=2.0, units_per_s=4096.0, step_s=0.5, world_size=2)
    assert values_of(full).keys() == {definition.name for definition in list_metrics()}


def test_the_list_of_an_agents_metrics_is_what_a_full_sample_has() -> None:
    own = {name for name in values_of_agent() if not name.startswith("DCGM_")}
    assert own == {definition.name for definition in list_node_metrics()}


def test_the_page_of_the_docs_has_each_metric_with_its_labels() -> None:
    rows = re.findall(r"^\| `(phalanx_\w+)` \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
    assert rows == [
        (metric.name, ", ".join(f"`{label}`" for label in metric.labels), metric.help)
        for metric in (*list_metrics(), *list_node_metrics())
    ]


def test_the_page_of_the_docs_has_each_of_dcgm_exporters_names() -> None:
    found = {name for name in values_of_agent() if name.startswith("DCGM_")}
    section = PAGE.partition("## Dashboards of dcgm-exporter")[2].partition("Names of DCGM's profiling")[0]
    assert set(re.findall(r"`(DCGM_\w+)`", section)) == found


def test_each_metric_of_the_dashboard_exists() -> None:
    names = {definition.name for definition in (*list_metrics(), *list_node_metrics())}
    texts = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    texts += [str(variable["query"]) for variable in DASHBOARD["templating"]["list"]]
    used = {name for text in texts for name in re.findall(r"phalanx_\w+", text)}
    assert len(used) > 20
    assert used <= names


def test_grafanas_own_types_read_the_dashboard_and_lose_nothing_of_it() -> None:
    register_default_plugins()
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARD)))
    assert list(find_losses(DASHBOARD, read)) == []


def find_losses(written: Any, read: Any, path: str = "") -> Iterator[str]:
    """Where a value was left out or changed."""
    if isinstance(written, dict) and isinstance(read, dict):
        for key, value in written.items():
            yield from find_losses(value, read.get(key), f"{path}/{key}")
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for number, (one, other) in enumerate(zip(written, read, strict=True)):
            yield from find_losses(one, other, f"{path}/{number}")
    elif written != read:
        yield path
