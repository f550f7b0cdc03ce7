"""docs/how-to/own-loop.md shows the examples as they are. `python tests/unit/app/test_session_page.py` writes them."""

import difflib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "own-loop"
PAGE = ROOT / "docs" / "how-to" / "own-loop.md"
NAMES = ("language", "vision")


def difference(name: str) -> list[str]:
    """From the plain script to ours, with a line or two around each change."""
    plain, ours = (FOLDER / f"{name}{end}.py" for end in ("_plain", ""))
    lines = difflib.unified_diff(
        plain.read_text().splitlines(), ours.read_text().splitlines(), plain.name, ours.name, n=2, lineterm=""
    )
    return [line.rstrip() for line in lines]


def block(name: str) -> str:
    return "\n".join([f"<!-- {name} -->", "```diff", *difference(name), "```", "<!-- end -->"])


def written(page: str) -> str:
    """The page with the differences as they are now."""
    for name in NAMES:
        page = re.sub(f"<!-- {name} -->.*?<!-- end -->", lambda _, name=name: block(name), page, flags=re.DOTALL)
    return page


def test_the_page_shows_the_scripts_as_they_are() -> None:
    page = PAGE.read_text()
    assert written(page) == page
    assert all(block(name) in page for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_at_most_five_lines_are_changed(name: str) -> None:
    """An empty line beside the import is none."""
    new = [line for line in difference(name)[2:] if line.startswith("+") and line != "+"]
    assert len(new) <= 5


@pytest.mark.parametrize("name", NAMES)
def test_the_recipe_on_the_page_is_that_of_the_example(name: str) -> None:
    recipe = (FOLDER / f"{name}.yaml").read_text()
    assert recipe.startswith(f"# How the loop in {name}.py is trained; what it trains stands there.\n")
    if name == "language":
        assert recipe.partition("\n")[2] in PAGE.read_text()


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
