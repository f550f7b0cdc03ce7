"""Discover this machine: the cores and memory that this process may use, its CPU and its accelerators. Linux only;
reads /proc and /sys below a given root, so that tests can present another machine. `calibration/gemm.py` measures
rates, and `catalog.py` has peak rates.
"""

import functools
import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from phalanx.cluster.system_files import read_small_file
from phalanx.errors import RecipeError, UnfitNodeError, UsageError
from phalanx.formatting import format_plural
from phalanx.recipe.devices import DEVICE_KINDS, has_bf16

MATMUL_CPU_FLAGS = (
    "avx",
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_fp16",
    "asimd",
    "sve",
    "bf16",
)
"""CPU features that decide how fast a matrix product can be; a CPU's other flags are left out."""
BF16_CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""CPU features with products in bf16, of x86 and ARM."""

FEW_WORKERS, WORKERS_A_CORE = 64, 16
"""Limit on a node's workers, in total or per core, whichever is larger: each takes memory."""


@dataclass(frozen=True)
class Cpu:
    """The CPU as in /proc/cpuinfo. `ghz`: its highest known clock, None if unknown."""

    name: str
    vendor: str = ""
    family: int = 0
    model: int = 0
    ghz: float | None = None
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class DetectedGpu:
    """One GPU that torch can use, with its own memory."""

    name: str
    memory_bytes: int
    capability: tuple[int, int] | None = None
    uuid: str = ""
    rocm: bool = False
    """Whether it is AMD's, which torch calls "cuda", too."""


@dataclass(frozen=True)
class Machine:
    """The part of a machine that this process may use. `device`, `device_name` and `device_count` describe the devices
    that train: "cuda", the name and the number of GPUs, or else "cpu", the CPU's name and 1. `device_memory_bytes` is
    the memory of one device."""

    hostname: str
    device: str
    device_name: str
    device_count: int
    physical_cores: int
    logical_cores: int
    memory_bytes: int
    device_memory_bytes: int
    cpu: Cpu
    capability: tuple[int, int] | None = None
    """Of the GPUs: CUDA compute capability."""
    rocm: bool = False
    """Whether the GPUs are AMD's."""

    @property
    def has_fast_bf16(self) -> bool:
        """Whether the device has instructions for bf16; without them a CPU takes 10 to 60 times as long as in fp32."""
        return bool(BF16_CPU_FLAGS & set(self.cpu.flags)) if self.device == "cpu" else has_bf16(self.capability)

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that train; 0 if the CPU trains."""
        return 0 if self.device == "cpu" else self.device_count


def discover_machine(
    root: Path = Path("/"),
    affinity: Sequence[int] | None = None,
    find_accelerators: Callable[[], list[DetectedGpu]] | None = None,
    device: str = "auto",
) -> Machine:
    """Discover the machine below `root`. `affinity` (the allowed CPUs) and the accelerators come from the system unless
    given. Raises RecipeError when the recipe's `device` is missing, and UnfitNodeError for different GPUs in one
    machine, since the slowest would slow down all others unnoticed."""
    cpus = sorted(os.sched_getaffinity(0) if affinity is None else affinity)
    threads = count_free_cores(root, cpus)
    memory = parse_meminfo((root / "proc/meminfo").read_text(), "MemTotal")
    if memory is None:
        raise UnfitNodeError("/proc/meminfo names no MemTotal: this does not look like Linux")
    limit = read_cgroup_memory(root)
    memory = memory if limit is None else min(memory, limit)
    cpu = parse_cpuinfo((root / "proc/cpuinfo").read_text(), read_max_ghz(root, cpus))
    detected = [] if device == "cpu" else detect_gpus(root) if find_accelerators is None else find_accelerators()
    gpus = choose_gpus(detected, device)
    if len({gpu.name for gpu in gpus}) > 1:
        kinds = ", ".join(sorted({gpu.name for gpu in gpus}))
        raise UnfitNodeError(
            f"{platform.node()} has different GPUs ({kinds}): choose equal ones with CUDA_VISIBLE_DEVICES"
        )
    return Machine(
        hostname=platform.node(),
        device="cuda" if gpus else "cpu",
        device_name=gpus[0].name if gpus else cpu.name,
        device_count=len(gpus) or 1,
        physical_cores=min(threads, count_physical_cores(root, cpus)),
        logical_cores=threads,
        memory_bytes=memory,
        device_memory_bytes=min(gpu.memory_bytes for gpu in gpus) if gpus else memory,
        cpu=cpu,
        capability=gpus[0].capability if gpus else None,
        rocm=bool(gpus) and gpus[0].rocm,
    )


def choose_gpus(detected: Sequence[DetectedGpu], device: str) -> list[DetectedGpu]:
    """Return the GPUs that train with a recipe's `device`. Raises RecipeError when there must be some and are none."""
    if device == "cpu":
        return []
    if detected or device == "auto":
        return list(detected)
    masks = [f"{name}={os.environ[name]}" for name in VISIBLE_DEVICES_VARIABLES if name in os.environ]
    reason = f" ({masks[0]} may hide it)" if masks else ""
    raise RecipeError(
        f"device: found {device}, but torch {version('torch')} does not find {DEVICE_KINDS[device].description} here"
        f"{reason}; cpu or auto would be valid; `phalanx doctor` shows what this machine has"
    )


def parse_cpuinfo(text: str, ghz: float | None = None) -> Cpu:
    """Parse the first processor of an x86 or ARM /proc/cpuinfo. The clock is `ghz`, else the nominal clock in the model
    name ("@ 2.60GHz"), else the current clock."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    arm_name = f"ARM {fields.get('CPU implementer', '?')}/{fields['CPU part']}" if "CPU part" in fields else None
    name = fields.get("model name") or fields.get("Model") or arm_name or "unknown CPU"
    if ghz is None and (nominal := re.search(r"@\s*([\d.]+)\s*GHz", name)):
        ghz = float(nominal[1])
    if ghz is None and float(fields.get("cpu MHz") or 0) > 0:
        ghz = float(fields["cpu MHz"]) / 1000
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return Cpu(
        name=name,
        vendor=fields.get("vendor_id", ""),
        family=int(fields.get("cpu family") or 0),
        model=int(fields.get("model") or 0),
        ghz=ghz,
        flags=tuple(flag for flag in MATMUL_CPU_FLAGS if flag in flags),
    )


def read_max_ghz(root: Path, cpus: Sequence[int]) -> float | None:
    """Return the maximum clock from the kernel's frequency driver, which virtual machines rarely have."""
    for cpu in cpus:
        text = read_small_file(root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq")
        if text and int(text) > 0:
            return int(text) / 1e6
    return None


def count_free_cores(root: Path = Path("/"), cpus: Sequence[int] | None = None) -> int:
    """Count the logical cores that this process may use: of these CPUs, those that its control group grants."""
    count, quota = len(os.sched_getaffinity(0) if cpus is None else cpus), read_cgroup_cores(root)
    return count if quota is None else max(1, min(count, math.floor(quota)))


def count_physical_cores(root: Path, cpus: Sequence[int]) -> int:
    """Count the cores of these logical CPUs: hyper-threads of one core share its list of siblings."""
    topology = (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list" for cpu in cpus)
    return len({read_small_file(path) or str(path) for path in topology})


def parse_meminfo(meminfo: str, name: str) -> int | None:
    """Return the bytes of a line of /proc/meminfo, which counts in KiB."""
    match = re.search(rf"^{name}:\s+(\d+) kB", meminfo, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def read_cgroup_cores(root: Path) -> float | None:
    """CPU time that the control group grants, in cores; None where there is no limit. Reads versions 1 and 2."""
    limits = []
    for folder in cgroup_dirs(root, "cpu"):
        quota, _, period = read_small_file(folder / "cpu.max").partition(" ")
        quota = quota or read_small_file(folder / "cpu.cfs_quota_us") or "max"
        period = period or read_small_file(folder / "cpu.cfs_period_us") or "100000"
        if quota not in ("max", "-1"):
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def read_cgroup_memory(root: Path) -> int | None:
    """Bytes that the control group grants; None where there is no limit. Reads versions 1 and 2."""
    limits = []
    for folder in cgroup_dirs(root, "memory"):
        text = read_small_file(folder / "memory.max") or read_small_file(folder / "memory.limit_in_bytes") or "max"
        if text != "max":
            limits.append(int(text))
    return min(limits, default=None)


def cgroup_dirs(root: Path, controller: str) -> Iterator[Path]:
    """Yield the directory of this process's cgroup and those of its parents, each of which may set a limit. In a
    container the path that the kernel reports may lie outside the mount; then only existing directories count."""
    for line in read_small_file(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controllers and controller)
        inner = Path(path.lstrip("/"))
        yield from (mount / part for part in (inner, *inner.parents) if (mount / part).is_dir())


LIST_GPUS_SCRIPT = """
import json, torch
rocm, found = bool(torch.version.hip), []
for each in map(torch.cuda.get_device_properties, range(torch.cuda.device_count())):
    capability = None if rocm else (each.major, each.minor)
    found.append([each.name, each.total_memory, capability, str(getattr(each, "uuid", "")), rocm])
print(json.dumps(found))
"""
VISIBLE_DEVICES_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""By these a user or a launcher chooses GPUs."""

GPU_DEVICE_FILES = ("dev/nvidiactl", "dev/kfd", "dev/dxg")
"""One of these exists wherever NVIDIA's, AMD's or Windows' (WSL) driver is loaded."""


def detect_gpus(root: Path = Path("/"), python: str = sys.executable, timeout: float = 300.0) -> list[DetectedGpu]:
    """List the GPUs that torch can use here, subject to CUDA_VISIBLE_DEVICES. Runs in a separate process: a process
    that has initialized CUDA cannot fork workers. Without a driver's device file the list is empty, and torch is not
    imported. Raises UnfitNodeError when torch cannot list the GPUs."""
    if not any((root / name).exists() for name in GPU_DEVICE_FILES):
        return []
    visible = tuple(os.environ.get(name) for name in VISIBLE_DEVICES_VARIABLES)
    return list(_detect_gpus_cached(python, timeout, visible))


@functools.cache
def _detect_gpus_cached(python: str, timeout: float, visible: tuple[str | None, ...]) -> tuple[DetectedGpu, ...]:
    """Run `detect_gpus` once per choice of devices: the CUDA build of torch takes 3 to 6 s to import."""
    try:
        completed = subprocess.run(
            [python, "-P", "-c", LIST_GPUS_SCRIPT], capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UnfitNodeError(f"a GPU does not answer: torch did not list the GPUs within {timeout:.0f} s") from error
    if completed.returncode != 0:
        last_line = (completed.stderr.strip().splitlines() or ["no message"])[-1]
        raise UnfitNodeError(f"a GPU driver is loaded, but torch cannot list the GPUs: {last_line}")
    listed = json.loads(completed.stdout.splitlines()[-1])
    return tuple(
        DetectedGpu(name, memory, tuple(kind) if kind else None, *more) for name, memory, kind, *more in listed
    )


def check_workers(machine: Machine, workers: int, nodes: int = 1) -> None:
    """Raise UsageError when `nodes` machines like this one cannot run `workers` workers in total."""
    each = math.ceil(workers / nodes)
    if machine.num_gpus and each > machine.num_gpus:
        raise UsageError(explain_too_few_gpus(each, machine.num_gpus))
    most = max(FEW_WORKERS, WORKERS_A_CORE * machine.physical_cores)
    if not machine.num_gpus and each > most:
        cores = format_plural(machine.physical_cores, "core")
        raise UsageError(
            f"{each:,} workers on a node with {cores}: expected at most {most:,}; "
            f"use --nproc-per-node {machine.physical_cores}, or a layout of fewer workers"
        )


def explain_too_few_gpus(num_workers: int, num_gpus: int) -> str:
    """Explain that a node has fewer GPUs than workers, and what to do."""
    return (
        f"{num_workers} workers on a node with {format_plural(num_gpus, 'GPU')}: each worker takes one; "
        f"use --nproc-per-node {num_gpus}, or device=cpu to train on the CPU"
    )


def find_local_gpu_ids(count: int | None) -> list[str]:
    """Return NVML's ids of the first `count` GPUs that CUDA_VISIBLE_DEVICES allows, which this node's workers use, or
    without a count of all of them; empty if unknown."""
    try:
        uuids = [gpu.uuid for gpu in detect_gpus()][:count]
    except UnfitNodeError:
        return []
    return [f"GPU-{uuid}" for uuid in uuids] if all(uuids) else []
