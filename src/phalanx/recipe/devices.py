"""What each kind of device can do that torch trains on: one table, which the rest of Phalanx asks instead of comparing
names of devices. Nothing here imports torch.

Training ran on CPUs and NVIDIA's GPUs; the other rows are what torch's documentation says (docs/reference/devices.md).
"""

from dataclasses import dataclass

_PRECISIONS_WITHOUT_FP8 = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True)
class DeviceKind:
    """A row of the table. `type` is torch's name of the device: AMD's GPUs are "cuda", too."""

    type: str
    description: str
    """One-sentence description."""
    dist_backend: str | None
    """Backend of torch.distributed for tensors on the device; None if there is none."""
    precisions: tuple[str, ...]
    """What it may compute in; fp8 only from a compute capability on (`has_fp8`)."""
    auto_compiles: bool
    """Whether `compile: auto` may choose torch.compile."""
    has_cuda_graphs: bool
    """Whether torch.compile records CUDA graphs."""
    names_nondeterministic_ops: bool
    """Whether torch names each operation that has no deterministic kernel, so that bits can be promised."""
    can_pin_existing_memory: bool
    """Whether memory that exists can be page-locked (cudaHostRegister), so that copies into it hold up no host."""
    has_memory_statistics: bool
    """Whether torch counts the bytes that tensors take; else we follow the tensors."""
    has_float64: bool
    """Whether it has float64, in which workers agree on the sums of a step. Of xpu some devices have none."""
    fp8_note: str = ""
    """What to say besides that it has no fp8."""

    @property
    def is_gpu(self) -> bool:
        """Whether each worker has one of its own, with memory of its own."""
        return self.type != "cpu"

    @property
    def process_group_backend(self) -> str:
        """The backends of a process group, for tensors on the host and on the device."""
        return f"cpu:gloo,{self.type}:{self.dist_backend}" if self.is_gpu else "gloo"


CPU_DEVICE = DeviceKind(
    "cpu",
    "a CPU",
    "gloo",
    _PRECISIONS_WITHOUT_FP8,
    auto_compiles=False,
    has_cuda_graphs=False,
    names_nondeterministic_ops=True,
    can_pin_existing_memory=False,
    has_memory_statistics=False,
    has_float64=True,
)
CUDA_DEVICE = DeviceKind(
    "cuda",
    "an NVIDIA or AMD GPU",
    "nccl",
    (*_PRECISIONS_WITHOUT_FP8, "fp8"),
    auto_compiles=True,
    has_cuda_graphs=True,
    names_nondeterministic_ops=True,
    can_pin_existing_memory=True,
    has_memory_statistics=True,
    has_float64=True,
)
ROCM_DEVICE = DeviceKind(
    "cuda",
    "an AMD GPU",
    "nccl",
    _PRECISIONS_WITHOUT_FP8,
    auto_compiles=True,
    has_cuda_graphs=True,
    names_nondeterministic_ops=True,
    can_pin_existing_memory=True,
    has_memory_statistics=True,
    has_float64=True,
    fp8_note=" (AMD's formats of fp8, such as e4m3fnuz on MI300, are others)",
)
XPU_DEVICE = DeviceKind(
    "xpu",
    "an Intel GPU",
    "xccl",
    _PRECISIONS_WITHOUT_FP8,
    auto_compiles=True,
    has_cuda_graphs=False,
    names_nondeterministic_ops=False,
    can_pin_existing_memory=False,
    has_memory_statistics=True,
    has_float64=True,
)
MPS_DEVICE = DeviceKind(
    "mps",
    "an Apple GPU",
    None,
    _PRECISIONS_WITHOUT_FP8,
    auto_compiles=False,
    has_cuda_graphs=False,
    names_nondeterministic_ops=False,
    can_pin_existing_memory=False,
    has_memory_statistics=False,
    has_float64=False,
)
DEVICE_KINDS = {"cpu": CPU_DEVICE, "cuda": CUDA_DEVICE, "rocm": ROCM_DEVICE, "xpu": XPU_DEVICE, "mps": MPS_DEVICE}
"""Devices by their name in the table; a recipe's `device` is the `type`."""
NO_FLOAT64_TEXT = "has no float64, in which workers agree on the sums of a step"


def device_kind_of(device: str, rocm: bool = False) -> DeviceKind:
    """The row of a device of torch; `rocm`: torch was built for AMD's GPUs (`torch.version.hip`). For tensors that are
    nowhere (meta) it is the CPU's."""
    return ROCM_DEVICE if rocm and device == "cuda" else DEVICE_KINDS.get(device, CPU_DEVICE)


def size_table_of(device: str) -> str:
    """Under which name tables of sizes to measure have those for a device: a CPU's or a GPU's."""
    return "cuda" if device_kind_of(device).is_gpu else "cpu"
