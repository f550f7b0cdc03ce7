"""Packages that import their modules on first use."""

import importlib
from types import ModuleType

import pytest

LAZY_PACKAGES = ("phalanx.recipe", "phalanx.cluster")


@pytest.mark.parametrize("package", LAZY_PACKAGES)
def test_every_exported_name_is_found_in_its_module(package: str) -> None:
    module = importlib.import_module(package)
    found = {name: getattr(module, name) for name in module.__all__}
    assert not [name for name, value in found.items() if isinstance(value, ModuleType)]
    assert all(value.__module__.startswith(f"{package}.") for value in found.values())


def test_a_name_that_is_not_exported_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'phalanx\.recipe' has no attribute 'no_such_name'"):
        _ = importlib.import_module("phalanx.recipe").no_such_name
