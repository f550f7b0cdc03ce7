"""Phalanx trains deep-learning models on one machine or many: fast, predicted, never lost, explained.

From Python: `phalanx.Recipe`, `phalanx.plan(recipe, cluster)`, `phalanx.train(recipe)`, `phalanx.join(recipe)`,
`phalanx.Run(path)`. Each is imported when it is first used.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from phalanx.streams import open_standard_streams

if TYPE_CHECKING:
    from phalanx.api import train
    from phalanx.joining import join
    from phalanx.planning import plan
    from phalanx.recipe import Recipe
    from phalanx.run import Run

open_standard_streams()  # before anything of ours opens a file

__all__ = ["Recipe", "Run", "__version__", "join", "plan", "train"]

__version__: str

_HOME = {
    "Recipe": "phalanx.recipe",
    "Run": "phalanx.run",
    "join": "phalanx.joining",
    "plan": "phalanx.planning",
    "train": "phalanx.api",
}
_ROOMS = ("plan", "train")
"""Rooms that are also functions that people call."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("phalanx")
        except PackageNotFoundError:  # run from a source tree that is not installed
            return "0+source"
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'phalanx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Room(ModuleType):
    """A room such as `phalanx.train`, which is also the function that people call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module(_HOME[name]), name)(*args, **kwargs)


class _Phalanx(ModuleType):
    """Python sets `phalanx.train` to the room as soon as anything in it is imported; the name must stay callable."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ROOMS and isinstance(value, ModuleType):
            value.__class__ = _Room
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Phalanx
