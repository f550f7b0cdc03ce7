"""Data-sheet peak rates of devices. `calibration/gemm.py` measures the rates that they reach.

Accelerators are looked up in the catalogue by the name that the driver reports; rates are dense, without sparsity. The
peak of a CPU is cores x clock x FLOPs per cycle of its instruction set.
"""

from dataclasses import dataclass

from phalanx.cluster.catalog import find_entry
from phalanx.cluster.discovery import Cpu, Machine


@dataclass(frozen=True)
class DataSheet:
    """Peak TFLOP/s by precision of one device (all cores of a CPU, one GPU), and the source of the figures."""

    name: str
    tflops: dict[str, float]
    source: str


def find_data_sheet(machine: Machine) -> DataSheet | None:
    """The data sheet of one of the machine's devices; None for a device that is not listed or a clock not known."""
    if machine.device == "cpu":
        return cpu_data_sheet(machine.cpu, machine.physical_cores)
    entry = find_entry("accelerators", machine.device_name)
    return None if entry is None else DataSheet(entry.name, dict(entry.values["tflops"]), f"data sheet of {entry.name}")


def flops_per_cycle(cpu: Cpu) -> tuple[dict[str, int], str]:
    """FLOPs a cycle of one core by precision, and the instruction set that gives them; a fused multiply-add is two.

    Fused vector units x fp32 lanes x 2: AVX-512 64, on AMD's Zen 4 (family 25) the half; AVX2 and SVE 32; NEON and AVX
    16. Instructions that sum pairs (AVX512-BF16, AVX512-FP16) double it; an AMX unit has 1024.
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
