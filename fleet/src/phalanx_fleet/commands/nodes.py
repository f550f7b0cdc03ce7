"""`phalanx nodes`: nodes and their accelerators, as tables and as JSON."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from phalanx import formatting
from phalanx.cli.options import print_warning
from phalanx.errors import ExitCode, UsageError
from phalanx.std_streams import escape_control_chars
from phalanx.text_table import format_table
from phalanx_fleet.node_table import (
    DEVICE_COLUMNS,
    NODE_COLUMNS,
    RACK_COLUMNS,
    format_celsius,
    format_device,
    format_node,
    format_rack,
    format_value,
    format_watts,
    make_columns,
)

if TYPE_CHECKING:
    from phalanx_fleet.fleet_node import FleetNode
    from phalanx_fleet.node_list import FleetReader, FleetSources, FleetView, NodeDetails, NodeReading

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
FleetOption = Annotated[
    Path | None, typer.Option(metavar="FILE", envvar="PHALANX_FLEET", help="Fleet file, for the site's state_dir.")
]
NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="Node, as shown by `phalanx nodes ls`.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
HISTORY_COLUMNS = make_columns("SINCE", "STATE", "ACTOR", "REASON")
PrintLinesFn = Callable[[list[str]], None]
WATCH_INTERVAL_S = 5.0


@app.command("ls")
def list_nodes(
    on: OnOption = None,
    nodes: NodesOption = None,
    runs: RunsOption = None,
    fleet: FleetOption = None,
    watch: Annotated[bool, typer.Option("--watch", help="List again every 5 s, until Ctrl-C.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List nodes.

    State, jobs, power, cap, temperature margin, age of the reading and reason.
    A reading older than 3 of its periods is shown as missing, with its age.
    """
    from phalanx_fleet.fleet_file import open_node_states
    from phalanx_fleet.node_list import FleetReader

    sources = _find_sources(on, nodes, runs)
    if watch and as_json:
        raise UsageError("--watch, --json: give one of the two")
    with open_node_states(fleet) as states, contextlib.closing(FleetReader(sources, states)) as reader:
        if watch:
            watch_nodes(reader)
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
def show(
    node: Annotated[
        str | None, typer.Argument(metavar="[NODE]", help="Node, as shown by `phalanx nodes ls`; else this machine.")
    ] = None,
    on: OnOption = None,
    nodes: NodesOption = None,
    runs: RunsOption = None,
    fleet: FleetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all readings as JSON.")] = False,
) -> None:
    """Show a node and its history.

    Of this machine, also power, heat, load and errors now.
    A value that cannot be read is shown as `-`, and is null in JSON.
    """
    from phalanx_fleet.fleet_file import open_node_states
    from phalanx_fleet.node_list import read_local_node, read_node_details

    sources, name = _find_sources(on, nodes, runs), node or os.uname().nodename
    with open_node_states(fleet) as states:
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
    repair: Annotated[bool, typer.Option("--repair", help="Also record that people work on it.")] = False,
    fleet: FleetOption = None,
) -> None:
    """Start no new job on a node. Jobs that run there continue.

    A node in repair gets no power caps, and counts at its maximum in `phalanx power`.
    """
    from phalanx.jobs.backends.base import open_node_backend
    from phalanx_fleet.audit_log import find_actor
    from phalanx_fleet.fleet_file import open_node_states
    from phalanx_fleet.node_list import drain_node

    with open_node_states(fleet) as states:
        before = drain_node(open_node_backend(on), states, node, reason, find_actor(), repair)
    jobs = f"; {', '.join(before.jobs)} still {'runs' if len(before.jobs) == 1 else 'run'} there" if before.jobs else ""
    typer.echo(f"{'in repair: ' if repair else 'drained '}{node}{jobs}")


@app.command()
def undrain(
    node: NodeArgument,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Why; kept in the history of the node.")
    ] = "taken back without a test",
    on: DrainOnOption = "local",
    fleet: FleetOption = None,
) -> None:
    """Take back a node that is drained, in repair or suspect.

    Jobs start there again.
    """
    from phalanx.jobs.backends.base import open_node_backend
    from phalanx_fleet.audit_log import find_actor
    from phalanx_fleet.fleet_file import open_node_states
    from phalanx_fleet.node_list import undrain_node

    with open_node_states(fleet) as states:
        undrain_node(open_node_backend(on), states, node, reason, find_actor())
    typer.echo(f"undrained {node}")


@app.command("test")
def check_fitness(
    node: Annotated[
        str | None,
        typer.Argument(metavar="[NODE]", help="Drained node, as shown by `phalanx nodes ls`; else this machine."),
    ] = None,
    on: DrainOnOption = "local",
    fleet: FleetOption = None,
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
    from phalanx.cli.doctor import check_this_machine, format_report, read_reports
    from phalanx.cluster.health import CheckContext
    from phalanx.jobs.backends.base import open_node_backend
    from phalanx_fleet.audit_log import find_actor
    from phalanx_fleet.fleet_file import open_node_states
    from phalanx_fleet.node_list import open_node_test, record_node_test

    name, backend = node or os.uname().nodename, open_node_backend(on)
    if report is None and name != os.uname().nodename:
        raise UsageError(
            f"{name}: the checks run on the node itself. Run `phalanx doctor --json > {name}.json` there, then "
            f"`phalanx nodes test {name} --on {on} --report {name}.json`"
        )
    with open_node_states(fleet) as states, open_node_test(backend, states, name, find_actor()) as found:
        result = (
            check_this_machine(CheckContext(Path().absolute()), quick, [], [])
            if report is None
            else read_reports([report])[0]
        )
        state = record_node_test(backend, states, found, result, find_actor())
    for line in format_report(result, quiet=True):
        typer.echo(line)
    typer.echo(f"{name} is {state}")
    return int(ExitCode.DONE if result.is_fit else ExitCode.UNFIT_NODE)


@app.command()
def agent() -> None:
    """Answer on PHALANX_METRICS_PORT with the readings of this node until Ctrl-C, also while no run does.

    While the agent of a run has the port, that agent keeps it.
    """
    import signal

    from phalanx_fleet.node_agent import record_node

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it closes the port like Ctrl-C
    record_node()


def _find_sources(on: str | None, nodes: Path | None, runs: Path | None) -> "FleetSources":
    from phalanx.jobs.backends.base import open_node_backend
    from phalanx_fleet.node_list import FleetSources

    name = on or (None if nodes is not None else "local")
    return FleetSources(None if name is None else open_node_backend(name), nodes, runs)


def format_fleet(view: "FleetView", now: float, width: int | None = None) -> list[str]:
    """Format nodes as a table, and racks as another. `now`: seconds since the epoch, for the age of readings."""
    lines = format_table(NODE_COLUMNS, (format_node(node, now) for node in view.nodes), width=width)
    if view.racks:
        lines += ["", *format_table(RACK_COLUMNS, map(format_rack, view.racks), width=width)]
    return lines


def fleet_to_json(view: "FleetView", now: float) -> dict[str, Any]:
    """All nodes as plain values. Values of a late reading are null."""
    return {
        "nodes": [_node_to_json(node, now) for node in view.nodes],
        "racks": [asdict(rack) for rack in view.racks],
        "problems": view.problems,
    }


def format_details(details: "NodeDetails", now: float) -> list[str]:
    lines = [] if details.here is None else [*_format_reading(details.here), ""]
    lines += format_table(NODE_COLUMNS, [format_node(details.node, now)])
    if details.history:
        rows = (
            (formatting.format_timestamp(each.time), each.state, each.actor, each.reason) for each in details.history
        )
        lines += ["", *format_table(HISTORY_COLUMNS, ([escape_control_chars(cell) for cell in row] for row in rows))]
    return lines


def details_to_json(details: "NodeDetails", now: float) -> dict[str, Any]:
    """All about a node as plain values."""
    return {
        **_node_to_json(details.node, now),
        **({} if details.here is None else _reading_to_json(details.here)),
        "history": [asdict(each) for each in details.history],
    }


def _node_to_json(node: "FleetNode", now: float) -> dict[str, Any]:
    backend, reading = node.backend, node.reading
    is_live = reading is not None and not reading.is_late(now)
    values = {} if reading is None else asdict(reading)
    shown = ("draw_w", "parts", "is_estimate", "device_draw_w", "device_cap_w", "margin_k", "slow_because")
    return {
        "node": node.name,
        "state": node.find_shown_state(now),
        "reason": node.reason,
        "backend_state": None if backend is None else backend.state,
        "num_gpus": None if backend is None else backend.num_gpus,
        "rack": node.rack,
        "cooling": node.cooling,
        "jobs": [] if backend is None else list(backend.jobs),
        "age_s": None if reading is None else now - reading.time,
        "is_late": not is_live,
        **{name: values.get(name) if is_live else None for name in shown},
    }


def _format_reading(reading: "NodeReading") -> list[str]:
    host = reading.sample.host
    estimate = " (estimate)" if host.cpu_power_is_estimate else ""
    memory = f"{format_value(host.memory_used_bytes, formatting.format_bytes)} of "
    facts = [
        f"CPU {format_value(host.cpu_power_w, format_watts)}{estimate}",
        f"{format_value(host.cpu_utilization, formatting.format_percent)} busy",
        f"{format_value(host.cpu_temperature_c, format_celsius)}",
        f"memory {memory}{format_value(host.memory_size_bytes, formatting.format_bytes)}",
    ]
    lines = [f"{reading.node}: {', '.join(fact for fact in facts if fact != '-')}"]
    if not reading.sample.devices:
        return [*lines, "no accelerators that can be read"]
    return [*lines, "", *format_table(DEVICE_COLUMNS, map(format_device, reading.sample.devices))]


def _reading_to_json(reading: "NodeReading") -> dict[str, Any]:
    from phalanx.telemetry.sample import SLOW_REASON_LABELS

    found = asdict(reading.sample)
    for device, sample in zip(found["devices"], reading.sample.devices, strict=True):
        reasons = sample.slow_reasons
        labels = None if reasons is None else [text for each, text in SLOW_REASON_LABELS.items() if each in reasons]
        device["slow_reasons"] = labels
    return found


def watch_nodes(
    reader: "FleetReader",
    interval_s: float = WATCH_INTERVAL_S,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> NoReturn:
    """Print the nodes every `interval_s` seconds, until Ctrl-C. When the backend fails later, the ages of the last
    readings grow.

    Raises UsageError where the first reading fails.
    """
    view = reader.read()
    with _open_display() as print_lines:
        while True:
            lines = [formatting.format_timestamp(now()), *format_fleet(view, now())]
            print_lines([*lines, *(f"warning: {escape_control_chars(problem)}" for problem in view.problems)])
            sleep(interval_s)
            try:
                view = reader.read()
            except UsageError as error:
                view.problems = [str(error)]


@contextmanager
def _open_display() -> Iterator[PrintLinesFn]:
    """A function that replaces the lines on a terminal, and adds them elsewhere."""
    if not sys.stdout.isatty():
        yield lambda lines: print("\n".join([*lines, ""]), flush=True)
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(), auto_refresh=False) as live:
        yield lambda lines: live.update(Text("\n".join(lines), no_wrap=True, overflow="crop"), refresh=True)
