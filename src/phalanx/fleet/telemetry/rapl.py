"""Find the CPU packages that RAPL counts and caps, under /sys/class/powercap."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RaplDomain:
    """A package, or a die of one. `package`: such as package-0, which its dies share."""

    folder: Path
    package: str


def find_rapl_domains(root: Path = Path("/")) -> list[RaplDomain]:
    """Return the domains of packages and dies; not those of parts of a package, nor `psys`, which is the whole platform
    and has the packages in it."""
    found = []
    for folder in sorted((root / "sys/class/powercap").glob("intel-rapl:*")):
        if folder.name.count(":") > 1:
            continue
        try:
            name = (folder / "name").read_text().strip()
        except (OSError, UnicodeDecodeError):
            continue
        if name.startswith("package"):
            found.append(RaplDomain(folder, name.partition("-die")[0]))
    return found
