"""Under what a measurement holds, and where it lies."""

from dataclasses import replace
from pathlib import Path

from phalanx.cluster.calibration.hardware_key import default_calibration_path, hardware_key
from phalanx.cluster.discovery import Cpu, Machine

CPU = Cpu("AMD EPYC 9654", "AuthenticAMD", 25, 17, 2.4, ("avx2", "avx512_bf16"))
MACHINE = Machine("host", "cpu", CPU.name, 1, 2, 4, 2**34, 2**34, CPU)


def versions(package: str) -> str | None:
    return {"torch": "2.13.0+cpu"}.get(package)


def test_hardware_and_versions_are_told_as_text(tmp_path: Path) -> None:
    key = hardware_key(MACHINE, tmp_path, versions)
    assert key.pop("kernel")
    assert key == {
        "format": "3",
        "device": "AMD EPYC 9654",
        "count": "1",
        "cpu": "AMD EPYC 9654",
        "flags": "avx2 avx512_bf16",
        "cores": "2 of 4 threads",
        "memory_gib": "16",
        "torch": "2.13.0+cpu",
    }


def test_the_driver_is_read_from_its_files(tmp_path: Path) -> None:
    path = tmp_path / "proc/driver/nvidia/version"
    path.parent.mkdir(parents=True)
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu\nGCC version: 12\n")
    assert hardware_key(MACHINE, tmp_path, versions)["driver"] == "nvidia 570.86.15"
    other = tmp_path / "amd"
    (other / "sys/module/amdgpu").mkdir(parents=True)
    (other / "sys/module/amdgpu/version").write_text("6.10.5\n")
    assert hardware_key(MACHINE, other, versions)["driver"] == "amdgpu 6.10.5"


def test_other_hardware_has_another_file(tmp_path: Path) -> None:
    file = default_calibration_path(MACHINE, tmp_path)
    assert file.name.startswith("amd-epyc-9654-")
    assert file == default_calibration_path(replace(MACHINE, hostname="another"), tmp_path)
    assert file != default_calibration_path(replace(MACHINE, physical_cores=4), tmp_path)
