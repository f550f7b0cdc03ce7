"""What is wrong in a fleet file, its jobs, targets and variants is said before anything is done."""

from pathlib import Path

import pytest

from phalanx.cli.power_output import format_status
from phalanx.errors import RecipeError
from phalanx.fleet.fleet_file import FleetFile, load_fleet_file
from phalanx.fleet.power.claims import LevelSum
from phalanx.fleet.power.guard import GuardStatus

FLEET = """\
name: hall
sites: {s: {}}
feeds: {a: {site: s, budget: 1 MW}}
rows: {r: {feed: a}}
racks: {"k[1-2]": {row: r, node_type: h, nodes: 2}}
node_types: {h: {node: dgx-h100}}
"""


def load_text(folder: Path, text: str, *overrides: str) -> FleetFile:
    (folder / "fleet.yaml").write_text(text)
    return load_fleet_file(folder / "fleet.yaml", overrides)[0]


def test_a_level_without_any_power_is_the_tightest_one() -> None:
    status = GuardStatus([LevelSum("feed a", 0.0, 10.0), LevelSum("site s", 100.0, 90.0)], [], [], {}, [])
    assert format_status(status).startswith("feed a: 10 W of a budget of 0 W;")


@pytest.mark.parametrize("name", ["../../out", "/tmp/out", "..", ".", '"a\\nb"', '"\\e[31m"', '""'])
def test_a_fleet_is_not_called_like_a_path(tmp_path: Path, name: str) -> None:
    """Its state is in a folder of this name."""
    with pytest.raises(RecipeError, match=r"name: found .*, expected text matching"):
        load_text(tmp_path, FLEET.replace("hall", name))
