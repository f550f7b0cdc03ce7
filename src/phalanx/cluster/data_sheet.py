"""Data-sheet peak rates of devices. `matmul_benchmark.py` measures the rates that they reach.

Accelerators are looked up in the catalogue by the name that the driver reports; rates are dense, without sparsity. The
peak of a CPU is cores x clock x FLOPs per cycle of its instruction set.
"""

from dataclasses import dataclass

from phalanx.cluster.catalog_entries import find_entry
from phalanx.cluster.discovery import Cpu, Machine
from phalanx.cluster.spec import AcceleratorSpec
from phalanx.recipe.devices import DEVICE_KINDS


@dataclass(frozen=True)
class DataSheet:
    """Peak TFLOP/s by precision of one device (all cores of a CPU, one GPU), and the source of the figures."""

    name: str
    tflops: dict[str, float]
    source: str


def find_data_sheet(machine: Machine) -> DataSheet | None:
    """The data sheet of one of the machine's devices; None for a device that is not listed or a clock not known."""
    return (
        cpu_data_sheet(machine.cpu, machine.physical_cores)
        if machine.device == "cpu"
        else accelerator_data_sheet(machine.device_name)
    )


def accelerator_data_sheet(name: str) -> DataSheet | None:
    """The data sheet of the accelerator that its driver calls `name`; None for one that the catalogue does not have."""
    entry = find_entry("accelerators", name)
    return None if entry is None else DataSheet(entry.name, dict(entry.values["tflops"]), entry.sources["tflops"])


DEVICE_MAKERS = {
    "nvidia": ("cuda",),
    "amd": ("cuda",),
    "intel": ("xpu",),
    "apple": ("mps",),
    "google": (),
    "aws": (),
}
"""Torch's names of the devices that they make; none where torch itself has no name for them."""
NO_GPUS = ("cpu", "gaudi")
"""Generations that are not GPUs, from any vendor."""


def torch_devices(device: AcceleratorSpec) -> tuple[str, ...]:
    """Return the values of a recipe's `device` for this accelerator; all values if its vendor is unknown."""
    found = find_entry("accelerators", device.name)
    generation = device.generation or ("" if found is None else found.values["generation"])
    if generation in NO_GPUS:
        return ("cpu",) if generation == "cpu" else ()
    vendor = device.vendor or ("" if found is None else found.values["vendor"])
    return DEVICE_MAKERS.get(vendor.casefold(), tuple({kind.type: None for kind in DEVICE_KINDS.values()}))


def flops_per_cycle(cpu: Cpu) -> tuple[dict[str, int], str]:
    """FLOPs a cycle of one core by precision, and the instruction set that gives them; a fused multiply-add is two.

    The rule: the number of fused vector units x fp32 lanes x 2. That is two of 512 bits for AVX-512 (64), or the half
    on AMD's Zen 4 (family 25), which takes two cycles for 512 bits; two of 256 bits for AVX2 and SVE (32); two of 128
    for NEON (16); an addition and a multiplication of 256 bits for AVX (16). Instructions that sum pairs (AVX512-BF16,
    AVX512-FP16) double it; an AMX unit takes 16 cycles for a tile product of 16 x 16 x 32 (1024).
    """
    flags = set(cpu.flags)
    if "avx512f" in flags:
        fp32, isa = (32 if cpu.vendor == "AuthenticAMD" and cpu.family < 26 else 64), "AVX-512"
    elif {"avx2", "fma"} <= flags:
        fp32, isa = 32, "AVX2"
    elif "sve" in flags:
        fp32, isa = 32, "SVE"
    elif "avx" in flags or "asimd" in flags:
        fp32, isa = 16, "AVX" if "avx" in flags else "NEON"
    else:
        return {}, "no vector unit known"
    rates = {"fp32": fp32}
    for precision in ("bf16", "fp16"):
        if f"amx_{precision}" in flags:
            rates[precision], isa = 1024, f"{isa}, AMX-{precision.upper()}"
        elif f"avx512_{precision}" in flags:
            rates[precision], isa = 2 * fp32, f"{isa}, AVX512-{precision.upper()}"
    return rates, isa


def cpu_data_sheet(cpu: Cpu, cores: int) -> DataSheet | None:
    """Return cores x clock x FLOPs per cycle; None when the clock or the instruction set is unknown.

    Where the system reports only the nominal clock, a CPU with a boost clock can exceed this peak.
    """
    rates, isa = flops_per_cycle(cpu)
    if cpu.ghz is None or not rates:
        return None
    tflops = {precision: cores * cpu.ghz * rate / 1000 for precision, rate in rates.items()}
    cycle = ", ".join(f"{rate} {precision}" for precision, rate in rates.items())
    source = f"computed: {cores} cores x {cpu.ghz:.2f} GHz x FLOPs a cycle ({cycle}) of {isa}"
    return DataSheet(cpu.name, tflops, source)
