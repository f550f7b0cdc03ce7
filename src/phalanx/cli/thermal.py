"""`phalanx thermal`: thermal models, nodes that run hot, lost cooling."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli import thermal_guard
from phalanx.cli.stderr import print_warning
from phalanx.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from phalanx.fleet.thermal.device_series import DeviceSeries

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


@app.callback()
def group() -> None:
    """Find nodes that run hot; guard cooling."""


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

    T0, resistance, and time constants where samples are frequent.

    Steady heat is read from hours, or from minutes where there are less than 3 days. A step response needs samples
    every 10 seconds or less.
    """
    from phalanx.app.thermal import fit_thermal
    from phalanx.cli.thermal_output import format_model
    from phalanx.run.directory import check_output_path

    check_output_path("--out", out, ["# Thermal constants by kind of device"])
    model, problems = fit_thermal(_read(sources, column, kind, begin, until), out)
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
    from phalanx.app.thermal import check_thermal
    from phalanx.cli.thermal_output import check_to_json, format_check

    found = check_thermal(_read(sources, column, kind, begin, until), model, days * 86_400.0)
    if as_json:
        print(json.dumps(check_to_json(found), indent=2))
    else:
        for problem in found.problems:
            print_warning(problem)
        print("\n".join(format_check(found)))
    return int(ExitCode.UNFIT_NODE if found.findings else ExitCode.DONE)


app.command()(thermal_guard.guard)


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
    from phalanx.app.thermal import read_device_series

    return read_device_series(
        sources, _parse_columns(column), kind, _parse_time("--from", begin), _parse_time("--until", until)
    )


def _parse_time(option: str, text: str | None) -> float | None:
    from phalanx.app.thermal import parse_time

    if text is None:
        return None
    try:
        return parse_time(text)
    except ValueError:
        raise UsageError(f"{option} {text}: expected a time such as 2026-11-01T08:00, or seconds") from None
