"""All bars of the fleet's models, with goal and figure: the twin, power and heat.

    python fleet/benchmarks/fleet_validation.py DATA [--only twin power thermal] [--out FILE]
        [--pictures fleet/docs/images]

DATA is the directory with the validation data (its README says where each file comes from); the repository has none of
it. It may hold fewer files, other rows, or more of them: what cannot be measured is listed with the reason, and rows of
other servers, traces, devices and sites of the same form are measured, too. Each part is a module of its own here:
`fleet_NAME.measure_bars(DATA)`.
"""

import argparse
import importlib
import os
import platform
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from fleet_bars import PICTURES, Bar, to_table
from pictures import scatter

PARTS = ("twin", "power", "thermal")


def draw(bars: Sequence[Bar], folder: Path) -> None:
    """Draw what the models have against what was measured or published."""
    for name, title in PICTURES.items():
        groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for bar in bars:
            if bar.comparison is not None and bar.comparison.picture == name:
                groups[bar.comparison.label].extend(bar.comparison.points)
        if groups:
            text = scatter(groups, title, "measured or published", "model", band=0.05)
            (folder / f"fleet-{name}.svg").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="directory with the validation data")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="only these parts")
    parser.add_argument("--out", type=Path, help="file for the table")
    parser.add_argument("--pictures", type=Path, help="directory for the pictures; needs matplotlib")
    options = parser.parse_args()
    if not options.data.is_dir():
        parser.error(f"{options.data}: no such directory")
    bars, times = [], []
    for part in options.only:
        began = time.monotonic()
        bars += importlib.import_module(f"fleet_{part}").measure_bars(options.data)
        times.append(f"{part} {time.monotonic() - began:.0f} s")
    measured = [bar for bar in bars if bar.is_met is not None]
    summary = f"{sum(bool(bar.is_met) for bar in measured)} of {len(measured)} bars are met."
    if len(measured) < len(bars):
        summary += f" {len(bars) - len(measured)} could not be measured."
    text = f"""# The fleet's models

`python fleet/benchmarks/fleet_validation.py DATA`, {date.today()}, {os.cpu_count()} cores, Python
{platform.python_version()}; {", ".join(times)}. {summary}

{to_table(bars)}
"""
    print(text)
    if options.out:
        options.out.write_text(text)
    if options.pictures:
        draw(bars, options.pictures)


if __name__ == "__main__":
    main()
