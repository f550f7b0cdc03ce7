"""An emulated H100: a CUDA runtime, driver and NCCL without a GPU, for torch's CUDA build on any Linux machine.

    python tests/emulated/emulator.py            # builds it, prints the environment as shell assignments
    env $(python tests/emulated/emulator.py) python ...

Device memory is the host's, copies are memcpy, kernels and matrix products do nothing: numbers are garbage, unless
`hostgpu.py` has the CPU compute. Real are the caching allocator, streams, pinned memory, autograd's threads,
torch.compile with Triton and ptxas, and all host code; launches, products, copies and waits are counted (`Counts`).
CUDA graphs are recorded and replayed; copies and events are late with NULLGPU_DELAY, and the runtime fails as
NULLGPU_FAIL plans it (nullrt.c). NCCL works between processes of this machine, also where a peer dies or is stopped, or
a communicator is aborted (nullnccl.c). Not emulated: cuDNN, races of kernels, speed.
"""

import ctypes
import importlib.util
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "emulated"
LIBRARIES = {
    "libnullrt.so": ("nullrt.c", ("-ldl", "-lpthread")),
    "libcuda.so.1": ("nullcu.c", ("-Wl,-soname,libcuda.so.1", "-ldl")),
    "libnullnccl.so": ("nullnccl.c", ("-lpthread",)),
}


def include_folders() -> list[Path]:
    """Headers of CUDA and of Triton's driver, from the wheels that torch's CUDA build brings."""
    found = []
    for package, folder in (("nvidia", "cu13/include"), ("triton", "backends/nvidia/include")):
        spec = importlib.util.find_spec(package)
        roots = [] if spec is None else list(spec.submodule_search_locations or ())
        found += [Path(root) / folder for root in roots if (Path(root) / folder).is_dir()]
    if len(found) < 2:
        raise SystemExit("the emulator needs torch's CUDA build (pip install torch==2.11.0) in this environment")
    return found


def build(folder: Path = BUILD) -> Path:
    """Compile the libraries whose sources are newer; the folder that holds them."""
    folder.mkdir(parents=True, exist_ok=True)
    include = [f"-I{path}" for path in include_folders()]
    for name, (source, options) in LIBRARIES.items():
        path = folder / name
        if path.exists() and path.stat().st_mtime > (HERE / source).stat().st_mtime:
            continue
        made = folder / f"{name}.{os.getpid()}"  # not in its place: a process may have that loaded
        command = ["gcc", "-w", "-O1", "-fPIC", "-shared", *include, "-o", str(made), str(HERE / source), *options]
        subprocess.run(command, check=True)
        made.replace(path)
    return folder


ROCM = {"NULLGPU_NAME": "AMD Instinct MI300X", "NULLGPU_CAPABILITY": "9.4", "NULLGPU_HIP": "7.0"}
"""Variables, besides those of `environment`, under which the GPU has the properties that ROCm's torch tells of a
MI300X. Torch stays the CUDA build."""


def environment(folder: Path, host: bool = False) -> dict[str, str]:
    """Variables under which a process finds one emulated H100, and Phalanx it. `host`: it computes, as `hostgpu.py`
    says, in workers and trials of Phalanx."""
    cache = folder / "cache"
    paths = [str(HERE / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "NULLGPU": "host" if host else "1",
        "LD_PRELOAD": f"{folder / 'libnullrt.so'}:{folder / 'libnullnccl.so'}",
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",  # cuDNN cannot start
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "XDG_CACHE_HOME": str(cache),
        "PYTHONPATH": os.pathsep.join(paths),
        **({"TORCHDYNAMO_DISABLE": "1"} if host else {}),
    }


@dataclass(frozen=True)
class Counts:
    """What was asked of the emulated GPU so far in this process."""

    launches: int
    products: int
    copies_to: int
    copies_from: int
    waits: int
    graphs: int
    replayed: int
    triton: int

    @classmethod
    def now(cls) -> "Counts":
        """Read the counters of the preloaded libraries."""
        folder = Path(os.environ["LD_LIBRARY_PATH"])
        runtime, driver = (ctypes.CDLL(str(folder / name)) for name in ("libnullrt.so", "libcuda.so.1"))
        return cls(*(runtime.nullgpu_count(index) for index in range(7)), driver.nullcu_count())

    def since(self, before: "Counts") -> "Counts":
        """The difference to an earlier count."""
        return Counts(*(getattr(self, name) - getattr(before, name) for name in self.__dataclass_fields__))


def held() -> tuple[int, int]:
    """Bytes of the emulated GPU and pinned bytes of the host that this process holds."""
    runtime = ctypes.CDLL(str(Path(os.environ["LD_LIBRARY_PATH"]) / "libnullrt.so"))
    runtime.nullgpu_used.restype = runtime.nullgpu_pinned.restype = ctypes.c_long
    return runtime.nullgpu_used(), runtime.nullgpu_pinned()


if __name__ == "__main__":
    sys.stdout.write(" ".join(f"{name}={shlex.quote(value)}" for name, value in environment(build()).items()) + "\n")
