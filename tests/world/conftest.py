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


@pytest.fixture
def without_args_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lab's base recipe has arguments for our transformer."""
    import train_harness as module

    monkeypatch.setattr(module, "BASE_RECIPE", {**module.BASE_RECIPE, "model": {}})
