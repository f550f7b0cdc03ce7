"""Preflight: checks that an agent runs on its node before each attempt, in its own process and within milliseconds,
without a library that could hang. It covers what changes between attempts; `phalanx doctor` covers the rest.
"""

import os
from collections.abc import Callable
from pathlib import Path

from phalanx.cluster.health.checks import gpus, host
from phalanx.cluster.health.finding import CheckContext, HealthFinding, HealthVerdict


def run_preflight(
    run_dir: Path,
    expect_devices: int | None = None,
    root: Path = Path("/"),
    statvfs: Callable[[Path], os.statvfs_result] = os.statvfs,
) -> list[HealthFinding]:
    """Check free disk space, memory, /dev/shm and the number of GPUs.

    The node is unfit if the verdict of any finding is (`HealthVerdict.is_unfit`).
    """
    context = CheckContext(run_dir, root=root, expected_devices=expect_devices)
    return [
        *host.check_disk_space(context, statvfs)[:1],
        *host.evaluate_memory(host.measure_memory(context, statvfs)),
        *check_gpus_present(context, expect_devices),
    ]


def check_gpus_present(context: CheckContext, expected: int | None) -> list[HealthFinding]:
    """Check without the driver that the expected GPUs are there and answer on the PCI bus. Unknown where the
    driver's directory is hidden (gVisor, WSL2)."""
    count = gpus.count_gpus(context.root)
    if count == 0 and expected and not gpus.can_count_gpus(context.root):
        reason = "not known: neither /proc/driver/nvidia nor the topology of AMD's driver can be read here"
        return [HealthFinding("gpus/count", HealthVerdict.UNKNOWN, reason)]
    findings = [gpus.evaluate_gpu_count(count, expected)]
    for bus in find_lost_gpus(context.root):
        text = f"GPU {bus} fell off the bus (its configuration reads as ones): restart the machine, see XID 79 in dmesg"
        findings.append(HealthFinding("gpus/count", HealthVerdict.FAIL, text, {"bus": bus}))
    return findings


def find_lost_gpus(root: Path) -> list[str]:
    """Addresses of NVIDIA's GPUs that fell off the bus: reading their configuration gives nothing but ones."""
    folder = root / "proc/driver/nvidia/gpus"
    found = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
    return [bus for bus in found if _read_vendor(root / "sys/bus/pci/devices" / bus / "config") == b"\xff\xff"]


def _read_vendor(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(2)
    except OSError:  # hidden in this container
        return None
