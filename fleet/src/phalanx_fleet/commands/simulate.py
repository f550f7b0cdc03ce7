"""`phalanx simulate`: months of a fleet, and answers to what-if questions."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.text_table import Column, format_table

if TYPE_CHECKING:
    from phalanx_fleet.simulate.figures import ComparisonTable
    from phalanx_fleet.simulate.variants import SimulatedVariant


def simulate(
    fleet: Annotated[Path, typer.Argument(metavar="FLEET", help="Fleet file (YAML) with a `simulate` section.")],
    what: Annotated[
        list[str] | None,
        typer.Option(
            "--what",
            metavar="KEY=VALUE",
            help='Compare with this variant, such as spares=0.04 or "spares=0.04 power_cap=0.8" (repeatable).',
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="JOBS.csv", help="Simulate these jobs: a CSV file with submit_s, gpus and duration_s."),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, max=1000, metavar="N", help="Simulations per variant.", show_default="the file's"),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an HTML page with time lines and the comparison.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Simulate months of a fleet: goodput, stops, waits, energy, water, carbon and cost.

    Each figure is a mean over seeds, with its quantiles .05 and .95. Variants use the same seeds: the mean of their
    differences has an interval; together they hold with 95 %.
    """
    from phalanx.cli.report import PAGE_MARKERS, write_page
    from phalanx.run.directory import check_output_path
    from phalanx_fleet.simulate.page import render_simulation_html
    from phalanx_fleet.simulate.variants import simulate_variants

    if html is not None:
        check_output_path("--html", html, PAGE_MARKERS)
    variants = simulate_variants(fleet, what or [], replay, seeds)
    if html is not None:
        write_page(html, render_simulation_html(variants))
    if as_json:
        print(json.dumps(variants_to_json(variants), indent=2))
        return
    if html is not None:
        typer.echo(f"wrote {html}")
        return
    typer.echo("\n".join(format_variants(variants)))


def format_variants(variants: Sequence["SimulatedVariant"]) -> list[str]:
    """Return lines: a row for each figure, what exceeds its budget, and the differences of variants to the file."""
    from phalanx_fleet.simulate.figures import compare_variants, describe_differences

    differences = describe_differences(variants)
    return [*_format(compare_variants(variants)), *([] if differences is None else ["", *_format(differences)])]


def _format(table: "ComparisonTable") -> list[str]:
    columns = [Column("FIGURE"), *(Column(each) for each in table.columns)]
    return [table.head, *format_table(columns, table.rows), *table.notes, *table.problems]


def variants_to_json(variants: Sequence["SimulatedVariant"]) -> list[dict[str, object]]:
    """Return all results by variant and seed, and differences to the first variant by figure; NaN becomes null."""
    from phalanx_fleet.simulate.figures import list_differences

    found = list_differences(variants)
    return [
        {
            "variant": variant.label,
            "nodes": variant.num_nodes,
            "devices": variant.num_devices,
            "days": variant.settings.days,
            "policy": variant.settings.policy,
            "seeds": [replace_nan(asdict(replace(result, hours=None))) for result in variant.results],
            "exceeded_budgets": [
                {"level": each.level.label, "committed_w": each.committed_w, "budget_w": each.level.budget_w}
                for each in variant.exceeded
            ],
            "differences": {}
            if index == 0
            else {each.row.title.strip(): replace_nan(asdict(each.differences[index - 1])) for each in found},
        }
        for index, variant in enumerate(variants)
    ]


def replace_nan(value: object) -> object:
    """Return the value with None for NaN, also in a mapping without its `hours`: JSON has no NaN."""
    if isinstance(value, dict):
        return {key: replace_nan(each) for key, each in value.items() if key != "hours"}
    return None if isinstance(value, float) and not math.isfinite(value) else value
