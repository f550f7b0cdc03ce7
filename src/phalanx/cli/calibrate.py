"""`phalanx calibrate`: measure this machine, and write a cluster file."""

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.options import JsonOption
from phalanx.cluster import Cluster, Machine
from phalanx.cluster.calibration.anomalies import best_gemm_tflops, measured_memory_bandwidth
from phalanx.cluster.calibration.location_speed import describe_speed
from phalanx.cluster.calibration.runner import data_sheet_of
from phalanx.cluster.spec import Measurements
from phalanx.errors import UsageError, describe_os_error
from phalanx.formatting import format_bytes, format_duration, format_plural, format_significant
from phalanx.recipe import load_recipe
from phalanx.recipe.locations import StorageLocation, list_locations
from phalanx.run.directory import check_output_path
from phalanx.text_table import Column, format_table

DEFAULT_OUT_TEXT = "a file in the cache directory, by hardware and versions"


def calibrate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE", help="Recipe, with overrides KEY=VALUE: measure the paths and URLs that it names, too."
        ),
    ] = None,
    run: Annotated[
        str | None, typer.Option(metavar="DIR|URL", help="Run directory of the recipe.", show_default="runs/NAME")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure fewer sizes: under 20 s instead of 3 minutes.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Cluster file to write.", show_default=DEFAULT_OUT_TEXT)
    ] = None,
    nproc_per_node: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Processes that measure concurrently.",
            show_default="one per GPU, else 2 on 2 or more cores",
        ),
    ] = None,
    folder: Annotated[
        Path,
        typer.Option("--dir", metavar="DIR", help="Directory on the disk to measure; writes up to 1 GB temporarily."),
    ] = Path(),
    as_json: JsonOption = False,
) -> None:
    """Measure this machine, and write a cluster file for `phalanx plan`.

    Measures matrix multiplication, memory-bound operations, collectives and storage, and compares with data sheets. Run
    on an idle machine. Ctrl-C stops and writes nothing.
    """
    from phalanx.app.calibrate import calibrate
    from phalanx.cluster import discover_machine, save_cluster
    from phalanx.cluster.calibration.hardware_key import default_calibration_path
    from phalanx.cluster.discovery import check_workers

    locations = find_locations(words, run)[1] if words else []
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
        options: dict[str, Any] = {"quick": quick, "num_processes": nproc_per_node, "folder": folder}
        cluster = calibrate(machine, locations=locations, progress=report_progress, **options)
    save_cluster(cluster, out)
    if as_json:
        typer.echo(json.dumps(cluster.model_dump(mode="json"), indent=2))
    else:
        typer.echo("\n".join([*format_page(cluster, machine), "", f"wrote {out}"]))


@contextmanager
def show_progress() -> Iterator[Callable[[str, float], None]]:
    """Show on standard error what is being measured, if it is a terminal."""
    from rich.console import Console

    with Console(stderr=True).status("measuring") as status:
        yield lambda family, fraction: status.update(f"{min(fraction, 1):.0%}  {family}")


def format_page(cluster: Cluster, machine: Machine) -> list[str]:
    """Format measurements next to the data sheet, and warnings."""
    measured = cluster.measured
    assert measured is not None, "this page shows what was measured"
    cores = format_plural(machine.physical_cores, "core")
    what = cores if machine.device == "cpu" else format_plural(machine.device_count, "GPU")
    threads = f", {format_plural(measured.threads, 'thread')}" if measured.threads else ""
    versions = ", ".join(f"{name} {measured.key[name]}" for name in ("driver", "torch", "nccl") if name in measured.key)
    rows = [*_compute_rows(machine, measured), *_collective_rows(cluster, measured), *_storage_rows(measured)]
    warnings = ["", "warnings:", *(f"  - {text}" for text in measured.odd)] if measured.odd else ["no warnings"]
    return [
        f"{machine.device_name}, {what}, {cluster.node.accelerator.memory_gib:.3g} GiB{threads}; {versions}",
        "",
        *format_table([Column(), Column("measured"), Column("data sheet"), Column("share", is_number=True)], rows),
        "",
        *format_table([Column(), Column()], ((each.location, describe_speed(each)) for each in measured.locations)),
        *([""] if measured.locations else []),
        f"drift {measured.drift:.1%}: slowest against fastest of the repeated reference products",
        *warnings,
    ]


def _compute_rows(machine: Machine, measured: Measurements) -> Iterator[tuple[str, ...]]:
    """Matrix products, attention, memory and launches."""
    sheet = data_sheet_of(machine)
    for precision, rate in best_gemm_tflops(measured.products).items():
        sheet_tflops = sheet.tflops.get(precision) if sheet else None  # type: ignore[call-overload]
        expected = (f"{format_significant(sheet_tflops)} TFLOP/s", f"{rate / sheet_tflops:.0%}") if sheet_tflops else ()
        yield f"matrix products, best, {precision}", f"{format_significant(rate)} TFLOP/s", *expected
    operations = [each for each in measured.operations if each.processes == 1]
    attention = [each for each in operations if each.kind == "attention"]
    for precision in dict.fromkeys(each.precision for each in attention):
        best = max(each.flops / each.seconds / 1e12 for each in attention if each.precision == precision)
        yield f"attention, best, {precision}", f"{format_significant(best)} TFLOP/s"
    if (gbps := measured_memory_bandwidth(measured.operations, machine.device)) is not None:
        sheet_gbps = sheet.memory_gbps if sheet else None
        expected = (f"{format_bytes(1e9 * sheet_gbps)}/s", f"{gbps / sheet_gbps:.0%}") if sheet_gbps else ()
        yield "memory", f"{format_bytes(1e9 * gbps)}/s", *expected
    if measured.launch_us is not None:
        yield "launch of an operation", format_duration(measured.launch_us / 1e6)


def _collective_rows(cluster: Cluster, measured: Measurements) -> Iterator[tuple[str, ...]]:
    link = cluster.node.scale_up
    for ranks in sorted({each.ranks for each in measured.collectives}):
        ordered = sorted((each for each in measured.collectives if each.ranks == ranks), key=lambda each: each.bytes)
        small, large = ordered[0], ordered[-1]
        latency = f"{format_duration(small.seconds)} for {format_bytes(small.bytes)}"
        bus = f"bus {format_bytes(1e9 * large.busbw_gbps)}/s at {format_bytes(large.bytes)}"
        sheet = f"{format_bytes(1e9 * link.gbps)}/s ({link.link})" if link else ""
        yield f"all_reduce of {ranks} processes, {small.backend}", f"{latency}, {bus}", sheet


def find_locations(words: Sequence[str], run: str | None) -> tuple[str, list[StorageLocation]]:
    """Return the run's directory or URL, and what the recipe that `words` name, with overrides, reads and writes."""
    loaded = load_recipe(Path(words[0]), words[1:])
    run = run or str(Path("runs") / loaded.recipe.name)
    return run, list_locations(loaded.recipe, loaded.recipe_dir, run)


def _storage_rows(measured: Measurements) -> Iterator[tuple[str, ...]]:
    if measured.storage is None:
        return
    for what, gbps in (("write", measured.storage.node_write_gbps), ("read", measured.storage.node_read_gbps)):
        if gbps:
            yield f"disk, {what}", f"{format_bytes(1e9 * gbps)}/s"
