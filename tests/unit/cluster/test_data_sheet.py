"""Peak rates on paper."""

import pytest

from phalanx.cluster.data_sheet import (
    accelerator_data_sheet,
    cpu_data_sheet,
    find_data_sheet,
    flops_per_cycle,
)
from phalanx.cluster.discovery import Cpu, Machine

ZEN4 = Cpu("AMD EPYC", "AuthenticAMD", 25, 17, 2.5, ("avx", "avx2", "fma", "avx512f", "avx512_bf16"))


def machine(device: str, name: str, cpu: Cpu = ZEN4) -> Machine:
    return Machine("node", device, name, 1, 4, 8, 1, 1, cpu)


@pytest.mark.parametrize(
    ("driver", "name", "precision", "tflops"),
    [
        ("Tesla K20Xm", "NVIDIA K20X", "fp32", 3.95),
        ("Tesla V100-SXM2-32GB", "NVIDIA V100 SXM2 32GB", "fp16", 125),
        ("Tesla V100-PCIE-16GB", "NVIDIA V100 PCIe 16GB", "fp16", 112),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 SXM 80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "NVIDIA A100 PCIe 80GB", "bf16", 312),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM", "bf16", 989),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200", "NVIDIA H200 SXM", "bf16", 989),
        ("NVIDIA B200", "NVIDIA B200 SXM", "bf16", 2250),
        ("AMD Instinct MI250X", "AMD MI250X, one of its two dies", "bf16", 191.5),
        ("AMD Instinct MI300X", "AMD MI300X", "bf16", 1307),
    ],
)
def test_an_accelerator_is_known_by_its_drivers_name(driver: str, name: str, precision: str, tflops: float) -> None:
    sheet = accelerator_data_sheet(driver)
    assert sheet is not None
    assert (sheet.name, sheet.tflops[precision]) == (name, tflops)


@pytest.mark.parametrize(
    ("driver", "bf16"), [("NVIDIA H100 NVL", 835), ("NVIDIA H200 NVL", 835), ("NVIDIA GB200", 2500)]
)
def test_a_relative_has_its_own_rates(driver: str, bf16: float) -> None:
    sheet = accelerator_data_sheet(driver)
    assert sheet is not None
    assert sheet.tflops["bf16"] == bf16


@pytest.mark.parametrize(
    "driver",
    [
        "NVIDIA H100 CNX",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA L40",
        "AMD Instinct MI300A",
        "",
    ],
)
def test_a_relative_with_other_rates_is_not_taken_for_it(driver: str) -> None:
    assert accelerator_data_sheet(driver) is None


def test_old_accelerators_have_no_bf16() -> None:
    sheet = accelerator_data_sheet("Tesla V100-SXM2-16GB")
    assert sheet is not None
    assert "bf16" not in sheet.tflops


@pytest.mark.parametrize(
    ("cpu", "rates"),
    [
        (ZEN4, {"fp32": 32, "bf16": 64}),
        (Cpu("EPYC 9755", "AuthenticAMD", 26, flags=("avx512f", "avx512_bf16")), {"fp32": 64, "bf16": 128}),
        (Cpu("Xeon", "GenuineIntel", 6, flags=("avx512f", "avx512_bf16", "amx_bf16")), {"fp32": 64, "bf16": 1024}),
        (Cpu("Core", "GenuineIntel", 6, flags=("avx", "avx2", "fma")), {"fp32": 32}),
        (Cpu("old", "GenuineIntel", 6, flags=("avx",)), {"fp32": 16}),
        (Cpu("ARM", flags=("asimd",)), {"fp32": 16}),
        (Cpu("unknown"), {}),
    ],
)
def test_a_cpus_flops_a_cycle_follow_from_its_instruction_set(cpu: Cpu, rates: dict[str, int]) -> None:
    assert flops_per_cycle(cpu)[0] == rates


def test_a_cpus_peak_is_cores_times_clock_times_flops() -> None:
    sheet = cpu_data_sheet(ZEN4, cores=4)
    assert sheet is not None
    assert sheet.tflops == pytest.approx({"fp32": 0.32, "bf16": 0.64})
    assert "4 cores x 2.50 GHz" in sheet.source


def test_without_a_clock_there_is_no_peak() -> None:
    assert cpu_data_sheet(Cpu("ARM", flags=("asimd",)), cores=4) is None


def test_a_machine_has_the_peak_of_what_it_trains_on() -> None:
    gpu, cpu = find_data_sheet(machine("cuda", "NVIDIA H200")), find_data_sheet(machine("cpu", "AMD EPYC"))
    assert gpu is not None
    assert cpu is not None
    assert (gpu.name, cpu.name) == ("NVIDIA H200 SXM", "AMD EPYC")
    assert find_data_sheet(machine("cuda", "an unknown GPU")) is None
