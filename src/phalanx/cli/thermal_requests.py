"""`phalanx thermal request` and `withdraw`."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.errors import ExitCode


def request(
    nodes: Annotated[Path, typer.Argument(metavar="NODES", help="Nodes file with the list cdus.")],
    cdu: Annotated[str, typer.Argument(metavar="CDU", help="Id of the CDU.")],
    supply: Annotated[
        float, typer.Option("--supply", min=5.0, max=60.0, metavar="CELSIUS", help="Supply temperature to ask for.")
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Send it. Without it the writes are printed only.")] = False,
    duration: Annotated[
        float | None, typer.Option("--for", min=1.0, max=1e9, metavar="SECONDS", help="Withdraw after this time.")
    ] = None,
) -> int:
    """Ask a CDU's controller for a supply temperature.

    Until Ctrl-C; the controller decides. The request lapses when the heartbeat of this command stops. Exit code 77: it
    is refused, or was withdrawn.
    """
    from phalanx.app.thermal_requests import hold_request, make_session, open_request

    found = open_request(nodes, cdu, supply)
    try:
        session = make_session(found)
        held = found.state.set_point_c
        typer.echo(f"{cdu}: holds {'-' if held is None else f'{held:.1f} °C'}")
        if (refusal := session.find_refusal(found.state)) is not None:
            typer.echo(f"{cdu}: nothing is requested: {refusal}")
            return int(ExitCode.UNFIT_NODE)
        assert held is not None
        if not yes:
            print("\n".join(found.channel.describe_writes(session.find_next_c(held))))
            typer.echo("dry run: nothing was written; --yes asks for it")
            return int(ExitCode.DONE)
        status = None
        try:
            for status in hold_request(session, duration):
                asked = "-" if status.requested_c is None else f"{status.requested_c:.1f} °C"
                now = "-" if status.set_point_c is None else f"{status.set_point_c:.1f} °C"
                typer.echo(
                    f"{cdu}: asked for {asked}, holds {now}{'' if status.ended is None else f': {status.ended}'}"
                )
        except KeyboardInterrupt:
            typer.echo(f"{cdu}: withdrawn")
        return int(ExitCode.UNFIT_NODE if status is not None and status.ended is not None else ExitCode.DONE)
    finally:
        found.channel.close()


def withdraw(
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for the audit log.")] = "by an operator",
    end: Annotated[bool, typer.Option("--end", help="Allow requests again.")] = False,
) -> None:
    """Withdraw all requests within 10 s.

    New ones are refused until `--end`.
    """
    from phalanx.app.thermal_requests import set_withdrawal

    path = set_withdrawal(None if end else reason)
    typer.echo("requests are allowed" if end else f"requests are withdrawn ({path}); --end allows them again")
