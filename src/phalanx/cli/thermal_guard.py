"""`phalanx thermal guard` and `rehearse`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.stderr import print_warning
from phalanx.errors import ExitCode, UsageError


def guard(
    nodes: Annotated[Path, typer.Argument(metavar="NODES", help="Nodes file with racks, and their sources.")],
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="BACKEND",
            help="Backend of nodes and jobs: local, slurm or kubernetes. Slurm can power off nodes, too.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Act. Without it only what would be done is printed.")] = False,
    duration: Annotated[
        float | None, typer.Option("--for", min=1.0, max=1e9, metavar="SECONDS", help="End after this time.")
    ] = None,
) -> None:
    """Respond when cooling is lost, until Ctrl-C.

    Watch leaks, flow and temperature margins. In this order: report, drain the nodes, request isolation,
    have jobs save if seconds allow, power off.
    """
    from phalanx.app.fleet_nodes import open_node_states
    from phalanx.app.thermal_guard import guard_cooling
    from phalanx.cli.thermal_output import format_response
    from phalanx.jobs.backends.nodes import open_node_backend

    open_backend = None if on is None else partial(open_node_backend, on)
    if not yes:
        typer.echo("dry run: nothing is drained, saved or powered off; --yes acts")
    with open_node_states() as states:
        for report in guard_cooling(nodes, open_backend, states, yes, duration):
            for problem in report.problems:
                print_warning(problem)
            for event in report.events:
                print(format_response(event), flush=True)


def rehearse(
    nodes: Annotated[Path, typer.Argument(metavar="NODES", help="Nodes file with racks.")],
    fault: Annotated[str, typer.Option("--fault", metavar="NAME", help="What happens: no-flow or leak.")] = "no-flow",
    save: Annotated[
        float | None,
        typer.Option(
            "--save", min=0.1, max=1e6, metavar="SECONDS", help="What a save of the job takes; without a job."
        ),
    ] = None,
) -> int:
    """Simulate a fault at the first rack.

    Print what a guard does and when. Nothing is opened.

    Exit code 77: a device gets as hot as its limit before its power is off.
    """
    from phalanx.app.cooling_rehearsal import rehearse_response
    from phalanx.cli.thermal_output import format_rehearsal
    from phalanx.fleet.thermal.flow_loss import CoolingFault

    faults = {"no-flow": CoolingFault.NO_FLOW, "leak": CoolingFault.LEAK}
    if fault not in faults:
        raise UsageError(f"--fault {fault}: expected one of {', '.join(faults)}")
    found = rehearse_response(nodes, faults[fault], save)
    print("\n".join(format_rehearsal(found)))
    return int(ExitCode.UNFIT_NODE if max(found.peaks_c.values()) >= found.limit_c else ExitCode.DONE)
