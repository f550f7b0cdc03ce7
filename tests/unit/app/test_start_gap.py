"""How long the local queue waits between starts for the ramp of a site."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.app.start_gap import find_start_gap
from phalanx.app.submit import make_framework_job

FLEET = """\
sites: {{s: {{{ramp}}}, t: {{}}}}
feeds: {{a: {{site: s}}, b: {{site: t}}}}
rows: {{r: {{feed: a}}, q: {{feed: b}}}}
racks:
  "k[1-2]": {{row: r, node_type: h, nodes: 4}}
  c: {{row: q, node_type: h, nodes: 1}}
node_types: {{h: {{node: dgx-h100, power: 10 kW, device_power: 700 W, idle: 3 kW, device_idle: 100 W}}}}
"""
REST_RISE_W, DEVICE_RISE_W = 10_000 - 8 * 700 - (3000 - 8 * 100), 600


def write_fleet(folder: Path, ramp: str = "max_ramp: 8 kW/s") -> dict[str, str]:
    (folder / "fleet.yaml").write_text(FLEET.format(ramp=ramp))
    return {"PHALANX_CLUSTER": str(folder / "fleet.yaml")}


def test_a_node_has_its_part_of_the_ramp_of_its_site(tmp_path: Path) -> None:
    cluster = write_fleet(tmp_path)  # of 8 nodes that are equal, each has 1 kW/s
    assert find_start_gap(8, cluster, "k1-2") == pytest.approx((REST_RISE_W + 8 * DEVICE_RISE_W) / 1000)
    assert find_start_gap(1, cluster, "k1-2") == pytest.approx((REST_RISE_W + DEVICE_RISE_W) / 1000)
    assert find_start_gap(8, {"PHALANX_CLUSTER": f"{cluster['PHALANX_CLUSTER']}:h"}, "k2-4") > 0


def test_without_a_ramp_or_as_no_node_of_it_nothing_is_delayed(tmp_path: Path) -> None:
    cluster = write_fleet(tmp_path)
    assert [find_start_gap(8, cluster, node) for node in ("c-1", "login")] == [0.0, 0.0]
    assert find_start_gap(8, write_fleet(tmp_path, ""), "k1-2") == 0.0
    assert [find_start_gap(8, {"PHALANX_CLUSTER": text}, "k1-2") for text in ("h100:8", "")] == [0.0, 0.0]


def test_a_job_is_submitted_with_its_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_CLUSTER", write_fleet(tmp_path)["PHALANX_CLUSTER"])
    monkeypatch.setattr("phalanx.app.start_gap.os.uname", lambda: SimpleNamespace(nodename="k1-2"))
    assert make_framework_job("plain", ["true"], 1, "x", gpus_per_node=8).start_gap_s == pytest.approx(7.0)
    monkeypatch.delenv("PHALANX_CLUSTER")
    assert make_framework_job("plain", ["true"], 1, "x", gpus_per_node=8).start_gap_s == 0.0
