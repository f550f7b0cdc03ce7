"""The alerts for Prometheus: only metrics that exist, and what stands for a stuck run or a full budget."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from phalanx.serve import metrics as run_metrics
from phalanx_fleet.pages import fleet_pages

ALERTS = Path(__file__).parents[2] / "alerts.yml"
PROMTOOL = shutil.which("promtool")
RULE_TEST = """
rule_files: [{alerts}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: 'phalanx_run_step{{run="trains"}}', values: '0+1x60'}}
      - {{series: 'phalanx_run_step{{run="stuck"}}', values: '7x60'}}
      - {{series: 'phalanx_run_step{{run="is new"}}', values: '_x45 3x15'}}
      - {{series: 'phalanx_run_step{{run="has ended"}}', values: '0+1x28 stale'}}
      - {{series: 'phalanx_power_headroom_watts{{level="rack r1"}}', values: '-100x60'}}
      - {{series: 'phalanx_power_headroom_watts{{level="rack r2"}}', values: '100x60'}}
      - {{series: 'phalanx_power_draw_watts{{level="rack r1"}}', values: '900x60'}}
      - {{series: 'phalanx_power_committed_watts{{level="rack r1"}}', values: '1000x60'}}
      - {{series: 'phalanx_power_budget_watts{{level="rack r1"}}', values: '800x60'}}
      - {{series: 'phalanx_nodes{{state="healthy"}}', values: '95x60'}}
      - {{series: 'phalanx_nodes{{state="stale"}}', values: '1x60'}}
      - {{series: 'phalanx_nodes{{state="drained"}}', values: '4x60'}}
    promql_expr_test:
      - expr: count by (alertname, run, level) (ALERTS{{alertstate="firing"}})
        eval_time: 55m
        exp_samples:
          - {{labels: '{{alertname="PhalanxRunStuck", run="stuck"}}', value: 1}}
          - {{labels: '{{alertname="PhalanxLevelOverBudget", level="rack r1"}}', value: 1}}
          - {{labels: '{{alertname="PhalanxDrawOverBudget", level="rack r1"}}', value: 1}}
          - {{labels: '{{alertname="PhalanxNodesWithoutReading"}}', value: 1}}
"""


def list_alerts() -> list[dict[str, Any]]:
    groups = YAML(typ="safe").load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_alerts_use_only_metrics_that_exist() -> None:
    known = {metric.name for metric in (*run_metrics.list_metrics(), *fleet_pages.list_metrics())}
    used = {name for rule in list_alerts() for name in re.findall(r"phalanx_\w+", rule["expr"])}
    assert used <= known
    assert len(used) > 10
    for rule in list_alerts():
        assert rule["annotations"].keys() == {"summary", "action"}


@pytest.mark.skipif(PROMTOOL is None, reason="promtool of Prometheus is not installed")
def test_prometheus_takes_the_alerts_and_fires_those_that_are_due(tmp_path: Path) -> None:
    (tmp_path / "test.yml").write_text(RULE_TEST.format(alerts=ALERTS))
    for words in (["check", "rules", ALERTS], ["test", "rules", tmp_path / "test.yml"]):
        found = subprocess.run([str(PROMTOOL), *map(str, words)], capture_output=True, text=True)
        assert found.returncode == 0, found.stdout + found.stderr
