"""Page tests: the browser, and the maker of synthetic runs from the unit tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "observe"))


@pytest.fixture(scope="session")
def browser() -> str:
    """Path of a Chromium; the tests are skipped, and say so, where there is none."""
    from chromium import find

    path = find()
    if path is None:
        pytest.skip("no Chromium is installed (on Debian: apt-get install chromium), so pages are not looked at")
    return path
