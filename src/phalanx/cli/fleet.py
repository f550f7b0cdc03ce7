"""`phalanx fleet`: nodes and their accelerators."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.stderr import print_warning

if TYPE_CHECKING:
    from phalanx.app.fleet_nodes import FleetSources

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Show, drain and undrain nodes.")

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
    """Show, drain and undrain nodes."""


@app.command("ls")
def list_nodes(
    on: OnOption = None, nodes: NodesOption = None, runs: RunsOption = None, as_json: JsonOption = False
) -> None:
    """List nodes: state, jobs, power, cap, temperature margin, age of the reading and reason.

    A reading older than 3 of its periods is shown as missing, with its age.
    """
    from phalanx.app.fleet_nodes import FleetReader, open_node_states
    from phalanx.cli.fleet_output import fleet_to_json, format_fleet

    with open_node_states() as states:
        view = FleetReader(_find_sources(on, nodes, runs), states).read()
    now = time.time()
    if as_json:
        print(json.dumps(fleet_to_json(view, now), indent=2))
        return
    for problem in view.problems:
        print_warning(problem)
    print("\n".join(format_fleet(view.nodes, now)))


@app.command()
def show(as_json: Annotated[bool, typer.Option("--json", help="Print all readings as JSON.")] = False) -> None:
    """Show power, heat, load and errors of this machine and its accelerators now.

    A value that cannot be read is shown as `-`, and is null in JSON.
    """
    from phalanx.app.fleet import read_local_node
    from phalanx.cli.fleet_output import format_node, node_to_json

    reading = read_local_node()
    if as_json:
        print(json.dumps(node_to_json(reading), indent=2))
        return
    for problem in reading.problems:
        print_warning(problem)
    print("\n".join(format_node(reading)))


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
    """Take back a node that is drained or suspect: jobs start there again."""
    from phalanx.app.fleet_nodes import find_actor, open_node_states, undrain_node
    from phalanx.jobs.backends.nodes import open_node_backend

    with open_node_states() as states:
        undrain_node(open_node_backend(on), states, node, reason, find_actor())
    typer.echo(f"undrained {node}")


def _find_sources(on: str | None, nodes: Path | None, runs: Path | None) -> "FleetSources":
    from phalanx.app.fleet_nodes import FleetSources
    from phalanx.jobs.backends.nodes import open_node_backend

    name = on or (None if nodes is not None else "local")
    return FleetSources(None if name is None else open_node_backend(name), nodes, runs)
