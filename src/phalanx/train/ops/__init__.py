"""Operations with kernels of our own for GPUs, where what torch has or compiles was measured to be far from the
memory's speed (docs/benchmarks/gpu.md). Their modules import Triton, so import them where a GPU computes."""

import importlib.util

from phalanx.compat import has_compiler

HAS_TRITON = importlib.util.find_spec("triton") is not None and has_compiler()
"""Whether they can be launched."""
