"""`phalanx power`: budgets and power caps."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.options import print_warning
from phalanx.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from phalanx_fleet.power.control import PowerFleet, PowerReading
    from phalanx_fleet.power.links import NodeLinks

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


@app.command()
def plan(
    fleet: FleetArgument,
    jobs: JobsOption = None,
    targets: TargetsOption = None,
    fake: FakeOption = False,
    write_cluster: Annotated[
        Path | None,
        typer.Option(
            "--write-cluster",
            metavar="FILE",
            help="Write the nodes and the site's prices as a file for `phalanx plan --cluster`.",
        ),
    ] = None,
    node_type: Annotated[
        str | None, typer.Option("--node-type", metavar="TYPE", help="Type of the nodes for --write-cluster.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan caps that keep every level within its budget.

    Show budget, committed power, draw and headroom of each level, then caps and predicted slow-down of each job.
    Nothing is changed. A node that does not report is counted at its maximum.

    Exit code 77: a level cannot be brought within its budget.
    """
    from phalanx.cluster.load import save_cluster
    from phalanx_fleet.commands.power_output import format_levels, format_plan, list_level_rows, plan_to_json
    from phalanx_fleet.fleet_cluster import describe_cluster
    from phalanx_fleet.power.control import plan_caps

    if write_cluster is not None:
        save_cluster(describe_cluster(fleet, node_type), write_cluster)
    found, reading, links = _read(fleet, jobs, targets, fake)
    links.close()
    allocation = plan_caps(found, reading)
    if as_json:
        print(json.dumps(plan_to_json(found, reading, allocation), indent=2))
    else:
        for notice in reading.notices:
            print_warning(notice)
        lines = [*format_levels(list_level_rows(found, reading)), "", *format_plan(found, reading, allocation)]
        print("\n".join(lines))
    if not allocation.is_within:
        raise typer.Exit(int(ExitCode.UNFIT_NODE))


@app.command()
def guard(
    fleet: FleetArgument,
    jobs: JobsOption = None,
    targets: TargetsOption = None,
    duration: Annotated[
        float | None, typer.Option("--for", min=1.0, max=1e9, metavar="SECONDS", help="End after this time.")
    ] = None,
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="Write the caps of a plan and end: lower, read back, raise. Without --yes print the writes."
        ),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Write. Without it the guard refuses to start, except with --fake.")
    ] = False,
    take_over: TakeOverOption = False,
    fake: FakeOption = False,
) -> None:
    """Hold the budgets until Ctrl-C.

    Redistribute caps, answer load targets, renew leases.

    At the end every cap is lowered to the fallback, which fits all budgets.
    """
    import signal

    from phalanx_fleet.commands.power_output import format_status
    from phalanx_fleet.power import control

    if once and duration is not None:
        raise UsageError("--once, --for: give one of the two")
    if once:
        _write_once(fleet, jobs, targets, yes, take_over, fake)
        return
    if not (yes or fake):
        raise UsageError(f"a guard writes caps: `phalanx power plan {fleet}` shows them, --yes lets it write")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends leases like Ctrl-C
    found = control.load_power_fleet(fleet, jobs, targets)
    links = control.open_links(found, fake, is_read_only=False)
    try:
        audit = control.AuditLog(control.power_state_dir(found) / "audit.jsonl")
        held = control.open_guard(found, links, control.read_nodes(found, links), take_over)
        problems: list[str] = []
        for status in control.run_guard(found, held, audit, duration):
            problems, known = control.describe_problems(links.problems), problems
            for text in [*status.unsafe, *status.notices, *(each for each in problems if each not in known)]:
                print_warning(text)
            print(format_status(status), flush=True)
    finally:
        links.close()


@app.command()
def release(
    fleet: FleetArgument,
    nodes: Annotated[list[str] | None, typer.Argument(metavar="NODE...", help="Nodes; all without any.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Write. Without it the writes are printed only.")] = False,
    over_budget: Annotated[
        bool, typer.Option("--over-budget", help="Restore also where a budget does not bear it.")
    ] = False,
    take_over: TakeOverOption = False,
    fake: FakeOption = False,
) -> None:
    """Restore the power caps of before the first order.

    End the control of nodes.

    Also after a crash or a restart: nodes keep a record. A cap that another program has set stays. Exit code 77: a
    node was not released.
    """
    from phalanx_fleet.power.release_caps import plan_release, release_nodes

    found, reading, links = _read(fleet, None, None, fake, is_read_only=not yes)
    try:
        planned = plan_release(found, reading, nodes or [])
        for text in [*reading.notices, *planned.notes]:
            print_warning(text)
        print("\n".join(map(str, planned.writes)) or "no node has recorded caps: nothing to restore")
        for excess in planned.excesses:
            print_warning(f"{excess} after the release")
        if not yes:
            print("dry run: nothing was written; --yes writes")
            return
        if planned.excesses and not over_budget:
            raise UsageError("a release must not break a budget. Name fewer nodes, or add --over-budget")
        failures = [name for name in nodes or [] if name not in reading.reports]
        for done in release_nodes(found, links, reading, planned, take_over):
            for note in done.notes:
                print_warning(f"{done.node}: {note}")
            print(f"{done.node}: {done.failure or 'released'}")
            failures += [done.node] if done.failure else []
    finally:
        links.close()
    if failures:
        raise typer.Exit(int(ExitCode.UNFIT_NODE))


@app.command()
def sweep(
    fleet: FleetArgument,
    job: Annotated[
        str,
        typer.Argument(metavar="JOB|RUN", help="Job that trains a run, such as 7 or slurm:12, or the run's directory."),
    ],
    caps: Annotated[int, typer.Option("--caps", min=3, max=7, metavar="N", help="Caps to measure.")] = 5,
    measure: Annotated[
        float, typer.Option("--measure", min=1.0, max=600.0, metavar="SECONDS", help="Seconds to measure at each cap.")
    ] = 30.0,
    wait: Annotated[
        float, typer.Option("--wait", min=0.0, max=600.0, metavar="SECONDS", help="Least seconds before that.")
    ] = 10.0,
    yes: Annotated[bool, typer.Option("--yes", help="Write. Without it the caps are printed only.")] = False,
    take_over: TakeOverOption = False,
    fake: FakeOption = False,
) -> None:
    """Measure the speed of a running job at several caps.

    Store the curve with the run.

    From the highest cap that the budgets bear down to the lowest settable one, 40 to 60 s at each. The old caps come
    back at the end, on Ctrl-C, and when this command is killed.
    """
    import contextlib
    import signal

    from phalanx_fleet.commands.power_output import format_swept_cap
    from phalanx_fleet.power.speed_curve import PowerSweep, save_sweep
    from phalanx_fleet.power.sweep import SweepTimes, find_swept_run, plan_sweep, run_sweep

    training = find_swept_run(job)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # old caps come back like at Ctrl-C
    found, reading, links = _read(fleet, None, None, fake, is_read_only=not yes)
    try:
        planned = plan_sweep(found, reading, training, caps, take_over)
        for text in [*reading.notices, *planned.notes]:
            print_warning(text)
        for name, values in planned.caps_by_type.items():
            nodes = [node for node, of in planned.type_names.items() if of == name]
            print(f"{name}: {', '.join(f'{cap:.0f} W' for cap in values)} on {', '.join(nodes)}")
        if not yes:
            print("dry run: nothing was written; --yes sweeps")
            return
        measured = []
        times = SweepTimes(wait, wait + 20.0, measure, max(120.0, 2 * measure))
        with contextlib.closing(run_sweep(found, links, reading, planned, training, times)) as steps:
            for results in steps:
                print("\n".join(map(format_swept_cap, results)), flush=True)
                measured += results
    finally:
        links.close()
    stored = PowerSweep(tuple(measured))
    stored.fit_curves()
    print(f"wrote {save_sweep(training, stored)}")


@app.command()
def node(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="File of the helper.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Hold the devices. Without it nothing is written.")] = False,
    stdio: Annotated[
        bool, typer.Option("--stdio", help="Connect the standard streams to the helper of this machine, for ssh.")
    ] = False,
    socket: Annotated[Path | None, typer.Option("--socket", metavar="PATH", help="Its socket, for --stdio.")] = None,
) -> None:
    """Hold the devices of this node for guards, as root.

    The file says which users may order.

    Without --yes print the users that may order, the devices with their caps, and the writes of the start.
    """
    import signal

    from phalanx_fleet.power.node_helper import connect_streams, describe_helper, load_helper_file, run_helper
    from phalanx_fleet.power_settings import DEFAULT_SOCKET

    if stdio:
        connect_streams(socket or DEFAULT_SOCKET)
        return
    if file is None:
        raise UsageError("expected the file of the helper, such as /etc/phalanx/power-node.yaml, or --stdio")
    settings = load_helper_file(file)
    print("\n".join(describe_helper(settings)), flush=True)
    if not yes:
        print("dry run: nothing was written; --yes holds the devices")
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends leases
    run_helper(settings)


@app.command("keep-node", hidden=True)
def keep_node(fleet: FleetArgument) -> None:
    """Hold the devices of this machine for a guard at the other end of standard input."""
    from phalanx_fleet.power.node_helper import keep_own_node

    keep_own_node(fleet)


def _write_once(fleet: Path, jobs: Path | None, targets: Path | None, yes: bool, take_over: bool, fake: bool) -> None:
    from phalanx_fleet.commands.power_output import format_writes, list_writes
    from phalanx_fleet.power.control import AuditLog, apply_caps, open_guard, plan_caps, power_state_dir

    found, reading, links = _read(fleet, jobs, targets, fake, is_read_only=not yes)
    try:
        for notice in reading.notices:
            print_warning(notice)
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


def _read(
    fleet: Path, jobs: Path | None, targets: Path | None, fake: bool, is_read_only: bool = True
) -> "tuple[PowerFleet, PowerReading, NodeLinks]":
    from phalanx_fleet.power.control import load_power_fleet, open_links, read_nodes

    found = load_power_fleet(fleet, jobs, targets)
    links = open_links(found, fake, is_read_only)
    return found, read_nodes(found, links), links
