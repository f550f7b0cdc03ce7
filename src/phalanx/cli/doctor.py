"""`phalanx doctor`: check this machine, or compare the reports of several."""

import json
import os
import platform
import queue
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from phalanx.cluster.health.runner import NodeHealthReport


def doctor(
    reports: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE", help="Reports of nodes, for --compare.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Skip the checks that measure: under 3 s.")] = False,
    only: Annotated[list[str] | None, typer.Option(metavar="CHECK", help="Run only this check (repeatable).")] = None,
    skip: Annotated[list[str] | None, typer.Option(metavar="CHECK", help="Skip this check (repeatable).")] = None,
    run: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Run directory, to check its disk: up to 128 MB are written and removed. It need not exist yet.",
        ),
    ] = Path(),
    expect_gpus: Annotated[
        int | None,
        typer.Option(
            "--expect-gpus",
            min=0,
            max=10_000,
            metavar="N",
            help="Number of GPUs expected.",
            show_default="as calibrated",
        ),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Compare the reports of several nodes.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the report to DIR/NODE.json, too. DIR must exist.")
    ] = None,
    serve: Annotated[
        int | None,
        typer.Option(
            "--serve", min=1, max=65535, metavar="PORT", help="Let other nodes measure the link to this node."
        ),
    ] = None,
    connect: Annotated[
        list[str] | None,
        typer.Option("--connect", metavar="HOST:PORT", help="Measure the link to a node that runs --serve."),
    ] = None,
    network: Annotated[bool, typer.Option("--network", help="Measure the links between all nodes of a job.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one line of JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only problems.")] = False,
) -> int:
    """Check whether this machine is fit to train, and say why not.

    Exit code 0: fit, possibly with warnings. 77: a check failed (FAIL) or did not complete (ERROR). --compare reads
    reports of several nodes, written with --json or --out.
    """
    from phalanx.cli.doctor_output import format_report, print_comparison

    if compare:
        return print_comparison(reports or [], as_json, quiet)
    if serve is not None:
        return serve_link_tests(serve)
    if reports:
        raise UsageError(f"{reports[0]}: reports need --compare; without it `phalanx doctor` checks this machine")
    if out is not None and not out.is_dir():
        raise UsageError(f"--out {out}: no such directory")
    if network or connect:
        found = measure_links(connect or [])
    else:
        found = check_this_machine(run, expect_gpus, quick, only or [], skip or [])
    if out is not None:
        write_report(found.as_json(), out / f"{make_file_name(found.node)}.json")
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    else:
        for line in format_report(found, quiet):
            typer.echo(line)
    return int(ExitCode.DONE if found.is_fit else ExitCode.UNFIT_NODE)


def check_this_machine(
    run: Path, expect_gpus: int | None, quick: bool, only: list[str], skip: list[str]
) -> "NodeHealthReport":
    """Run the chosen checks, with a progress bar."""
    from phalanx.cli.calibrate import show_progress
    from phalanx.cluster.health import CheckContext
    from phalanx.cluster.health.registry import choose_checks
    from phalanx.cluster.health.runner import run_checks

    checks = choose_checks(only, skip, quick)
    names = [check.name for check in checks]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it cleans up like Ctrl-C
    with show_progress() as report_progress:
        site = CheckContext(run.absolute(), expected_devices=expect_gpus, is_quick=quick)
        return run_checks(site, checks, lambda name: report_progress(name, names.index(name) / len(names)))


def measure_links(addresses: list[str]) -> "NodeHealthReport":
    """Measure links to these addresses; without addresses, between all nodes of this process's job."""
    from phalanx.cluster.health.link_bandwidth import check_link
    from phalanx.cluster.health.pairwise_bandwidth import measure_all_pairs, placement_from_environment
    from phalanx.cluster.health.runner import NodeHealthReport
    from phalanx.run.authentication import load_token

    started_at = time.monotonic()
    if addresses:
        token = load_token(os.environ)
        findings = [check_link(where, token) for where in addresses]
    else:
        findings = measure_all_pairs(placement_from_environment(os.environ), _ignore_sigterm)
    return NodeHealthReport(platform.node(), time.time(), time.monotonic() - started_at, tuple(findings))


def _ignore_sigterm() -> None:
    """Ignore SIGTERM: a backend sends it when another node exits as unfit, and this one must exit with its own code."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def serve_link_tests(port: int) -> int:
    """Serve link measurements one after another, until Ctrl-C or SIGTERM."""
    from phalanx.cluster.health.link_bandwidth import Connection, accept_connections, serve_measurement
    from phalanx.run.authentication import load_token
    from phalanx.run.listener import open_listener

    token = load_token(os.environ)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        listener = open_listener("", port, 64)
    except OSError as error:
        raise UsageError(f"--serve {port}: {error.strerror}; choose another port") from None
    requests: queue.SimpleQueue[Connection] = queue.SimpleQueue()
    with accept_connections(listener, token, requests.put):
        typer.echo(f"listening on port {port}; press Ctrl-C to stop", err=True)
        try:
            while True:
                sock, what = requests.get()
                with sock:
                    caller = "a disconnected node"
                    try:
                        caller = sock.getpeername()[0]
                        serve_measurement(sock, what)
                    except OSError as error:
                        typer.echo(f"{caller}: {error}", err=True)
        except KeyboardInterrupt:
            return int(ExitCode.DONE)


def write_report(value: dict[str, Any], path: Path) -> None:
    """Write a report atomically."""
    draft = path.with_name(f".{path.name}.{platform.node()}.tmp")
    draft.write_text(json.dumps(value) + "\n")
    draft.replace(path)


def make_file_name(node: str) -> str:
    """Turn a node's name into a file name."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", node) or "node"
