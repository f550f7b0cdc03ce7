"""`phalanx fleet`: nodes and their accelerators."""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.stderr import print_warning
from phalanx.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from phalanx.app.fleet_nodes import FleetSources

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Show, drain, test and undrain nodes.")

OnOption = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="BACKEND",
        help="Backend that has the nodes: local, slurm, kubernetes or ray.",
        show_default="local; with --nodes none",
    ),
]
DrainOnOption = Annotated[
    str, typer.Option("--on", metavar="BACKEND", help="Backend that has the node: local, slurm or kubernetes.")
]
NodesOption = Annotated[
    Path | None, typer.Option("--nodes", metavar="FILE", help="Nodes file: more nodes, and sources of readings.")
]
RunsOption = Annotated[
    Path | None,
    typer.Option(
        "--runs",
        metavar="DIR",
        help="Read telemetry from this run, or from the runs in this directory.",
        show_default="runs of the backend's jobs",
    ),
]
NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="Node, as shown by `phalanx fleet ls`.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def group() -> None:
    """Show, drain, test and undrain nodes."""


@app.command("ls")
def list_nodes(
    on: OnOption = None, nodes: NodesOption = None, runs: RunsOption = None, as_json: JsonOption = False
) -> None:
    """List nodes.

    State, jobs, power, cap, temperature margin, age of the reading and reason.
    A reading older than 3 of its periods is shown as missing, with its age.
    """
    from phalanx.app.fleet_nodes import FleetReader, open_node_states
    from phalanx.cli.fleet_output import fleet_to_json, format_fleet

    sources = _find_sources(on, nodes, runs)
    with open_node_states() as states, contextlib.closing(FleetReader(sources, states)) as reader:
        view = reader.read()
    now = time.time()
    if as_json:
        print(json.dumps(fleet_to_json(view, now), indent=2))
        return
    for problem in view.problems:
        print_warning(problem)
    for change in view.new_suspects:
        print_warning(f"{change.node} is suspect from now on: {change.reason}")
    print("\n".join(format_fleet(view, now)))


@app.command()
def watch(
    on: OnOption = None,
    nodes: NodesOption = None,
    runs: RunsOption = None,
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, max=3600.0, metavar="SECONDS", help="Seconds between two readings.")
    ] = 5.0,
) -> None:
    """List nodes again and again, until Ctrl-C. On a terminal the table is redrawn in place."""
    from phalanx.app.fleet_nodes import FleetReader, open_node_states
    from phalanx.cli.fleet_watch import watch_fleet

    sources = _find_sources(on, nodes, runs)
    with open_node_states() as states, contextlib.closing(FleetReader(sources, states)) as reader:
        watch_fleet(reader, interval)


@app.command()
def show(
    node: Annotated[
        str | None, typer.Argument(metavar="[NODE]", help="Node, as shown by `phalanx fleet ls`; else this machine.")
    ] = None,
    on: OnOption = None,
    nodes: NodesOption = None,
    runs: RunsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all readings as JSON.")] = False,
) -> None:
    """Show a node and its history.

    Of this machine, also power, heat, load and errors now and in the last 24 hours.
    A value that cannot be read is shown as `-`, and is null in JSON.
    """
    from phalanx.app.fleet import read_local_node
    from phalanx.app.fleet_nodes import open_node_states, read_node_details
    from phalanx.cli.fleet_output import details_to_json, format_details

    sources, name = _find_sources(on, nodes, runs), node or os.uname().nodename
    with open_node_states() as states:
        details, problems = read_node_details(sources, states, name, read_local_node)
    now = time.time()
    if as_json:
        print(json.dumps({**details_to_json(details, now), "problems": problems}, indent=2))
        return
    for problem in problems:
        print_warning(problem)
    print("\n".join(format_details(details, now)))


@app.command()
def drain(
    node: NodeArgument,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; kept in the history of the node.")],
    on: DrainOnOption = "local",
) -> None:
    """Start no new job on a node. Jobs that run there continue."""
    from phalanx.app.fleet_nodes import drain_node, find_actor, open_node_states
    from phalanx.jobs.backends.nodes import open_node_backend

    with open_node_states() as states:
        before = drain_node(open_node_backend(on), states, node, reason, find_actor())
    jobs = f"; {', '.join(before.jobs)} still {'runs' if len(before.jobs) == 1 else 'run'} there" if before.jobs else ""
    typer.echo(f"drained {node}{jobs}")


@app.command()
def undrain(
    node: NodeArgument,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Why; kept in the history of the node.")
    ] = "taken back without a test",
    on: DrainOnOption = "local",
) -> None:
    """Take back a node that is drained or suspect.

    Jobs start there again.
    """
    from phalanx.app.fleet_nodes import find_actor, open_node_states, undrain_node
    from phalanx.jobs.backends.nodes import open_node_backend

    with open_node_states() as states:
        undrain_node(open_node_backend(on), states, node, reason, find_actor())
    typer.echo(f"undrained {node}")


@app.command("test")
def check_fitness(
    node: Annotated[
        str | None,
        typer.Argument(metavar="[NODE]", help="Drained node, as shown by `phalanx fleet ls`; else this machine."),
    ] = None,
    on: DrainOnOption = "local",
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", metavar="FILE", help="Report of the node by `phalanx doctor --json`, instead of a test here."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Skip the checks that measure: under 3 s.")] = False,
) -> int:
    """Test a drained node, and undrain it if it is fit.

    The checks are those of `phalanx doctor`.
    The checks run on the node itself: for another machine give its report. Exit code 0: fit. 77: a check failed, and
    the node stays drained.
    """
    from phalanx.app.fleet_nodes import find_actor, open_node_states
    from phalanx.app.node_fitness import open_node_test, record_node_test
    from phalanx.cli.doctor import check_this_machine
    from phalanx.cli.doctor_output import format_report, read_reports
    from phalanx.jobs.backends.nodes import open_node_backend

    name, backend = node or os.uname().nodename, open_node_backend(on)
    if report is None and name != os.uname().nodename:
        raise UsageError(
            f"{name}: the checks run on the node itself. Run `phalanx doctor --json > {name}.json` there, then "
            f"`phalanx fleet test {name} --on {on} --report {name}.json`"
        )
    with open_node_states() as states, open_node_test(backend, states, name, find_actor()) as found:
        result = check_this_machine(Path(), None, quick, [], []) if report is None else read_reports([report])[0]
        state = record_node_test(backend, states, found, result, find_actor())
    for line in format_report(result, quiet=True):
        typer.echo(line)
    typer.echo(f"{name} is {state}")
    return int(ExitCode.DONE if result.is_fit else ExitCode.UNFIT_NODE)


def _find_sources(on: str | None, nodes: Path | None, runs: Path | None) -> "FleetSources":
    from phalanx.app.fleet_nodes import FleetSources
    from phalanx.jobs.backends.nodes import open_node_backend

    name = on or (None if nodes is not None else "local")
    return FleetSources(None if name is None else open_node_backend(name), nodes, runs)
