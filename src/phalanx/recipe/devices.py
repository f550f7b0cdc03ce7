"""What each kind of device can do that torch trains on: one table, which the rest of Phalanx asks instead of comparing
names of devices. Nothing here imports torch.

Training ran on CPUs and NVIDIA's GPUs; the other rows are what torch's documentation says (docs/reference/devices.md).
"""

from dataclasses import dataclass

_ALL_BUT_FP8 = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True)
class DeviceKind:
    """A row of the table. `type` is torch's name of the device: AMD's GPUs are "cuda", too."""

    type: str
    what: str
    """In a sentence."""
    backend: str | None
    """Of torch.distributed for tensors on the device; None: there is none."""
    precisions: tuple[str, ...]
    """What it may compute in; fp8 only from a compute capability on (`has_fp8`)."""
    compiles: bool
    """Whether `compile: auto` may choose torch.compile."""
    graphs: bool
    """Whether torch.compile records CUDA graphs."""
    deterministic: bool
    """Whether torch names each operation that has no deterministic kernel, so that bits can be promised."""
    page_locks: bool
    """Whether memory that exists can be page-locked (cudaHostRegister), so that copies into it hold up no host."""
    memory_statistics: bool
    """Whether torch counts the bytes that tensors take; else we follow the tensors."""
    float64: bool
    """Whether it has float64, in which workers agree on the sums of a step. Of xpu some devices have none."""
    about_fp8: str = ""
    """What to say besides that it has no fp8."""

    @property
    def is_gpu(self) -> bool:
        """Whether each worker has one of its own, with memory of its own."""
        return self.type != "cpu"

    @property
    def group(self) -> str:
        """The backends of a process group, for tensors on the host and on the device."""
        return f"cpu:gloo,{self.type}:{self.backend}" if self.is_gpu else "gloo"


CPU = DeviceKind(
    "cpu", "a CPU", "gloo", _ALL_BUT_FP8,
    compiles=False, graphs=False, deterministic=True, page_locks=False, memory_statistics=False, float64=True,
)  # fmt: skip
CUDA = DeviceKind(
    "cuda", "an NVIDIA or AMD GPU", "nccl", (*_ALL_BUT_FP8, "fp8"),
    compiles=True, graphs=True, deterministic=True, page_locks=True, memory_statistics=True, float64=True,
)  # fmt: skip
ROCM = DeviceKind(
    "cuda", "an AMD GPU", "nccl", _ALL_BUT_FP8,
    compiles=True, graphs=True, deterministic=True, page_locks=True, memory_statistics=True, float64=True,
    about_fp8=" (AMD's formats of fp8, such as e4m3fnuz on MI300, are others)",
)  # fmt: skip
XPU = DeviceKind(
    "xpu", "an Intel GPU", "xccl", _ALL_BUT_FP8,
    compiles=True, graphs=False, deterministic=False, page_locks=False, memory_statistics=True, float64=True,
)  # fmt: skip
MPS = DeviceKind(
    "mps", "an Apple GPU", None, _ALL_BUT_FP8,
    compiles=False, graphs=False, deterministic=False, page_locks=False, memory_statistics=False, float64=False,
)  # fmt: skip
KINDS = {"cpu": CPU, "cuda": CUDA, "rocm": ROCM, "xpu": XPU, "mps": MPS}
"""By the name in the table; a recipe's `device` is the `type`."""
NO_FLOAT64 = "has no float64, in which workers agree on the sums of a step"


def kind_of(device: str, rocm: bool = False) -> DeviceKind:
    """The row of a device of torch; `rocm`: torch was built for AMD's GPUs (`torch.version.hip`). For tensors that are
    nowhere (meta) it is the CPU's."""
    return ROCM if rocm and device == "cuda" else KINDS.get(device, CPU)


def sizes_for(device: str) -> str:
    """Under which name tables of sizes to measure have those for a device: a CPU's or a GPU's."""
    return "cuda" if kind_of(device).is_gpu else "cpu"
