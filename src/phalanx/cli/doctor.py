"""`phalanx doctor`: check this machine, or compare the reports of several."""

import json
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.calibrate import find_locations, show_progress
from phalanx.cli.options import JsonOption
from phalanx.cluster.health import CheckContext, HealthFinding, HealthVerdict
from phalanx.cluster.health.compare_nodes import compare_nodes
from phalanx.cluster.health.runner import NodeHealthReport, choose_checks, parse_report
from phalanx.errors import ExitCode, UsageError
from phalanx.formatting import format_duration
from phalanx.recipe.locations import StorageLocation
from phalanx.run.cache import cache_root
from phalanx.storage.url import is_url
from phalanx.text_table import Column, format_table

PASSING_VERDICTS = (HealthVerdict.PASS, HealthVerdict.UNKNOWN)


def doctor(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE|FILE", help="Recipe and KEY=VALUE, to measure its storage; for --compare reports."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Skip the checks that measure: under 3 s.")] = False,
    only: Annotated[list[str] | None, typer.Option(metavar="CHECK", help="Run only this check (repeatable).")] = None,
    skip: Annotated[list[str] | None, typer.Option(metavar="CHECK", help="Skip this check (repeatable).")] = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="DIR|URL", help="Run, to check its disk.", show_default="runs/NAME with a recipe, else ."),
    ] = None,
    expect_gpus: Annotated[int | None, typer.Option(min=0, metavar="N", help="Number of GPUs expected.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Compare the reports of several nodes.")] = False,
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only problems.")] = False,
) -> int:
    """Check whether this machine is fit to train, and say why not.

    With a recipe it measures the paths and URLs that it names, too. Exit code 0: fit, possibly with warnings. 77: a
    check failed (FAIL) or did not complete (ERROR). --compare reads reports of several nodes, written with --json.
    """
    if compare:
        return print_comparison([Path(word) for word in words or []], as_json, quiet)
    if words and words[0].endswith((".json", ".jsonl")):
        raise UsageError(f"{words[0]}: reports need --compare; without it `phalanx doctor` checks this machine")
    run, locations = find_locations(words, run) if words else (run or "", [])
    run_dir = cache_root() if is_url(run) else Path(run).absolute()  # of a run at a URL the scratch is there
    if is_url(run) and not words:
        locations = [StorageLocation("run", run, is_written=True)]
    context = CheckContext(run_dir, expected_devices=expect_gpus, locations=tuple(locations))
    found = check_this_machine(context, quick, only or [], skip or [])
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    else:
        for line in format_report(found, quiet):
            typer.echo(line)
    return int(ExitCode.DONE if found.is_fit else ExitCode.UNFIT_NODE)


def check_this_machine(context: CheckContext, quick: bool, only: list[str], skip: list[str]) -> NodeHealthReport:
    """Run the chosen checks, with a progress bar."""
    from phalanx.cluster.health.runner import run_checks

    checks = choose_checks(only, skip, quick)
    names = [check.name for check in checks]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it cleans up like Ctrl-C
    with show_progress() as report_progress:
        return run_checks(context, checks, lambda name: report_progress(name, names.index(name) / len(names)))


def format_report(report: NodeHealthReport, quiet: bool) -> list[str]:
    """Format the report of a node: a line for each finding, and a conclusion. `quiet`: problems only."""
    shown = [each for each in report.findings if not (quiet and each.verdict in PASSING_VERDICTS)]
    check_width = max((len(each.check) for each in report.findings), default=0)
    columns = [Column(min_width=7), Column(min_width=check_width), Column()]
    lines = format_table(columns, ((each.verdict, each.check, each.reason) for each in shown))
    if quiet and report.is_fit:
        return lines
    return [
        *lines,
        *([] if quiet else [""]),
        f"{report.node}: {format_conclusion(report.findings)}, checked in {format_duration(report.duration_s)}",
    ]


def format_conclusion(findings: Sequence[HealthFinding]) -> str:
    """Say whether the node is fit, and count findings by verdict."""
    counts = Counter(each.verdict for each in findings)
    counts_text = ", ".join(f"{counts[verdict]} {verdict}" for verdict in reversed(HealthVerdict) if counts[verdict])
    fit = not any(each.verdict.is_unfit for each in findings)
    return f"{'fit to train' if fit else 'NOT FIT to train'} ({counts_text})"


def print_comparison(files: Sequence[Path], as_json: bool, quiet: bool) -> int:
    """Compare the reports of several nodes, print findings, and return the exit code."""
    reports = read_reports(files)
    comparison = compare_nodes(reports)
    combined = [replace(each, findings=(*each.findings, *comparison[each.node])) for each in reports]
    if as_json:
        typer.echo(json.dumps({"format": 1, "nodes": [each.as_json() for each in combined]}))
    else:
        for text in format_comparison(combined, quiet):
            typer.echo(text)
    return int(ExitCode.DONE if all(each.is_fit for each in combined) else ExitCode.UNFIT_NODE)


def format_comparison(reports: Sequence[NodeHealthReport], quiet: bool) -> Iterator[str]:
    """Format for each node the problems in its own report, and all comparisons."""
    rows = [
        (each.node, one.verdict, one.check, one.reason)
        for each in reports
        for one in each.findings
        if one.verdict not in PASSING_VERDICTS or (one.check.startswith("fleet/") and not quiet)
    ]
    yield from format_table([Column(), Column(min_width=7), Column(), Column()], rows)
    unfit = [each.node for each in reports if not each.is_fit]
    if unfit:
        yield f"{len(unfit)} of {len(reports)} nodes are NOT FIT to train: {', '.join(unfit)}"
    elif not quiet:
        yield f"all {len(reports)} nodes are fit to train"


def read_reports(files: Sequence[Path]) -> list[NodeHealthReport]:
    """Read reports, sorted by node; a file may hold several, one per line. Raises UsageError for other content."""
    found: dict[str, tuple[NodeHealthReport, Path]] = {}
    for path in files:
        for number, text in enumerate(path.read_text().splitlines(), 1):
            if not text.strip():
                continue
            try:
                one = parse_report(json.loads(text))
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(
                    f"{path}:{number}: expected a report of `phalanx doctor --json` on one line ({error})"
                ) from None
            if one.node in found:
                raise UsageError(f"{path}:{number}: node {one.node} is in {found[one.node][1]} already; give it once")
            found[one.node] = (one, path)
    if not found:
        raise UsageError("--compare needs the reports of two nodes or more: phalanx doctor --compare FILE...")
    return [found[node][0] for node in sorted(found)]
