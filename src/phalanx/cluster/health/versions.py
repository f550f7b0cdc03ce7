"""Check `versions`: what software is here. Whether all nodes have the same, `fleet.py` says."""

import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from phalanx.cluster.health.finding import Figure, Finding, Verdict
from phalanx.cluster.health.remembered import host_key
from phalanx.cluster.health.site import Site, read

PACKAGES = ("torch", "phalanx", "numpy")
LEAST, BELOW = (2, 11), (2, 16)
"""Releases of torch that are supported."""


def installed(package: str) -> str | None:
    """Its version, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def look(site: Site, version_of: Callable[[str], str | None] = installed) -> dict[str, Figure]:
    return {
        "python": platform.python_version(),
        **{name: version_of(name) for name in PACKAGES},
        "kernel": read(site.root / "proc/sys/kernel/osrelease") or platform.release(),
        "driver": host_key(site.root).get("driver"),
    }


def evaluate(figures: dict[str, Figure]) -> list[Finding]:
    torch, driver = figures["torch"], figures["driver"]
    told = ", ".join(f"{name} {value}" for name, value in figures.items() if value)
    if torch is None:
        return [Finding("versions", Verdict.BAD, f"torch is not installed in this Python; {told}", figures)]
    release = tuple(int(part) for part in str(torch).split("+")[0].split(".")[:2] if part.isdigit())
    if not LEAST <= release < BELOW:
        text = f"torch {torch}: expected {_told(LEAST)} up to below {_told(BELOW)}; {told}"
        return [Finding("versions", Verdict.WARN, text, figures)]
    if driver is not None and str(torch).endswith("+cpu"):
        text = f"there is a GPU driver, but torch {torch} is built for CPUs only: GPUs would lie idle; {told}"
        return [Finding("versions", Verdict.WARN, text, figures)]
    return [Finding("versions", Verdict.OK, told, figures)]


def check(site: Site) -> list[Finding]:
    return evaluate(look(site))


def _told(release: tuple[int, int]) -> str:
    return ".".join(str(part) for part in release)
