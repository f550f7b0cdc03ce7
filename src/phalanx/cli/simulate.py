"""`phalanx simulate`: months of a fleet, and answers to what-if questions."""

import json
from pathlib import Path
from typing import Annotated

import typer


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

    Each figure is a mean over seeds, with its quantiles .05 and .95. Variants use the same seeds.
    """
    from phalanx.app.simulate import simulate_variants
    from phalanx.app.simulation_page import render_simulation_html
    from phalanx.cli.report import PAGE_MARKERS, write_page
    from phalanx.cli.simulate_output import format_variants, variants_to_json
    from phalanx.run.directory import check_output_path

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
