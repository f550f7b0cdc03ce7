"""`phalanx thermal`: thermal models, nodes that run hot, lost cooling, as tables and as JSON."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.options import print_warning
from phalanx.errors import ExitCode, UsageError
from phalanx.std_streams import escape_control_chars
from phalanx.text_table import format_table
from phalanx_fleet.commands.nodes import FleetOption
from phalanx_fleet.node_table import make_columns

if TYPE_CHECKING:
    from phalanx_fleet.thermal.device_series import DeviceSeries
    from phalanx_fleet.thermal.fit import ThermalModelFile
    from phalanx_fleet.thermal.guard import ResponseEvent
    from phalanx_fleet.thermal.heat_check import DeviceHeat, HeatCheck

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Find nodes that run hot; guard cooling.")

SourcesArgument = Annotated[
    list[Path], typer.Argument(metavar="SOURCE...", help="CSV files, run directories, or folders of runs.")
]
KindOption = Annotated[
    str | None,
    typer.Option(
        "--kind",
        metavar="NAME",
        help="Kind of all devices: the same accelerator in the same server.",
        show_default="column kind; accelerator of the run's cluster",
    ),
]
ColumnOption = Annotated[
    list[str] | None,
    typer.Option("--column", metavar="NAME=COLUMN", help="Column of the CSV files for a value (repeatable)."),
]
FromOption = Annotated[
    str | None, typer.Option("--from", metavar="TIME", help="Only samples from this time on (ISO 8601, UTC).")
]
UntilOption = Annotated[str | None, typer.Option("--until", metavar="TIME", help="Only samples before this time.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
MODEL_NUMBERS = ("DEVICES", "SAMPLES", "T0", "R", "ERROR")
MODEL_COLUMNS = make_columns("KIND", *MODEL_NUMBERS, numbers=MODEL_NUMBERS)
CHECK_NUMBERS = ("HOTTEST", "AT", "VS KIND", "VS PAST", "R RATIO")
CHECK_COLUMNS = make_columns("NODE", "DEVICE", "KIND", *CHECK_NUMBERS, "FINDING", numbers=CHECK_NUMBERS)


@app.command()
def fit(
    sources: SourcesArgument,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Thermal model file to write.")] = Path(
        "thermal.yaml"
    ),
    kind: KindOption = None,
    column: ColumnOption = None,
    begin: FromOption = None,
    until: UntilOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fit thermal constants of each kind of device.

    T0 and resistance, from hours, or from minutes where there are less than 3 days.
    """
    from phalanx.run.directory import check_output_path
    from phalanx_fleet.thermal.fit import fit_thermal_model, save_thermal_model

    check_output_path("--out", out, ["# Thermal constants by kind of device"])
    model, problems = fit_thermal_model(_read(sources, column, kind, begin, until))
    save_thermal_model(model, out)
    if as_json:
        print(json.dumps({**model.model_dump(mode="json"), "problems": problems}, indent=2))
        return
    for problem in problems:
        print_warning(problem)
    print("\n".join(format_model(model)))
    typer.echo(f"wrote {out}")


@app.command()
def check(
    sources: SourcesArgument,
    model: Annotated[
        Path, typer.Option("--model", metavar="FILE", help="Thermal model file, by `phalanx thermal fit`.")
    ] = Path("thermal.yaml"),
    days: Annotated[
        float, typer.Option("--days", min=0.01, max=366.0, help="Newest days of each device that are checked.")
    ] = 7.0,
    kind: KindOption = None,
    column: ColumnOption = None,
    begin: FromOption = None,
    until: UntilOption = None,
    as_json: JsonOption = False,
) -> int:
    """Find devices that throttle or run hot, and why.

    A dead fan, fouling, a dry plate or a warm inlet.

    The newest days are compared with the kind of the device, and with the 28 days before. Exit code 77: a finding.
    """
    from phalanx_fleet.thermal.device_models import check_thermal

    found = check_thermal(_read(sources, column, kind, begin, until), model, days * 86_400.0)
    if as_json:
        print(json.dumps(check_to_json(found), indent=2))
    else:
        for problem in found.problems:
            print_warning(problem)
        print("\n".join(format_check(found)))
    return int(ExitCode.UNFIT_NODE if found.findings else ExitCode.DONE)


def _parse_columns(column: list[str] | None) -> dict[str, str]:
    columns = {}
    for text in column or []:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise UsageError(f"--column {text}: expected NAME=COLUMN, such as power_w=power_mean_w")
        columns[name] = value
    return columns


def _read(
    sources: list[Path], column: list[str] | None, kind: str | None, begin: str | None, until: str | None
) -> "list[DeviceSeries]":
    from phalanx_fleet.thermal.device_models import read_device_series

    return read_device_series(
        sources, _parse_columns(column), kind, _parse_time("--from", begin), _parse_time("--until", until)
    )


def _parse_time(option: str, text: str | None) -> float | None:
    from phalanx_fleet.csv_table import parse_time

    if text is None:
        return None
    try:
        return parse_time(text)
    except ValueError:
        raise UsageError(f"{option} {text}: expected a time such as 2026-11-01T08:00, or seconds") from None


def format_model(model: "ThermalModelFile") -> list[str]:
    """A row by kind."""
    rows = [
        [
            name,
            str(kind.num_devices),
            str(kind.num_samples),
            f"{kind.t0_c:.1f} °C" if kind.t0_over_inlet_k is None else f"inlet {kind.t0_over_inlet_k:+.1f} K",
            f"{kind.r_k_per_w:.3g} K/W",
            f"{kind.rmse_k:.1f} K",
        ]
        for name, kind in model.kinds.items()
    ]
    return format_table(MODEL_COLUMNS, rows)


def format_check(check: "HeatCheck") -> list[str]:
    """A row by device, then what to do about each finding."""
    causes = {(each.node, each.device): each.cause.value for each in check.findings}
    rows = [
        [
            each.node,
            each.device,
            each.kind,
            f"{each.temperature_c:.0f} °C",
            f"{each.power_w:.0f} W",
            _format_kelvins(each.excess_k),
            _format_kelvins(each.change_k),
            "-" if each.r_ratio is None else f"{each.r_ratio:.2f}",
            causes.get((each.node, each.device), "-"),
        ]
        for each in check.devices
    ]
    return [*format_table(CHECK_COLUMNS, rows), "", *_list_findings(check)]


def check_to_json(check: "HeatCheck") -> dict[str, Any]:
    """Devices, findings and problems in base units; null for what is missing."""
    return {
        "devices": [_device_to_json(each) for each in check.devices],
        "findings": [{**asdict(each), "advice": each.advice} for each in check.findings],
        "problems": check.problems,
    }


def format_response(event: "ResponseEvent") -> str:
    """A line for an action: when, what, on what, and whether it worked."""
    time_text = time.strftime("%H:%M:%S")
    would = "" if event.is_done else "would "
    problem = f": FAILED: {event.problem}" if event.problem else ""
    return escape_control_chars(f"{time_text}  {would}{event.action}: {event.target}: {event.text}{problem}")


def _device_to_json(device: "DeviceHeat") -> dict[str, Any]:
    """Values of the device, with those of its plateau by names of their own."""
    values = {name: value for name, value in asdict(device).items() if name not in ("plateau", "is_sudden")}
    plateau = device.plateau
    values["plateau_temperature_c"] = None if plateau is None else plateau.temperature_c
    values["plateau_power_w"] = None if plateau is None else plateau.power_w
    return values


def _list_findings(check: "HeatCheck") -> Iterator[str]:
    for each in check.findings:
        yield f"{each.node} {each.device}: {each.text}"
        yield f"  {each.cause.value}: {each.advice}"
    if not check.findings:
        yield "No device runs hot."


def _format_kelvins(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1f} K"


@app.command()
def guard(
    nodes: Annotated[Path, typer.Argument(metavar="NODES", help="Nodes file with racks, and their sources.")],
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="BACKEND", help="Backend of nodes and jobs: local, slurm or kubernetes."),
    ] = None,
    fleet: FleetOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Act. Without it only what would be done is printed.")] = False,
    duration: Annotated[
        float | None, typer.Option("--for", min=1.0, max=1e9, metavar="SECONDS", help="End after this time.")
    ] = None,
) -> None:
    """Respond when cooling is lost, until Ctrl-C.

    Watch leaks, flow and temperature margins. Report a fault, drain its nodes, and have their jobs save and stop.
    """
    from phalanx.jobs.backends.base import open_node_backend
    from phalanx_fleet.fleet_file import open_node_states
    from phalanx_fleet.thermal.guard import guard_cooling

    open_backend = None if on is None else partial(open_node_backend, on)
    if not yes:
        typer.echo("dry run: nothing is drained or saved; --yes acts")
    with open_node_states(fleet) as states:
        for report in guard_cooling(nodes, open_backend, states, yes, duration):
            for problem in report.problems:
                print_warning(problem)
            for event in report.events:
                print(format_response(event), flush=True)
