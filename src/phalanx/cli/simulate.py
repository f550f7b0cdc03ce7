"""`phalanx simulate`: months of a fleet, and answers to what-if questions."""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.errors import UsageError

if TYPE_CHECKING:
    from phalanx.app.simulation_search import SettingSearch


class SearchGoal(StrEnum):
    """What a search looks for."""

    PRODUCTIVE = "productive"
    ETTR = "ettr"
    WAIT = "wait"
    COMPLETION = "completion"


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
    search: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="Find the best of these values of a setting for --goal, such as spares=0,1%,2%,4%.",
        ),
    ] = None,
    goal: Annotated[
        SearchGoal | None,
        typer.Option(
            help="With --search: largest productive share of device time or ETTR, shortest wait or completion.",
            show_default=SearchGoal.PRODUCTIVE.value,
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
    if search is not None:
        from phalanx.app.simulation_search import search_setting

        if what or html is not None:
            raise UsageError("--search: not together with --what or --html")
        _print_search(search_setting(fleet, search, replay, seeds, goal or SearchGoal.PRODUCTIVE), as_json)
        return
    if goal is not None:
        raise UsageError("--goal: is of --search KEY=VALUE,VALUE,..., which is not given")
    from phalanx.app.simulate import simulate_variants
    from phalanx.app.simulation_page import render_simulation_html
    from phalanx.cli.report import PAGE_MARKERS, write_page
    from phalanx.cli.simulate_output import format_differences, format_variants, variants_to_json
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
    typer.echo("\n".join([*format_variants(variants), *format_differences(variants)]))


def _print_search(found: "SettingSearch", as_json: bool) -> None:
    from phalanx.cli.simulate_search_output import format_search, search_to_json

    typer.echo(json.dumps(search_to_json(found), indent=2) if as_json else "\n".join(format_search(found)))
