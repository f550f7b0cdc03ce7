"""Names that a package exports from its modules, each imported on first use.

Importing a module runs its package first. With plain imports there, `import phalanx.recipe.devices` would load the
schema of the whole recipe, and a command that needs one table of devices would start half a second later.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def make_getattr(package: str, exports: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    Args:
        package: `__name__` of the package.
        exports: names by module, relative to the package.
    """
    modules = {name: f"{package}.{module}" for module, names in exports.items() for name in names}

    def getattr_lazily(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return getattr_lazily
