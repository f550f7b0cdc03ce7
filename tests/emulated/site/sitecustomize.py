"""Have Phalanx look for the emulated GPUs, in each process whose PYTHONPATH holds this folder.

There are no device files of a driver here, so the list of those that Phalanx looks for gets one that exists. With
NULLGPU=host what the fork server forks computes as `hostgpu.py` says, without Triton's kernels. With NULLGPU=cpu it
trains on the CPU, with the same attention.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

HOST = os.environ.get("NULLGPU") == "host"


def _device_files(module: Any) -> None:
    module.GPU_DEVICE_FILES = ("proc/self/status",)


def _hip(module: Any) -> None:
    module.hip = os.environ["NULLGPU_HIP"]


def _small_products(module: Any) -> None:
    if HOST:
        module.MATRIX_SIZES = {**module.MATRIX_SIZES, "cuda": (128,)}


def _no_triton(module: Any) -> None:
    if HOST or os.environ.get("NULLGPU_HIP"):  # it would ask ROCm's runtime, which is not emulated
        module.HAS_TRITON = False


def _compute_on_the_host(_: Any) -> None:
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if os.environ["NULLGPU"] == "cpu":
        import hostgpu

        os.register_at_fork(after_in_child=hostgpu.plain_attention)
    if not HOST:
        return
    import hostgpu

    os.register_at_fork(after_in_child=hostgpu.install)


def _commands(module: Any) -> None:
    """`phalanx evaluate` computes in its own process, not in a fork of the fork server."""
    load = module.load_trained_model

    def load_trained_model(*args: Any, **kwargs: Any) -> Any:
        import hostgpu

        hostgpu.plain_attention()
        if HOST:
            hostgpu.install()
        return load(*args, **kwargs)

    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    module.load_trained_model = load_trained_model


PATCHES: dict[str, Callable[[Any], None]] = {
    "phalanx.cluster.discovery": _device_files,
    "phalanx.cluster.calibration.gemm": _small_products,
    "phalanx.models.transformer": _no_triton,
    "phalanx.train.ops.linear_cross_entropy": _no_triton,
    "phalanx.train.ops": _no_triton,
    "phalanx.train.inference": _commands,
    "phalanx.train.worker": _compute_on_the_host,
}
if os.environ.get("NULLGPU") not in ("host", "cpu"):
    del PATCHES["phalanx.train.inference"]
if os.environ.get("NULLGPU_HIP"):  # torch says so where it was built for AMD's GPUs
    PATCHES["torch.version"] = _hip


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
