"""`phalanx power`: budgets and power caps."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.stderr import print_warning
from phalanx.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from phalanx.app.power import PowerFleet, PowerReading
    from phalanx.fleet.power.links import NodeLinks

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Hold the budgets of sites, feeds, rows and racks by power caps."
)

FleetArgument = Annotated[Path, typer.Argument(metavar="FLEET", help="Fleet file.")]
JobsOption = Annotated[
    Path | None, typer.Option("--jobs", metavar="FILE", help="Jobs file: nodes, priority and sweep of each job.")
]
TargetsOption = Annotated[
    Path | None, typer.Option("--targets", metavar="FILE", help="Load targets: lower budgets with start and end.")
]
FakeOption = Annotated[bool, typer.Option("--fake", help="Use a simulated fleet instead of devices.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TakeOverOption = Annotated[bool, typer.Option("--take-over", help="Take nodes over from another guard.")]


@app.callback()
def group() -> None:
    """Hold the budgets of sites, feeds, rows and racks by power caps."""


@app.command()
def show(
    fleet: FleetArgument, targets: TargetsOption = None, fake: FakeOption = False, as_json: JsonOption = False
) -> None:
    """Show budget, claim, draw and headroom of each level. Nothing is changed.

    A node that does not report is counted at its maximum.
    """
    from phalanx.cli.power_output import format_levels, level_rows

    found, reading, links = _read(fleet, None, targets, fake)
    links.close()
    rows = level_rows(found, reading)
    if as_json:
        print(json.dumps({"levels": [vars(row) for row in rows], "notices": reading.notices}, indent=2))
        return
    for notice in reading.notices:
        print_warning(notice)
    print("\n".join(format_levels(rows)))


@app.command()
def plan(
    fleet: FleetArgument,
    jobs: JobsOption = None,
    targets: TargetsOption = None,
    fake: FakeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Plan caps that keep every level within its budget; predict the slow-down of each job. Nothing is changed.

    Exit code 77: a level cannot be brought within its budget.
    """
    from phalanx.app.power import plan_caps
    from phalanx.cli.power_output import format_plan, plan_to_json

    found, reading, links = _read(fleet, jobs, targets, fake)
    links.close()
    allocation = plan_caps(found, reading)
    print(
        json.dumps(plan_to_json(found, reading, allocation), indent=2)
        if as_json
        else "\n".join(format_plan(found, reading, allocation))
    )
    if not allocation.is_within:
        raise typer.Exit(int(ExitCode.UNFIT_NODE))


@app.command()
def apply(
    fleet: FleetArgument,
    jobs: JobsOption = None,
    targets: TargetsOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Write. Without it the writes are printed only.")] = False,
    take_over: TakeOverOption = False,
    fake: FakeOption = False,
) -> None:
    """Print the writes of a plan, in order; with --yes lower, read back, then raise.

    Caps above the fallback are leases: they end with this command. `phalanx power guard` keeps them.
    """
    from phalanx.app.power import AuditLog, apply_caps, open_guard, plan_caps, power_state_dir
    from phalanx.cli.power_output import format_writes, list_writes

    found, reading, links = _read(fleet, jobs, targets, fake, is_read_only=not yes)
    try:
        if not yes:
            print("\n".join(format_writes(found, list_writes(found, reading, plan_caps(found, reading)))))
            print("dry run: nothing was written; --yes writes")
            return
        guard = open_guard(found, links, reading, take_over)
        for status in apply_caps(found, guard, AuditLog(power_state_dir(found) / "audit.jsonl")):
            for text in [*status.unsafe, *status.notices]:
                print_warning(text)
            if status.writes:
                print("\n".join(format_writes(found, status.writes)))
    finally:
        links.close()


@app.command()
def guard(
    fleet: FleetArgument,
    jobs: JobsOption = None,
    targets: TargetsOption = None,
    duration: Annotated[
        float | None, typer.Option("--for", min=1.0, max=1e9, metavar="SECONDS", help="End after this time.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Write. Without it the guard refuses to start.")] = False,
    take_over: TakeOverOption = False,
    fake: FakeOption = False,
) -> None:
    """Hold the budgets until Ctrl-C: redistribute caps, answer load targets, renew leases.

    At the end every cap is lowered to the fallback, which fits all budgets.
    """
    from phalanx.app.power import load_power_fleet, open_links
    from phalanx.app.power_guard import hold_budgets
    from phalanx.cli.power_output import format_status
    from phalanx.fleet.power.guard import LostNodeError

    if not (yes or fake):
        raise UsageError(f"a guard writes caps: `phalanx power plan {fleet}` shows them, --yes lets it write")
    found = load_power_fleet(fleet, jobs, targets)
    links = open_links(found, fake, is_read_only=False)
    try:
        for status in hold_budgets(found, links, take_over, duration):
            for text in [*status.unsafe, *status.notices]:
                print_warning(text)
            print(format_status(status), flush=True)
    except LostNodeError as error:
        raise UsageError(str(error)) from None
    finally:
        links.close()


def _read(
    fleet: Path, jobs: Path | None, targets: Path | None, fake: bool, is_read_only: bool = True
) -> "tuple[PowerFleet, PowerReading, NodeLinks]":
    from phalanx.app.power import load_power_fleet, open_links, read_nodes

    found = load_power_fleet(fleet, jobs, targets)
    links = open_links(found, fake, is_read_only)
    return found, read_nodes(found, links), links
