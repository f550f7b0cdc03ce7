"""Fixtures that several test folders share. Nothing here starts a process unless a test asks for it."""

from collections.abc import Iterator

import pytest

from lab import Lab


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One process with torch loaded, in which all runs of the session are trained."""
    with Lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab
