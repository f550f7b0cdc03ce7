"""docs/reference/health-checks.md names every check and every threshold, with its figures."""

from pathlib import Path

from phalanx.cluster.health.finding import THRESHOLD_BY_NAME, Threshold
from phalanx.cluster.health.runner import HEALTH_CHECKS
from phalanx.formatting import BYTES_PER_GIB, BYTES_PER_MIB

PAGE = (Path(__file__).parents[3] / "docs/reference/health-checks.md").read_text()


def rows(header: str) -> list[list[str]]:
    """The cells below a table's header."""
    lines = PAGE.partition(f"\n| {header} |")[2].splitlines()[2:]
    end = next(number for number, line in enumerate(lines) if not line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[:end]]


def figure(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return f"{value / BYTES_PER_GIB:g} GiB" if value >= BYTES_PER_GIB else f"{value / BYTES_PER_MIB:g} MiB"
    if unit == "bytes/s":
        return f"{value / 1e6:g} MB/s"
    if unit.startswith("share"):
        return f"{value:.0%}{unit.removeprefix('share')}"
    return f"{value:.10g} {unit}"


def row(name: str, one: Threshold) -> list[str]:
    side = "above" if one.is_upper else "below"
    cells = [figure(value, one.unit) for value in (one.warn, one.fail)]
    return [name, *(cell if cell == "-" else f"{side} {cell}" for cell in cells)]


def test_every_threshold_has_its_row() -> None:
    shown = [cells[:3] for cells in rows("threshold | WARN | FAIL | why there")]
    assert shown == [row(name, one) for name, one in THRESHOLD_BY_NAME.items()]


def test_every_check_has_its_row() -> None:
    told = [(cells[0].strip("`"), cells[2]) for cells in rows("check | what | limit")]
    assert told == [(check.name, f"{check.timeout_s:g} s") for check in HEALTH_CHECKS]
