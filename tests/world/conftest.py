"""Processes for the test files that compute in worlds of their own."""

from collections.abc import Iterator

import pytest

from worlds import World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """This file's processes."""
    world = World(tmp_path_factory.mktemp("world"))
    yield world
    world.close()
