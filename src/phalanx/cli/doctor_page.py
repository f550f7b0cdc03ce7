"""The pages that `phalanx doctor` prints: one node, or several beside each other."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import typer

from phalanx.cluster.health import Finding, Verdict
from phalanx.cluster.health.examine import Report, report
from phalanx.cluster.health.fleet import compare
from phalanx.errors import ExitCode, UsageError
from phalanx.observe.units import duration

PASSED = (Verdict.OK, Verdict.UNKNOWN)


def examined(found: Report, quiet: bool) -> list[str]:
    """One node: a line for each finding, and what comes of all. `quiet`: only what is not right."""
    shown = [each for each in found.findings if not (quiet and each.verdict in PASSED)]
    width = max((len(each.check) for each in found.findings), default=0)
    lines = [line(each, width) for each in shown]
    if quiet and found.fit:
        return lines
    return [*lines, *([] if quiet else [""]), f"{found.node}: {conclusion(found.findings)}, {_took(found)}"]


def line(one: Finding, width: int) -> str:
    """Verdict, check and reason, in columns."""
    return f"{one.verdict:<7}  {one.check:<{width}}  {one.reason}"


def conclusion(findings: Sequence[Finding]) -> str:
    """Whether it is fit, and how many findings say what."""
    counts = [f"{number} {verdict}" for verdict in reversed(Verdict) if (number := _count(findings, verdict))]
    fit = not any(each.verdict.unfit for each in findings)
    return f"{'fit to train' if fit else 'NOT FIT to train'} ({', '.join(counts)})"


def _count(findings: Sequence[Finding], verdict: Verdict) -> int:
    return sum(each.verdict is verdict for each in findings)


def _took(found: Report) -> str:
    return f"checked in {duration(found.seconds)}"


def compared(files: Sequence[Path], as_json: bool, quiet: bool) -> int:
    """Print several nodes beside each other: what each said of itself, and what stands out. The exit code."""
    reports = read(files)
    beside = compare(reports)
    whole = [replace(each, findings=(*each.findings, *beside[each.node])) for each in reports]
    if as_json:
        typer.echo(json.dumps({"format": 1, "nodes": [each.as_json() for each in whole]}))
    else:
        for text in page(whole, quiet):
            typer.echo(text)
    return int(ExitCode.DONE if all(each.fit for each in whole) else ExitCode.UNFIT_NODE)


def page(whole: Sequence[Report], quiet: bool) -> Iterator[str]:
    """Each node: what is not right in its own report, and all that was compared."""
    wide = max(len(each.node) for each in whole)
    shown = [
        (each.node, one)
        for each in whole
        for one in each.findings
        if one.verdict not in PASSED or (one.check.startswith("fleet/") and not quiet)
    ]
    width = max((len(one.check) for _, one in shown), default=0)
    yield from (f"{node:<{wide}}  {line(one, width)}" for node, one in shown)
    unfit = [each.node for each in whole if not each.fit]
    if unfit:
        yield f"{len(unfit)} of {len(whole)} nodes are NOT FIT to train: {', '.join(unfit)}"
    elif not quiet:
        yield f"all {len(whole)} nodes are fit to train"


def read(files: Sequence[Path]) -> list[Report]:
    """The reports of these files, by node; a file may hold one a line. UsageError for what is none."""
    found: dict[str, tuple[Report, Path]] = {}
    for path in files:
        for number, text in enumerate(path.read_text().splitlines(), 1):
            if not text.strip():
                continue
            try:
                one = report(json.loads(text))
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
