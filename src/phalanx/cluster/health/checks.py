"""The checks by name, in the order in which they are done: what each is for, and how long it may take."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.cluster.gpu_links import find_nvml
from phalanx.cluster.health import (
    clock,
    cpu,
    disk,
    disk_rate,
    gpus,
    kernel_log,
    leftovers,
    limits,
    memory,
    network,
    product,
    versions,
)
from phalanx.cluster.health.finding import Finding
from phalanx.cluster.health.remembered import remembered_gpus
from phalanx.cluster.health.site import Site
from phalanx.errors import UsageError


@dataclass(frozen=True)
class Check:
    """One check. `seconds`: after so many it counts as unfinished. `measures`: it takes a process of its own and more
    than a moment, and `--quick` leaves it out."""

    name: str
    line: str
    look: Callable[[Site], list[Finding]]
    seconds: float = 10.0
    measures: bool = False


def devices(site: Site) -> list[Finding]:
    """How many GPUs must be here: as asked, else as many as a probe of this machine found."""
    if site.expect_devices is not None:
        return gpus.check(site, site.expect_devices, "as asked", find_nvml())
    # reading probes takes a second
    known = None if site.quick else remembered_gpus(site)
    return gpus.check(site, known, "as probed", find_nvml())


CHECKS = (
    Check("versions", "Python, torch, kernel, driver", versions.check),
    Check("gpus", "GPUs: how many, heat, clocks, memory errors, links", devices, seconds=20.0),
    Check("kernel-log", "broken hardware in the kernel's messages: XIDs, disks, machine checks", kernel_log.check),
    Check("cpu", "cores that are on, allowed and free; limits of their clock", cpu.check),
    Check("memory", "free memory, swap, /dev/shm", memory.check),
    Check("ulimits", "open files, locked memory", limits.check),
    Check("network", "this machine's name and address, links", network.check),
    Check("clock", "whether its time is kept right", clock.check),
    Check("disk", "room, inodes, rights of the run's, cache's and temporary folder", disk.check),
    Check("leaked-resources", "what dead runs left: workers, /dev/shm, stuck processes", leftovers.check),
    Check("disk-throughput", "a small file written, synced and read", disk_rate.check, seconds=30.0, measures=True),
    Check("matmul", "a matrix product against its own past and its peers", product.check, seconds=120.0, measures=True),
)


def chosen(only: Sequence[str], skip: Sequence[str], quick: bool) -> list[Check]:
    """The checks to do. UsageError for a name that is none, and when none is left."""
    names = [check.name for check in CHECKS]
    for name in (*only, *skip):
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise UsageError(f"there is no check {name!r}{hint} There are: {', '.join(names)}")
    found = [check for check in CHECKS if (not only or check.name in only) and check.name not in skip]
    found = [check for check in found if not (quick and check.measures)]
    if not found:
        raise UsageError("no check is left to do" + (": --quick leaves out those that measure" if quick else ""))
    return found


def run(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """One check, for a process that can be ended: `payload` has its name and the site."""
    check = next(each for each in CHECKS if each.name == payload["check"])
    return [found.as_json() for found in check.look(Site.from_json(payload["site"]))]
