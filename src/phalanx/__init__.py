"""Phalanx trains deep-learning models on one machine or many: fast, predicted, fault tolerant, explained.

From Python: `phalanx.Recipe`, `phalanx.plan(recipe, cluster)`, `phalanx.train(recipe)`,
`phalanx.submit(recipe, on="slurm")`, `phalanx.session(recipe)`, `phalanx.Run(path)`. Each is imported on first use.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from phalanx.std_streams import open_standard_streams

if TYPE_CHECKING:
    from phalanx.app.job_handle import JobHandle, submit
    from phalanx.app.plan import plan
    from phalanx.app.session import session
    from phalanx.app.train import train
    from phalanx.recipe import Recipe
    from phalanx.run import Run

open_standard_streams()  # before anything of ours opens a file

__all__ = ["JobHandle", "Recipe", "Run", "__version__", "plan", "session", "submit", "train"]

__version__: str

_EXPORT_MODULES = {
    "JobHandle": "phalanx.app.job_handle",
    "Recipe": "phalanx.recipe",
    "Run": "phalanx.run",
    "plan": "phalanx.app.plan",
    "session": "phalanx.app.session",
    "submit": "phalanx.app.job_handle",
    "train": "phalanx.app.train",
}
_CALLABLE_PACKAGES = ("train",)
"""Packages with the same name as a function of the API."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("phalanx")
        except PackageNotFoundError:  # run from a source tree that is not installed
            return "0+source"
    if name in _EXPORT_MODULES:
        return getattr(import_module(_EXPORT_MODULES[name]), name)
    raise AttributeError(f"module 'phalanx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _CallablePackage(ModuleType):
    """A package such as `phalanx.train`, which is also a function of the API."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module(_EXPORT_MODULES[name]), name)(*args, **kwargs)


class _Phalanx(ModuleType):
    """Python sets `phalanx.train` to the package as soon as anything in it is imported; the name must stay callable."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CALLABLE_PACKAGES and isinstance(value, ModuleType):
            value.__class__ = _CallablePackage
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Phalanx
