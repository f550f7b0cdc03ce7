"""What `phalanx doctor` prints: the report of one node, or a comparison of several."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import typer

from phalanx.cluster.health import HealthFinding, HealthVerdict
from phalanx.cluster.health.compare_nodes import compare_nodes
from phalanx.cluster.health.runner import NodeHealthReport, parse_report
from phalanx.errors import ExitCode, UsageError
from phalanx.formatting import format_duration
from phalanx.text_table import Column, format_table

PASSING_VERDICTS = (HealthVerdict.PASS, HealthVerdict.UNKNOWN)


def format_report(report: NodeHealthReport, quiet: bool) -> list[str]:
    """Format the report of a node: a line for each finding, and a conclusion. `quiet`: problems only."""
    shown = [each for each in report.findings if not (quiet and each.verdict in PASSING_VERDICTS)]
    check_width = max((len(each.check) for each in report.findings), default=0)
    columns = [Column(min_width=7), Column(min_width=check_width), Column()]
    lines = format_table(columns, map(_to_cells, shown))
    if quiet and report.is_fit:
        return lines
    return [
        *lines,
        *([] if quiet else [""]),
        f"{report.node}: {format_conclusion(report.findings)}, {_format_duration(report)}",
    ]


def _to_cells(finding: HealthFinding) -> tuple[str, ...]:
    return finding.verdict, finding.check, finding.reason


def format_conclusion(findings: Sequence[HealthFinding]) -> str:
    """Say whether the node is fit, and count findings by verdict."""
    counts = [
        f"{number} {verdict}" for verdict in reversed(HealthVerdict) if (number := _count_verdict(findings, verdict))
    ]
    fit = not any(each.verdict.is_unfit for each in findings)
    return f"{'fit to train' if fit else 'NOT FIT to train'} ({', '.join(counts)})"


def _count_verdict(findings: Sequence[HealthFinding], verdict: HealthVerdict) -> int:
    return sum(each.verdict is verdict for each in findings)


def _format_duration(found: NodeHealthReport) -> str:
    return f"checked in {format_duration(found.duration_s)}"


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
        (each.node, *_to_cells(one))
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
