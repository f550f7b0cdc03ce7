"""`phalanx plan`: parse, foretell, print the best few and why the others lose, write the recipe with the choice."""

import gc
import json as json_
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from phalanx.plan.search import Option
    from phalanx.planning import Planned


def plan(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe (YAML).")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Overrides; they are written into the planned recipe."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Cluster: `dgx-h100:128` (nodes), `h100:64` (devices), or a file.",
            show_default="this machine",
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--num-gpus", min=1, max=10**8, metavar="N", help="Devices to plan for, of all nodes.", show_default="all"
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=10**9, metavar="K", help="Number of candidates to show.")] = 5,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Recipe to write.", show_default="NAME.planned.yaml"),
    ] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Write the choice into RECIPE.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Break down step time and memory.")] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the timeline of a step as a Chrome trace.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict memory, step time, energy and cost of a run on a cluster, and choose its parallelism.

    Without --cluster it plans for this machine, as measured by `phalanx calibrate`. Nothing is trained, and no data are
    read.
    """
    with uncollected():
        from phalanx.errors import UsageError
        from phalanx.recipe import load_recipe
        from phalanx.run.directory import check_output, write_whole

        if in_place and out is not None:
            raise UsageError(f"--in-place, --out {out}: give one of the two")
        out = recipe if in_place else out or recipe.with_name(f"{recipe.stem}.planned.yaml")
        if not in_place:
            check_output("--out", out, ["# Planned by `phalanx plan`"])
        if trace is not None:
            check_output("--trace", trace, ['"traceEvents"'])
        loaded = load_recipe(recipe, overrides or [])
        from phalanx.planning import plan_run, text_of

        found = plan_run(loaded, cluster, gpus, Path.cwd(), context.obj)
    write_whole(out, text_of(loaded, overrides or [], found))
    if trace is not None:
        write_whole(trace, _trace(found))
    if as_json:
        typer.echo(json_.dumps(plain(found, top, out), indent=2))
        return
    typer.echo("\n".join(page(found, top)))
    if explain:
        typer.echo("\n".join(explained(found)))
    typer.echo(f"\nwrote {out}" + (f" and {trace}" if trace is not None else ""))


@contextmanager
def uncollected() -> Iterator[None]:
    """No cycles are looked for while modules are imported: nearly all that is made stays."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def page(found: "Planned", top: int) -> list[str]:
    """The plan in words and columns."""
    from phalanx.observe.units import duration
    from phalanx.plan.timeline import time_text
    from phalanx.planning import GIB, parts_against

    device, best = found.cluster.node.accelerator, found.best
    nodes = -(-found.devices // found.cluster.node.count)
    lines = [
        f"{found.recipe.name}: {_number(found.parameters)} parameters, {found.recipe.batch.global_size} samples of "
        f"{found.tokens} {'token' if found.tokens == 1 else 'tokens'} a step",
        f"{found.devices:,} x {device.name} on {nodes:,} {'node' if nodes == 1 else 'nodes'} ({found.cluster.name}); "
        f"costs from {SAID[found.layer]}",
        "",
        f"{'':<3}{'layout':<44} {'micro':>5} {'recompute':<9} {'precision':<9} {'a step':>9} {'memory':>9}  why not",
    ]
    for rank, option in enumerate((best, *unlike(found, top - 1))):
        setup, why = option.setup, "" if rank == 0 else parts_against(best.parts, option.parts)
        lines.append(
            f"{rank + 1:<3}{_layout(option):<44} {setup.micro:>5} {setup.recompute:<9} {setup.precision:<9} "
            f"{time_text(option.seconds):>9} {option.memory / GIB:>5.1f} GiB  {why}".rstrip()
        )
    per_second = found.recipe.batch.global_size * found.tokens / best.seconds
    money, units = found.budget, "tokens" if found.tokens > 1 else "samples"
    lines += [
        f"   of {found.valid:,} valid ones",
        "",
        f"a step     {time_text(best.seconds)}, nine times of ten {time_text(found.low)} to {time_text(found.high)}",
        *_opening(found),
        f"speed      {_number(per_second)} {units}/s, MFU {100 * found.mfu:.1f} %",
        f"memory     {best.memory / GIB:.1f} of {device.memory_gib:g} GiB a device",
        f"run        {found.recipe.steps:,} steps in {duration(money.seconds)}, {money.device_hours:,.1f} device-hours",
    ]
    if found.energy is not None:
        lines.append(f"energy     {found.energy.site_kwh:,.1f} kWh with cooling, {found.energy.node_w:,.0f} W a node")
    if found.cap is not None:
        cap, words = found.cap, f"{found.cluster.prices.power_cap_w:,.0f} W a device"
        whence = "measured on this family" if cap.measured else "from other families, for want of its own figures"
        range_ = f"{cap.low:.2f} to {cap.high:.2f}"
        lines.append(f"power cap  {words}: computing takes {cap.expected:.2f} times as long ({range_}; {whence})")
    costs = [(name, value) for name, value in (("rent", money.rent), ("energy", money.energy)) if value is not None]
    if costs:
        words = ", ".join(f"{name} {value:,.2f} {found.cluster.prices.currency}" for name, value in costs)
        lines.append(f"cost       {words}")
    if found.saving is not None:
        lines.append(
            f"failures   every {duration(found.saving.between_failures)}; save every {duration(found.saving.interval)} "
            f"(Daly), then {100 * found.saving.goodput.productive:.1f} % of the time is productive"
        )
    if len(found.scaling) > 1:
        first = found.scaling[0]
        shown = ", ".join(
            f"{world:,}: {100 * speed / first[1] * first[0] / world:.0f} %" for world, speed in found.scaling[1:][-5:]
        )
        lines.append(f"scaling    efficiency against {first[0]:,}, as many samples each: {shown}")
    return lines


def _opening(found: "Planned") -> list[str]:
    """The first steps, where they are of another kind."""
    from phalanx.plan.timeline import time_text

    first = found.opening
    if first is None:
        return []
    return [f"           each of the first {first.steps:,}, in which all travels: {time_text(first.seconds)}"]


def unlike(found: "Planned", count: int) -> list["Option"]:
    """The best others that are something else, and not only the same with shards and replicas divided otherwise."""
    seen, shown = {_kind(found.best)}, []
    for option in found.others:
        if _kind(option) not in seen:
            seen.add(_kind(option))
            shown.append(option)
    return shown[:count]


def _kind(option: "Option") -> tuple[Any, ...]:
    setup, layout = option.setup, option.setup.layout
    inner = (
        layout.tensor,
        layout.pipeline,
        layout.context > 1,
        layout.expert > 1,
        layout.pipeline_schedule,
        setup.chunks,
    )
    return (*inner, setup.recompute, setup.precision, layout.shard > 1)


SAID = {"sheet": "data sheets", "fitted": "fitted curves", "measured": "measurements of this machine"}


def explained(found: "Planned") -> list[str]:
    """Where time and memory of the best choice go."""
    from phalanx.plan.timeline import breakdown, drawn
    from phalanx.planning import GIB

    memory = {name: value for name, value in vars(found.footprint).items() if name != "rank" and value > 0}
    return [
        "",
        "where the time of a step goes",
        breakdown(found.best.parts),
        "",
        "where the memory of the fullest device goes",
        *(f"  {name:<42} {value / GIB:>7.2f} GiB" for name, value in memory.items()),
        f"  {'in all':<42} {found.footprint.total / GIB:>7.2f} GiB",
        "",
        "the step in time",
        drawn(found.events()),
    ]


def plain(found: "Planned", top: int, out: Path) -> dict[str, Any]:
    """The plan as JSON values."""
    from phalanx.planning import chosen

    def option(one: "Option") -> dict[str, Any]:
        setup = one.setup
        return {
            "layout": setup.layout.model_dump(),
            "micro": setup.micro,
            "recompute": setup.recompute,
            "precision": setup.precision,
            "chunks": setup.chunks,
            "step_seconds": one.seconds,
            "memory_bytes": one.memory,
            "parts": vars(one.parts),
        }

    return {
        "cluster": found.cluster.name,
        "devices": found.devices,
        "device": found.cluster.node.accelerator.name,
        "parameters": found.parameters,
        "valid": found.valid,
        "costs_from": found.layer,
        "choices": [option(each) for each in (found.best, *unlike(found, top - 1))],
        "low_seconds": found.low,
        "high_seconds": found.high,
        "opening": None if found.opening is None else asdict(found.opening),
        "mfu": found.mfu,
        "memory": dict(vars(found.footprint)),
        "budget": asdict(found.budget),
        "energy": None if found.energy is None else asdict(found.energy),
        "saving": None if found.saving is None else asdict(found.saving),
        "power_cap": None if found.cap is None else asdict(found.cap),
        "scaling": [{"devices": world, "units_per_second": speed} for world, speed in found.scaling],
        "changes": chosen(found),
        "recipe": str(out),
    }


def _trace(found: "Planned") -> str:
    from phalanx.plan.timeline import chrome_trace

    return chrome_trace(found.events())


def _layout(option: "Option") -> str:
    layout = option.setup.layout
    sizes = [
        f"{name} {getattr(layout, name)}"
        for name in ("replicate", "shard", "tensor", "pipeline", "context", "expert")
        if getattr(layout, name) > 1
    ]
    if layout.pipeline > 1 and (option.setup.chunks > 1 or layout.pipeline_schedule != "1f1b"):
        sizes.append(f"{layout.pipeline_schedule}" + (f" {option.setup.chunks}" if option.setup.chunks > 1 else ""))
    return ", ".join(sizes) or "one device"


def _number(value: float) -> str:
    for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:.3g}"
