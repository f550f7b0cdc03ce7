"""Have Phalanx look for the emulated GPUs, in each process whose PYTHONPATH holds this folder.

There are no device files of a driver here, so the list of those that Phalanx looks for gets one that exists.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def _device_files(module: Any) -> None:
    module.DEVICE_FILES = ("proc/self/status",)


def _hip(module: Any) -> None:
    module.hip = os.environ["NULLGPU_HIP"]


def _no_triton(module: Any) -> None:
    module.HAS_TRITON = False  # it would ask ROCm's runtime, which is not emulated


PATCHES: dict[str, Callable[[Any], None]] = {"phalanx.cluster.discover": _device_files}
if os.environ.get("NULLGPU_HIP"):  # torch says so where it was built for AMD's GPUs
    PATCHES |= {"torch.version": _hip, "phalanx.train.ops": _no_triton, "phalanx.models.transformer": _no_triton}


class _Patching(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        patch = PATCHES.get(name)
        if patch is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        run: Any = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("NULLGPU"):
    sys.meta_path.insert(0, _Patching())
