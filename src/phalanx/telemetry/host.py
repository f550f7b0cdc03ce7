"""Read this machine without its accelerators: psutil, RAPL and hwmon under /sys, /proc/uptime.

A read costs well under a millisecond: `/proc/stat`, which a kernel assembles for each of some hundred cores, is not
read, nor are the sensors of single cores.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from phalanx.telemetry.sample import HostSample, SourceReading

CPU_SENSORS = {"coretemp": "Package", "k10temp": "T", "zenpower": "T", "cpu_thermal": ""}
"""Drivers of CPU temperatures in hwmon, and how the labels of their package sensors begin."""
BUSY_WATTS_PER_CORE = 5.0
"""Watts of a physical core at full load, its part of the package included: data sheets of server CPUs have 3.5 to 7
(EPYC 9654: 360 W for 96 cores, Xeon 8480+: 350 W for 56). An order of magnitude, used where RAPL cannot be read."""
IDLE_POWER_SHARE = 0.3
"""Part of that which an idle package draws."""


MAX_PACKAGE_WATTS = 2000.0
"""More than a CPU package draws: a RAPL counter that went back further was reset, and did not wrap."""


@dataclass(frozen=True)
class RaplDomain:
    """A package, or a die of one. `package`: such as package-0, which its dies share."""

    folder: Path
    package: str


def find_rapl_domains(root: Path = Path("/")) -> list[RaplDomain]:
    """Return the domains of packages and dies; not of parts of a package, nor `psys`, the whole platform."""
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


@dataclass
class _RaplPackage:
    package: str
    energy_file: Path
    range_uj: int
    """Where the counter starts again at zero."""
    last_uj: int = -1
    read_at: float = 0.0
    joules: float = 0.0
    """Since the source was opened."""

    def add(self, now_uj: int, now: float) -> bool:
        """Add a reading; return whether it says what was drawn since the last one. A counter that does not move, as in
        some virtual machines, or that was reset does not."""
        last_uj, seconds = self.last_uj, now - self.read_at
        self.last_uj, self.read_at = now_uj, now
        if last_uj < 0:
            return True
        joules = (now_uj - last_uj) % (self.range_uj + 1) / 1e6
        if joules > MAX_PACKAGE_WATTS * seconds or (joules == 0 and seconds > 0):
            return False
        self.joules += joules
        return True


class HostSource:
    """Readings of this machine. `root`: where /sys and /proc are. What cannot be read is one of its problems."""

    name = "host"

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic):
        self._root, self._clock = root, clock
        self.problems: list[str] = []
        self._packages = self._find_packages()
        self._cpu_sensors = list(_find_cpu_sensors(root))
        self._cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
        self._last_uptime: tuple[float, float] | None = None
        self._last_energy: tuple[float, float] | None = None

    def read(self) -> SourceReading:
        utilization, energy_j = self._read_utilization(), self._read_energy()
        power_w, is_estimate = self._measure_power(energy_j), False
        if energy_j is None and utilization is not None:
            busy_w = BUSY_WATTS_PER_CORE * self._cores
            power_w, is_estimate = busy_w * (IDLE_POWER_SHARE + (1 - IDLE_POWER_SHARE) * utilization), True
        memory: Any = None
        with contextlib.suppress(OSError, psutil.Error):  # a sandbox may not have the file
            memory = psutil.virtual_memory()
        temperatures = [value / 1000 for value in map(_read_number, self._cpu_sensors) if value is not None]
        host = HostSample(
            cpu_energy_joules=energy_j,
            cpu_power_w=power_w,
            cpu_power_is_estimate=is_estimate,
            cpu_temperature_c=max(temperatures, default=None),
            cpu_utilization=utilization,
            memory_used_bytes=None if memory is None else float(memory.total - memory.available),
            memory_size_bytes=None if memory is None else float(memory.total),
        )
        return SourceReading(host=host)

    def close(self) -> None:
        """Nothing is held."""

    def _find_packages(self) -> list[_RaplPackage]:
        found = []
        for domain in find_rapl_domains(self._root):
            range_uj = _read_number(domain.folder / "max_energy_range_uj")
            energy_file = domain.folder / "energy_uj"
            if range_uj is None or _read_number(energy_file) is None:
                self.problems.append(
                    f"RAPL: {energy_file} cannot be read, so CPU power is estimated; readable by root only by default "
                    f"(sudo chmod a+r {energy_file})"
                )
                return []
            found.append(_RaplPackage(domain.package, energy_file, int(range_uj)))
        if not found:
            self.problems.append("RAPL: this machine has no counters of CPU energy, so CPU power is estimated")
        return found

    def _read_energy(self) -> float | None:
        """Joules of all packages since the source was opened; None unless each of them says what it drew. Dies of a
        package that show the same counter twice have one: it counts once."""
        is_known = bool(self._packages)
        counted: set[tuple[str, int, int]] = set()
        for package in self._packages:
            now_uj, last_uj, joules = _read_number(package.energy_file), package.last_uj, package.joules
            is_known &= now_uj is not None and package.add(int(now_uj), self._clock())
            key = package.package, last_uj, package.last_uj
            package.joules = joules if key in counted else package.joules
            counted.add(key)
        return sum(package.joules for package in self._packages) if is_known else None

    def _measure_power(self, energy_j: float | None) -> float | None:
        """Watts since the last reading."""
        now, last = self._clock(), self._last_energy
        self._last_energy = None if energy_j is None else (now, energy_j)
        if last is None or energy_j is None or now <= last[0]:
            return None
        return (energy_j - last[1]) / (now - last[0])

    def _read_utilization(self) -> float | None:
        """The share of all cores' time that was not idle since the last reading."""
        words, last = (_read_text(self._root / "proc/uptime") or "").split(), self._last_uptime
        if len(words) != 2:
            return None
        up_s, idle_s = map(float, words)
        self._last_uptime = (up_s, idle_s)
        if last is None or up_s <= last[0]:
            return None
        return min(1.0, max(0.0, 1 - (idle_s - last[1]) / ((up_s - last[0]) * (psutil.cpu_count() or 1))))


def _find_cpu_sensors(root: Path) -> Iterator[Path]:
    for folder in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        label_start = CPU_SENSORS.get(_read_text(folder / "name") or "")
        for sensor in sorted(folder.glob("temp*_input")) if label_start is not None else ():
            label = _read_text(sensor.with_name(sensor.name.replace("_input", "_label"))) or ""
            if label.startswith(label_start or ""):
                yield sensor


def _read_number(path: Path) -> float | None:
    text = _read_text(path)
    return float(text) if text is not None and text.removeprefix("-").isdecimal() else None


def _read_text(path: Path) -> str | None:
    """The text of a file under /sys or /proc, without its line end; None where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
