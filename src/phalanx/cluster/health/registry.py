"""The checks by name, in the order in which they are done: what each is for, and how long it may take."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.cluster.gpu_topology import import_nvml
from phalanx.cluster.health.baseline import baseline_gpu_count
from phalanx.cluster.health.checks import (
    clock,
    cpu,
    disk_space,
    disk_throughput,
    gpus,
    kernel_log,
    leaked_resources,
    matmul,
    memory,
    network,
    ulimits,
    versions,
)
from phalanx.cluster.health.context import CheckContext
from phalanx.cluster.health.finding import HealthFinding
from phalanx.errors import UsageError


@dataclass(frozen=True)
class HealthCheck:
    """One check.

    `timeout_s`: the check is aborted after this time. `is_benchmark`: it takes seconds, runs in a separate process, and
    is skipped by `--quick`.
    """

    name: str
    description: str
    run_check: Callable[[CheckContext], list[HealthFinding]]
    timeout_s: float = 10.0
    is_benchmark: bool = False


def check_devices(context: CheckContext) -> list[HealthFinding]:
    """Check the GPUs. The expected number comes from the context, else from a calibration of this machine."""
    if context.expected_devices is not None:
        return gpus.check_gpus(context, context.expected_devices, "as requested", import_nvml())
    # reading calibration files takes 1 s
    expected = None if context.is_quick else baseline_gpu_count(context)
    return gpus.check_gpus(context, expected, "as calibrated", import_nvml())


HEALTH_CHECKS = (
    HealthCheck("versions", "Python, torch, kernel, driver", versions.check_versions),
    HealthCheck("gpus", "GPUs: how many, heat, clocks, memory errors, links", check_devices, timeout_s=20.0),
    HealthCheck(
        "kernel-log",
        "broken hardware in the kernel's messages: XIDs, disks, machine checks",
        kernel_log.check_kernel_log,
    ),
    HealthCheck("cpu", "cores that are on, allowed and free; limits of their clock", cpu.check_cpu),
    HealthCheck("memory", "free memory, swap, /dev/shm", memory.check_memory),
    HealthCheck("ulimits", "open files, locked memory", ulimits.check_ulimits),
    HealthCheck("network", "this machine's name and address, links", network.check_network),
    HealthCheck("clock", "whether the clock is synchronized", clock.check_clock),
    HealthCheck(
        "disk",
        "free space, inodes and permissions of the run, cache and temporary directories",
        disk_space.check_disk_space,
    ),
    HealthCheck(
        "leaked-resources",
        "what dead runs left: workers, /dev/shm, stuck processes",
        leaked_resources.check_leaked_resources,
    ),
    HealthCheck(
        "disk-throughput",
        "a small file written, synced and read",
        disk_throughput.check_disk_throughput,
        timeout_s=30.0,
        is_benchmark=True,
    ),
    HealthCheck(
        "matmul",
        "a matrix product against its own past and its peers",
        matmul.check_matmul,
        timeout_s=120.0,
        is_benchmark=True,
    ),
)


def choose_checks(only: Sequence[str], skip: Sequence[str], quick: bool) -> list[HealthCheck]:
    """Choose the checks to run. Raises UsageError for an unknown name, and when no check is left."""
    names = [check.name for check in HEALTH_CHECKS]
    for name in (*only, *skip):
        if name not in names:
            suggestion = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {suggestion[0]!r}?" if suggestion else "."
            raise UsageError(f"there is no check {name!r}{hint} There are: {', '.join(names)}")
    found = [check for check in HEALTH_CHECKS if (not only or check.name in only) and check.name not in skip]
    found = [check for check in found if not (quick and check.is_benchmark)]
    if not found:
        raise UsageError("no check is left to do" + (": --quick leaves out those that measure" if quick else ""))
    return found


def run_check_in_process(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one check in a subprocess. `payload`: the name of the check and the context."""
    check = next(each for each in HEALTH_CHECKS if each.name == payload["check"])
    return [found.as_json() for found in check.run_check(CheckContext.from_json(payload["site"]))]
