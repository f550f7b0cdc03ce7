"""Phalanx trains deep-learning models on one machine or many: fast, predicted, never lost, explained.

From Python: `phalanx.Recipe`, `phalanx.train(recipe)`, `phalanx.join(recipe)`, `phalanx.Run(path)`. Each is imported
when it is first used.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.api import train
    from phalanx.joining import join
    from phalanx.recipe import Recipe
    from phalanx.run import Run

__all__ = ["Recipe", "Run", "__version__", "join", "train"]

__version__: str

_HOME = {"Recipe": "phalanx.recipe", "Run": "phalanx.run", "train": "phalanx.api", "join": "phalanx.joining"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("phalanx")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'phalanx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Room(ModuleType):
    """The room `phalanx.train`, which is also the function that people call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return import_module("phalanx.api").train(*args, **kwargs)


class _Phalanx(ModuleType):
    """Python sets `phalanx.train` to the room as soon as anything in it is imported; the name must stay callable."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "train" and isinstance(value, ModuleType):
            value.__class__ = _Room
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Phalanx
