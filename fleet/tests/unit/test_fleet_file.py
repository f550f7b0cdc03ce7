"""The fleet file and its tree of budgets."""

from pathlib import Path

import pytest

from phalanx.errors import RecipeError
from phalanx_fleet.fleet_file import expand_names, load_fleet_file
from phalanx_fleet.power_settings import parse_power
from phalanx_fleet.power_tree import PowerTree, build_power_tree

FLEET = """\
sites: {s: {budget: 2 MW}}
feeds:
  b: {feed: a, budget: 500 kW}
  a: {site: s, budget: 1 MW}
rows: {r: {feed: b}}
racks:
  "k[01-02]": {row: r, budget: 45 kW, node_type: h, nodes: 2}
  z: {row: r, node_type: h, nodes: 1, names: gpu7}
node_types: {h: {node: dgx-h100, device_min_cap: 200 W}}
"""


def load_tree(folder: Path, text: str = FLEET) -> PowerTree:
    (folder / "fleet.yaml").write_text(text)
    return build_power_tree(*load_fleet_file(folder / "fleet.yaml"))


@pytest.mark.parametrize(("text", "watts"), [("45 kW", 45e3), ("1.5 MW", 1.5e6), ("700W", 700.0)])
def test_a_power_has_a_unit(text: str, watts: float) -> None:
    assert parse_power(text) == watts


@pytest.mark.parametrize("value", [700, "700", "-1 kW", "1 GW", "1 kw", "nan W", None])
def test_a_power_without_a_unit_or_below_zero_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="expected a power with its unit"):
        parse_power(value)


def test_a_range_stands_for_each_name() -> None:
    assert expand_names("r[1,08-10]x") == ["r1x", "r08x", "r09x", "r10x"]
    assert expand_names("r[1-2]-[3-4],gpu7,m[1,3]") == ["r1-3", "r1-4", "r2-3", "r2-4", "gpu7", "m1", "m3"]
    for wrong in ("r[2-1]", "a b", "r[x]", "", "r1,"):
        with pytest.raises(ValueError, match="expected a"):
            expand_names(wrong)


def test_levels_come_after_their_parents_and_nodes_have_names(tmp_path: Path) -> None:
    tree = load_tree(tmp_path)
    assert [level.label for level in tree.levels] == [
        "site s",
        "feed a",
        "feed b",
        "row r",
        "rack k01",
        "rack k02",
        "rack z",
    ]
    assert [level.parent for level in tree.levels] == [-1, 0, 1, 2, 3, 3, 3]
    assert [node.name for node in tree.nodes] == ["k01-1", "k01-2", "k02-1", "k02-2", "gpu7"]


def test_a_walk_ends_a_branch_before_it_begins_the_next(tmp_path: Path) -> None:
    tree = load_tree(tmp_path, FLEET.replace("rows: {r:", "rows: {q: {feed: a}, r:"))
    assert [tree.levels[index].label for index, _ in tree.walk()] == [
        "site s",
        "feed a",
        "feed b",
        "row r",
        "rack k01",
        "rack k02",
        "rack z",
        "row q",
    ]
    assert [depth for _, depth in tree.walk()] == [0, 1, 2, 3, 4, 4, 4, 2]


def test_the_watts_of_a_level_are_those_of_its_nodes(tmp_path: Path) -> None:
    assert load_tree(tmp_path).sum_by_level([1.0, 2.0, 4.0, 8.0, 16.0]) == [31.0, 31.0, 31.0, 31.0, 3.0, 12.0, 16.0]


def test_a_node_has_its_catalogues_power(tmp_path: Path) -> None:
    power = load_tree(tmp_path).nodes[0].power
    assert (power.max_w, power.idle_w, power.num_devices, power.device_max_w) == (10200.0, 2900.0, 8, 700.0)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("budget: 2 MW", "budget: 2000", r"fleet.yaml:1: sites.s.budget: found 2000, expected a power with its unit"),
        ("feed: b}", "feed: c}", r"fleet.yaml:5: rows.r.feed: c: no such feed; there are a, b"),
        ("{site: s, budget: 1 MW}", "{feed: b}", r"fleet.yaml:3: feeds.b.feed: a: feeds b, a are behind each other"),
        ("{site: s, budget: 1 MW}", "{}", r"fleet.yaml:4: feeds.a: expected one of `site` and `feed`"),
        ("node_type: h, nodes: 2", "node_type: g, nodes: 2", r"node_type: g: no such node type; there are h"),
        ("rows: {r: {feed: b}}", "rows: {r: {feed: 1}}", "rows.r.feed: found 1, expected text in quotes"),
        ('"k[01-02]": {row: r,', '"k[01-02]": {row: 3,', r"racks.k\[01-02\].row: found 3, expected text in quotes"),
        ("names: gpu7", "names: k01-1", r"racks: node k01-1 is in two places"),
        ("names: gpu7", "names: 'g[1-2]'", r"names: g\[1-2\] is 2 names, for 1 nodes"),
        ("node: dgx-h100", "node: dgx-h1000", r"node_types.h.node: .*dgx-h1000"),
        ("device_min_cap: 200 W", "device_min_cap: 900 W", "900 W is above the device's most power of 700 W"),
        ("device_min_cap: 200 W", "device_min_cap: 0 W", "0 W, at which nothing runs; expected a power such as 200 W"),
        ("device_min_cap: 200 W", "device_power: 2 kW", r"8 accelerators of .* W do not fit into a node"),
        ("z: {row", "k02: {row", r"racks: k02 is there twice"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, old: str, new: str, problem: str) -> None:
    assert old in FLEET
    with pytest.raises(RecipeError, match=problem):
        load_tree(tmp_path, FLEET.replace(old, new))
