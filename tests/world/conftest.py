"""Processes for the test files that compute in worlds of their own."""

from collections.abc import Iterator

import pytest

from process_worlds import ProcessWorlds


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessWorlds]:
    """This file's processes."""
    world = ProcessWorlds(tmp_path_factory.mktemp("world"))
    yield world
    world.close()
