"""The picture of what grad_sync/run.py measured: efficiency against the speed of links, a file for each workload.

    python benchmarks/grad_sync/plot.py results.json [...] [--out docs/images]

Of all files that `run.py --out` wrote, cases of limited links with the same workload are drawn together as
exchange-WORKLOAD.svg. Contenders that are not in SHOWN are left out: a picture of all would show none.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from pictures import Curve, chart

SHOWN_STRATEGIES = {
    "diloco-late3": "diloco, rounds of 10 steps",
    "int8-1mib": "int8",
    "bf16-1mib": "bf16",
    "all-reduce-1mib": "all-reduce",
    "ddp-1mib": "torch's DDP",
    "binomial-tree-1mib": "reduction tree",
}
"""Contenders by name, and what they are called in the picture, which has as many colours."""
BITS_PER_UNIT = {"mbit": 1.0, "gbit": 1e3}
"""Mbit/s."""


def speed(link: str) -> float:
    """Mbit/s of a link as tc writes it. ValueError for any other."""
    for unit, factor in BITS_PER_UNIT.items():
        if link.endswith(unit):
            return float(link.removesuffix(unit)) * factor
    raise ValueError(f"link {link!r}: expected a number and {' or '.join(BITS_PER_UNIT)}, such as 1gbit")


def picture(cases: Sequence[Mapping[str, Any]]) -> str:
    """Cases of one workload and number of nodes, an SVG. ValueError where they are not, or there is nothing to draw."""
    if len({case["nodes"] for case in cases}) > 1:
        raise ValueError(f"{cases[0]['told']} on several numbers of nodes, where a picture has one")
    found: dict[str, list[tuple[float, float]]] = {}
    for case in sorted(cases, key=lambda case: speed(case["link"])):
        for row in case["rows"]:
            found.setdefault(row["name"], []).append((speed(case["link"]), row["efficiency"]))
    curves = [Curve(told, found[name], dots=True) for name, told in SHOWN_STRATEGIES.items() if name in found]
    first = cases[0]
    title = f"{first['told']}; {first['nodes']} nodes"
    return chart(curves, title, "Mbit/s of each link", "speed against no exchange")


def by_workload(results: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """All cases with limited links, by workload."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for case in (case for result in results for case in result["cases"] if case["link"] != "none"):
        found.setdefault(case["workload"], []).append(case)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[2] / "docs" / "images")
    options = parser.parse_args()
    try:
        found = by_workload([json.loads(path.read_text()) for path in options.results])
        pictures = {f"exchange-{workload}.svg": picture(cases) for workload, cases in found.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"no picture: these are no results of run.py with limited links: {error}") from None
    options.out.mkdir(parents=True, exist_ok=True)
    for name, drawn in pictures.items():
        (options.out / name).write_text(drawn)
        print(f"wrote {options.out / name}")


if __name__ == "__main__":
    main()
