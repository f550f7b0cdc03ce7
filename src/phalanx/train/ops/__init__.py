"""Operations with our own GPU kernels, for which torch's eager or compiled kernels were measured to be far from memory
bandwidth (docs/benchmarks/gpu.md). Their modules import Triton, so import them only where a GPU is used."""

import importlib.util

from phalanx.compat import has_compiler

HAS_TRITON = importlib.util.find_spec("triton") is not None and has_compiler()
"""Whether the kernels can be launched."""
