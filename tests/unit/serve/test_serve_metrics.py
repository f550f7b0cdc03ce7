"""Metrics of runs, jobs and nodes, the dashboard that shows them, and their table in the docs."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client.parser import text_string_to_metric_families

from made_samples import full_node
from phalanx.fleet.telemetry.exposition import render_families
from phalanx.serve import metrics
from phalanx.serve.app import DASHBOARD_FILE
from phalanx.serve.metrics import MetricSnapshot, build_metrics, list_metrics
from phalanx.serve.run_row import RunRow

NOW = 1_790_000_000.0
DASHBOARD = json.loads(DASHBOARD_FILE.read_text())
PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "metrics.md").read_text()


def row(path: str = "runs/one", **values: Any) -> RunRow:
    return RunRow(Path(path), 0, 0, None, **{"last_written_at": NOW - 1, "first_event_at": NOW - 60, **values})


def snapshot(*rows: RunRow, **values: Any) -> MetricSnapshot:
    return MetricSnapshot(
        NOW, rows, **{"has_all_runs": True, "job_states": [], "node_states": [], "samples": {}, **values}
    )


def values_of(found: MetricSnapshot) -> dict[str, dict[str, float]]:
    """The values of each metric by node, run, status or state, as Prometheus reads the page."""
    page = render_families(build_metrics(found)).decode()
    values: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(page):
        for each in family.samples:
            values.setdefault(each.name, {})[each.labels.get("node") or next(iter(each.labels.values()))] = each.value
    return values


def test_a_running_run_has_its_values_and_leaves_out_what_it_has_not() -> None:
    values = values_of(snapshot(row(step=7, total_steps=10, loss=2.5, units_per_s=4096.0, step_s=0.5, world_size=2)))
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
    values = values_of(snapshot(row(), done, killed, row("runs/bad", problem="no permission")))
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
    values = values_of(snapshot(*(row(f"runs/{age}", last_written_at=NOW - age) for age in (3, 1, 2))))
    assert values["phalanx_run_step"].keys() == {"runs/1", "runs/2"}
    assert values["phalanx_runs"]["running"] == 3


def test_a_path_that_is_no_utf8_or_has_markup_is_a_label_too() -> None:
    path = os.fsdecode(b'runs/\xff"\n\\{}')
    assert values_of(snapshot(row(path)))["phalanx_run_step"] == {'runs/\\udcff"\n\\{}': 0.0}


def test_jobs_and_nodes_are_counted_by_state() -> None:
    values = values_of(snapshot(job_states=["queued", "queued", "done"], node_states=["healthy", "down"]))
    assert values["phalanx_jobs"] == {
        "queued": 2,
        "running": 0,
        "done": 1,
        "interrupted": 0,
        "failed": 0,
        "cancelled": 0,
    }
    assert values["phalanx_nodes"] == {"healthy": 1, "suspect": 0, "drained": 0, "testing": 0, "down": 1}


def test_jobs_and_nodes_that_could_not_be_read_are_missing_and_not_0() -> None:
    values = values_of(snapshot(job_states=None, node_states=None))
    assert not values.keys() & {"phalanx_jobs", "phalanx_nodes"}


def test_runs_are_not_counted_before_all_are_found() -> None:
    values = values_of(snapshot(row(), has_all_runs=False))
    assert "phalanx_runs" not in values
    assert values["phalanx_run_step"] == {"runs/one": 0.0}


@pytest.mark.parametrize("age_s", [4.0, -4.0])
def test_the_sample_of_an_agent_that_is_late_is_missing(age_s: float) -> None:
    values = values_of(snapshot(samples={"n1": full_node(NOW), "n2": full_node(NOW - age_s)}))
    assert values["phalanx_node_cpu_power_watts"].keys() == {"n1"}
    assert values["phalanx_device_power_watts"].keys() == {"n1"}


def test_the_list_of_metrics_is_what_a_full_snapshot_has() -> None:
    full = row(total_steps=10, loss=2.5, validation_loss=2.0, units_per_s=4096.0, step_s=0.5, world_size=2)
    found = values_of(snapshot(full, samples={"n1": full_node(NOW)}))
    own = {name for name in found if not name.startswith("DCGM_")}
    assert own == {definition.name for definition in list_metrics()}


def test_the_page_of_the_docs_has_each_metric_with_its_labels() -> None:
    rows = re.findall(r"^\| `(phalanx_\w+)` \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
    assert rows == [
        (metric.name, ", ".join(f"`{label}`" for label in metric.labels), metric.help) for metric in list_metrics()
    ]


def test_the_page_of_the_docs_has_each_of_dcgm_exporters_names() -> None:
    found = {name for name in values_of(snapshot(samples={"n1": full_node(NOW)})) if name.startswith("DCGM_")}
    section = PAGE.partition("## Dashboards of dcgm-exporter")[2].partition("Names of DCGM's profiling")[0]
    assert set(re.findall(r"`(DCGM_\w+)`", section)) == found


def test_each_metric_of_the_dashboard_exists() -> None:
    names = {definition.name for definition in list_metrics()}
    texts = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    texts += [str(variable["query"]) for variable in DASHBOARD["templating"]["list"]]
    used = {name for text in texts for name in re.findall(r"phalanx_\w+", text)}
    assert len(used) > 20
    assert used <= names


def test_each_panel_of_the_dashboard_asks_the_chosen_data_source() -> None:
    assert DASHBOARD["uid"] == "phalanx-serve"
    assert "elements" not in DASHBOARD  # the classic form, which Grafana imports from 8 on
    targets = [target for panel in DASHBOARD["panels"] for target in (panel, *panel.get("targets", ()))]
    sources = [target["datasource"] for target in targets if target.get("type") != "row"]
    assert sources == [{"type": "prometheus", "uid": "${datasource}"}] * len(sources)
    assert DASHBOARD["templating"]["list"][0]["type"] == "datasource"


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


def test_no_two_panels_of_the_dashboard_overlap() -> None:
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
