"""All bars of the fleet's models, with goal and figure: the twin, power and heat.

    python benchmarks/fleet_validation.py DATA [--only twin power thermal] [--out docs/benchmarks/fleet.md]

DATA is the directory with the validation data (its README says where each file comes from); the repository has none of
it. Each part is a module of its own here: `fleet_NAME.measure_bars(DATA)`.
"""

import argparse
import importlib
import os
import platform
import time
from datetime import date
from pathlib import Path

from fleet_bars import to_table

PARTS = ("twin", "power", "thermal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="directory with the validation data")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="only these parts")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    bars, times = [], []
    for part in options.only:
        began = time.monotonic()
        bars += importlib.import_module(f"fleet_{part}").measure_bars(options.data)
        times.append(f"{part} {time.monotonic() - began:.0f} s")
    text = f"""# The fleet's models

`python benchmarks/fleet_validation.py DATA`, {date.today()}, {os.cpu_count()} cores, Python
{platform.python_version()}; {", ".join(times)}. {sum(bar.is_met for bar in bars)} of {len(bars)} bars are met.

{to_table(bars)}
"""
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
