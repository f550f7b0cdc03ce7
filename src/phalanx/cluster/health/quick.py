"""What an agent asks of its node before each attempt: in some milliseconds, in its own process, with no library that
could hang. It says what changes between attempts; `phalanx doctor` says all.

A network disk whose server is gone stops whoever asks for its free space, here too: a run's folder there is known to be
read and written by the agent at that moment anyway.
"""

import os
from collections.abc import Callable
from pathlib import Path

from phalanx.cluster.health import clock, disk, gpus, memory
from phalanx.cluster.health.finding import Finding, Verdict
from phalanx.cluster.health.site import Site


def quick(
    run: Path,
    expect_devices: int | None = None,
    root: Path = Path("/"),
    kernel: Callable[[], clock.KernelClock | None] = clock.kernel_clock,
    space: Callable[[Path], os.statvfs_result] = os.statvfs,
) -> list[Finding]:
    """Room for the run, memory, /dev/shm, the number of GPUs that the driver still has, the clock. Unfit is the node
    when any finding is (`Verdict.unfit`)."""
    site = Site(run, root=root, expect_devices=expect_devices, quick=True)
    return [
        *disk.check(site, space)[:1],
        *memory.evaluate(memory.look(site, space)),
        *present(site, expect_devices),
        *clock.evaluate(kernel(), None),
    ]


def present(site: Site, expected: int | None) -> list[Finding]:
    """GPUs, without asking their driver: as many as expected, and none of them silent on the PCI bus. Where the
    driver's folder is hidden (gVisor, WSL2), nothing is known of them."""
    here = gpus.counted(site.root)
    if here == 0 and expected and not gpus.countable(site.root):
        why = "not known: neither /proc/driver/nvidia nor the topology of AMD's driver can be read here"
        return [Finding("gpus/count", Verdict.UNKNOWN, why)]
    return [gpus.number(here, expected, "as planned"), *(_silent(bus) for bus in silent(site.root))]


def silent(root: Path) -> list[str]:
    """Addresses of NVIDIA's GPUs that fell off the bus: reading their configuration gives nothing but ones."""
    folder = root / "proc/driver/nvidia/gpus"
    found = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
    return [bus for bus in found if _vendor(root / "sys/bus/pci/devices" / bus / "config") == b"\xff\xff"]


def _vendor(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(2)
    except OSError:  # hidden in this container
        return None


def _silent(bus: str) -> Finding:
    text = f"GPU {bus} fell off the bus (its configuration reads as ones): restart the machine, see XID 79 in dmesg"
    return Finding("gpus/count", Verdict.BAD, text, {"bus": bus})
