"""Pages of nodes, power and cooling for `phalanx serve`, by the entry point `phalanx.pages`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.errors import UsageError

if TYPE_CHECKING:
    from phalanx_fleet.pages.fleet_pages import FleetPages


def make_pages(
    nodes: Annotated[
        Path | None, typer.Option("--nodes", metavar="FILE", help="Show the nodes of this file, not of the backend.")
    ] = None,
    fleet: Annotated[
        Path | None,
        typer.Option(
            "--fleet",
            metavar="FILE",
            envvar="PHALANX_FLEET",
            help="Show the power tree and cooling of this fleet file.",
        ),
    ] = None,
    targets: Annotated[
        Path | None,
        typer.Option("--targets", metavar="FILE", help="Load targets of the fleet; as for `phalanx power guard`."),
    ] = None,
    agent_port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="PHALANX_METRICS_PORT of the agents, to show nodes every second; 0: off."),
    ] = 0,
) -> "FleetPages":
    """Return the pages of a server. UsageError or RecipeError for what is wrong in the files."""
    from phalanx_fleet.pages.fleet_pages import FleetPageOptions, FleetPages

    if targets is not None and fleet is None:
        raise UsageError("--targets needs --fleet FILE, the levels that the targets are for")
    return FleetPages(FleetPageOptions(nodes, fleet, targets, agent_port))
