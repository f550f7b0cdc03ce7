"""`phalanx thermal guard`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.stderr import print_warning


def guard(
    nodes: Annotated[Path, typer.Argument(metavar="NODES", help="Nodes file with racks, and their sources.")],
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="BACKEND",
            help="Backend of nodes and jobs: local, slurm or kubernetes.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Act. Without it only what would be done is printed.")] = False,
    duration: Annotated[
        float | None, typer.Option("--for", min=1.0, max=1e9, metavar="SECONDS", help="End after this time.")
    ] = None,
) -> None:
    """Respond when cooling is lost, until Ctrl-C.

    Watch leaks, flow and temperature margins. Report a fault, drain its nodes, and have their jobs save and stop.
    """
    from phalanx.app.fleet_nodes import open_node_states
    from phalanx.app.thermal_guard import guard_cooling
    from phalanx.cli.thermal_output import format_response
    from phalanx.jobs.backends.nodes import open_node_backend

    open_backend = None if on is None else partial(open_node_backend, on)
    if not yes:
        typer.echo("dry run: nothing is drained or saved; --yes acts")
    with open_node_states() as states:
        for report in guard_cooling(nodes, open_backend, states, yes, duration):
            for problem in report.problems:
                print_warning(problem)
            for event in report.events:
                print(format_response(event), flush=True)
