"""Page tests: the browser, and the maker of synthetic runs from the unit tests."""

import pytest


@pytest.fixture(scope="session")
def browser() -> str:
    """Path of a Chromium; the tests are skipped, and say so, where there is none."""
    from chromium import find

    path = find()
    if path is None:
        pytest.skip("no Chromium is installed (on Debian: apt-get install chromium), so pages are not looked at")
    return path
