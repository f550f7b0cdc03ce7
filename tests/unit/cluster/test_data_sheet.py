"""Peak rates on paper."""

import pytest

from phalanx.cluster.catalog import (
    cpu_data_sheet,
    find_data_sheet,
    flops_per_cycle,
)
from phalanx.cluster.discovery import Cpu, Machine

ZEN4 = Cpu("AMD EPYC", "AuthenticAMD", 25, 17, 2.5, ("avx", "avx2", "fma", "avx512f", "avx512_bf16"))


def machine(device: str, name: str, cpu: Cpu = ZEN4) -> Machine:
    return Machine("node", device, name, 1, 4, 8, 1, 1, cpu)


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
    assert cpu_data_sheet(Cpu("ARM", flags=("asimd",)), cores=4) is None  # no clock is known


def test_a_machine_has_the_peak_of_what_it_trains_on() -> None:
    gpu, cpu = find_data_sheet(machine("cuda", "NVIDIA H200")), find_data_sheet(machine("cpu", "AMD EPYC"))
    assert gpu is not None
    assert cpu is not None
    assert (gpu.name, cpu.name) == ("NVIDIA H200 SXM", "AMD EPYC")
    assert find_data_sheet(machine("cuda", "an unknown GPU")) is None
