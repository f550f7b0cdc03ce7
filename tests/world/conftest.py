"""What the test files of Hugging Face models begin with."""

import pytest


@pytest.fixture
def without_args_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lab's base recipe has arguments for our transformer."""
    import train_harness as module

    monkeypatch.setattr(module, "BASE_RECIPE", {**module.BASE_RECIPE, "model": {}})
