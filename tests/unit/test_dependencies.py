"""Every dependency has its line of reason in docs/dependencies.md."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = [one for extra in project["project"]["optional-dependencies"].values() for one in extra]
    needed = [*project["project"]["dependencies"], *extras, *project["build-system"]["requires"]]
    names = {re.split(r"[\[<>=!~; ]", one)[0] for one in needed} - {"phalanx"}
    page = (ROOT / "docs" / "dependencies.md").read_text()
    rows = [
        line.split("|")[1] for line in page.splitlines() if line.startswith("| ") and not line.startswith("| package |")
    ]
    assert {name.strip() for row in rows for name in row.split(",")} == names
