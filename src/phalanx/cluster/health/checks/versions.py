"""Check `versions`: software versions of this node. `cluster/health/compare_nodes.py` compares them between nodes."""

import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from phalanx.cluster.health.baseline import read_host_key
from phalanx.cluster.health.context import CheckContext, read_small_file
from phalanx.cluster.health.finding import FindingValue, HealthFinding, HealthVerdict

RECORDED_PACKAGES = ("torch", "phalanx", "numpy")
MIN_TORCH_VERSION, TORCH_VERSION_LIMIT = (2, 11), (2, 16)
"""Releases of torch that are supported."""


def installed_version(package: str) -> str | None:
    """Return the version of a package without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def measure_versions(
    context: CheckContext, version_of: Callable[[str], str | None] = installed_version
) -> dict[str, FindingValue]:
    return {
        "python": platform.python_version(),
        **{name: version_of(name) for name in RECORDED_PACKAGES},
        "kernel": read_small_file(context.root / "proc/sys/kernel/osrelease") or platform.release(),
        "driver": read_host_key(context.root).get("driver"),
    }


def evaluate_versions(figures: dict[str, FindingValue]) -> list[HealthFinding]:
    torch, driver = figures["torch"], figures["driver"]
    summary = ", ".join(f"{name} {value}" for name, value in figures.items() if value)
    if torch is None:
        return [
            HealthFinding("versions", HealthVerdict.FAIL, f"torch is not installed in this Python; {summary}", figures)
        ]
    release = tuple(int(part) for part in str(torch).split("+")[0].split(".")[:2] if part.isdigit())
    if not MIN_TORCH_VERSION <= release < TORCH_VERSION_LIMIT:
        text = (
            f"torch {torch}: expected {_format_version(MIN_TORCH_VERSION)} up to below "
            f"{_format_version(TORCH_VERSION_LIMIT)}; {summary}"
        )
        return [HealthFinding("versions", HealthVerdict.WARN, text, figures)]
    if driver is not None and str(torch).endswith("+cpu"):
        text = f"there is a GPU driver, but torch {torch} is built for CPUs only: GPUs would lie idle; {summary}"
        return [HealthFinding("versions", HealthVerdict.WARN, text, figures)]
    return [HealthFinding("versions", HealthVerdict.PASS, summary, figures)]


def check_versions(context: CheckContext) -> list[HealthFinding]:
    return evaluate_versions(measure_versions(context))


def _format_version(release: tuple[int, int]) -> str:
    return ".".join(str(part) for part in release)
