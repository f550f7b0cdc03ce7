"""`phalanx calibrate`: measure this machine, and write a cluster file."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from phalanx.cluster import Cluster, Machine

DEFAULT_OUT_TEXT = "a file in the cache directory, by hardware and versions"


def calibrate(
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure fewer sizes: under 20 s instead of 3 minutes.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Cluster file to write.", show_default=DEFAULT_OUT_TEXT)
    ] = None,
    nproc_per_node: Annotated[
        int | None,
        typer.Option(
            "--nproc-per-node",
            min=1,
            max=100_000,
            metavar="N",
            help="Processes that measure concurrently.",
            show_default="one per GPU, else 2 on 2 or more cores",
        ),
    ] = None,
    folder: Annotated[
        Path,
        typer.Option("--dir", metavar="DIR", help="Directory on the disk to measure; writes up to 1 GB temporarily."),
    ] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure this machine, and write a cluster file for `phalanx plan`.

    Measures matrix multiplication, memory-bound operations, collectives and storage, and compares with data sheets. Run
    on an idle machine. Ctrl-C stops and writes nothing.
    """
    from phalanx.app.calibrate import calibrate
    from phalanx.cluster import discover_machine, save_cluster
    from phalanx.cluster.calibration import default_calibration_path
    from phalanx.cluster.discovery import check_workers
    from phalanx.errors import UsageError, describe_os_error
    from phalanx.run.directory import check_output_path

    if not folder.is_dir():
        raise UsageError(f"--dir {folder}: no such directory")
    machine = discover_machine()
    if nproc_per_node is not None:
        check_workers(machine, nproc_per_node)
    if out is None:
        out = default_calibration_path(machine)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"the cache directory {out.parent} cannot be created: {describe_os_error(error)}; "
                "choose a cluster file with --out FILE"
            ) from None
    check_output_path("--out", out, ["# A cluster for Phalanx"])  # before measuring takes minutes
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it cleans up like Ctrl-C
    with show_progress() as report_progress:
        cluster = calibrate(machine, quick=quick, num_processes=nproc_per_node, folder=folder, progress=report_progress)
    save_cluster(cluster, out)
    typer.echo(json.dumps(cluster.model_dump(mode="json"), indent=2) if as_json else format_page(cluster, machine, out))


@contextmanager
def show_progress() -> Iterator[Callable[[str, float], None]]:
    """Show on standard error what is being measured, if it is a terminal."""
    is_terminal = sys.stderr.isatty()

    def report_progress(family: str, fraction: float) -> None:
        if is_terminal:
            print(f"\r{min(fraction, 1):4.0%}  {family} ...\033[K", end="", file=sys.stderr, flush=True)

    try:
        yield report_progress
    finally:
        if is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def format_page(cluster: "Cluster", machine: "Machine", out: Path) -> str:
    """Format measurements next to the data sheet, and warnings."""
    from phalanx.cli.calibrate_output import format_lines

    return "\n".join([*format_lines(cluster, machine), "", f"wrote {out}"])
