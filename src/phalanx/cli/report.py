"""`phalanx report` and `phalanx compare`: report runs as text, HTML or JSON."""

import json
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.options import JsonOption, RunArgument
from phalanx.errors import UsageError
from phalanx.run import Run
from phalanx.run.directory import check_output_path, write_output

PAGE_MARKERS = ('content="phalanx"', "<footer>Phalanx ")
"""Each page that these commands write contains one of these."""


def report(
    run: RunArgument,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a self-contained HTML page with plots.")
    ] = None,
    as_json: JsonOption = False,
    to: Annotated[
        str | None,
        typer.Option(metavar="TRACKER", help="Send the run to tensorboard, wandb, mlflow or trackio; report nothing."),
    ] = None,
) -> None:
    """Report loss, speed, where the time went, restarts and recommendations of a run."""
    from phalanx.observe.history import read_history
    from phalanx.observe.html_report.report import render_report_html
    from phalanx.observe.recommendations import find_recommendations
    from phalanx.observe.summary import build_summary
    from phalanx.observe.text_report import render_report_text

    run_dir = Run.open_existing(run)
    if to is not None:
        from phalanx.app.trackers import send_run

        if html is not None or as_json:
            raise UsageError("--to sends the run to a tracker and reports nothing; leave out --html and --json")
        typer.echo(send_run(run_dir, to))
        return
    if html is not None:
        check_output_path("--html", html, PAGE_MARKERS)
    history = read_history(run_dir.events)
    summary = build_summary(run_dir, history)
    recommendations = find_recommendations(summary, history)
    if html is not None:
        write_page(html, render_report_html(summary, history, recommendations))
    if as_json:
        facts = {**summary.to_json(), "recommendations": [each.to_json() for each in recommendations]}
        typer.echo(json.dumps(facts, indent=2))
    elif html is not None:
        typer.echo(f"wrote {html}")
    else:
        typer.echo(render_report_text(summary, recommendations), nl=False)


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN ...", help="Two or more run directories, or URLs.")],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an HTML page with overlaid loss curves.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare runs: differences of their recipes, loss and speed."""
    from phalanx.observe.compare import compare_runs, render_comparison_html, render_comparison_text

    if html is not None:
        check_output_path("--html", html, PAGE_MARKERS)
    comparison = compare_runs([Run.open_existing(path) for path in runs])
    if html is not None:
        write_page(html, render_comparison_html(comparison))
    if as_json:
        typer.echo(json.dumps(comparison.to_json(), indent=2))
    elif html is not None:
        typer.echo(f"wrote {html}")
    else:
        typer.echo(render_comparison_text(comparison), nl=False)


def write_page(path: Path, text: str) -> None:
    """Write a page. UsageError where that cannot be done."""
    try:
        write_output(path, text)
    except OSError as error:
        raise UsageError(f"{path}: cannot write the page there ({error.strerror})") from None
