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
    from phalanx.autoconfig.plan import RunPlan
    from phalanx.planner.search import Candidate


def plan(
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
    num_gpus: Annotated[
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
    with disable_gc():
        from phalanx.errors import UsageError
        from phalanx.recipe import load_recipe
        from phalanx.run.directory import check_output_path, write_atomic

        if in_place and out is not None:
            raise UsageError(f"--in-place, --out {out}: give one of the two")
        out = recipe if in_place else out or recipe.with_name(f"{recipe.stem}.planned.yaml")
        if not in_place:
            check_output_path("--out", out, ["# Planned by `phalanx plan`"])
        if trace is not None:
            check_output_path("--trace", trace, ['"traceEvents"'])
        loaded = load_recipe(recipe, overrides or [])
        from phalanx.autoconfig.plan import plan_run, render_recipe

        result = plan_run(loaded, cluster, num_gpus, Path.cwd())
    write_atomic(out, render_recipe(loaded, overrides or [], result))
    if trace is not None:
        write_atomic(trace, _render_trace(result))
    if as_json:
        typer.echo(json_.dumps(to_json(result, top, out), indent=2))
        return
    typer.echo("\n".join(format_plan(result, top)))
    if explain:
        typer.echo("\n".join(format_breakdown(result)))
    typer.echo(f"\nwrote {out}" + (f" and {trace}" if trace is not None else ""))


@contextmanager
def disable_gc() -> Iterator[None]:
    """No cycles are looked for while modules are imported: nearly all that is made stays."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def format_plan(plan_result: "RunPlan", top: int) -> list[str]:
    """The plan in words and columns."""
    from phalanx.autoconfig.plan import BYTES_PER_GIB, describe_slowdown
    from phalanx.formatting import format_count, format_duration, format_percent, format_rate
    from phalanx.planner.timeline import format_seconds

    device, best = plan_result.cluster.node.accelerator, plan_result.best
    nodes = -(-plan_result.num_devices // plan_result.cluster.node.count)
    lines = [
        f"{plan_result.recipe.name}: {format_count(plan_result.parameters)} parameters, "
        f"{plan_result.recipe.batch.global_size} samples of "
        f"{plan_result.units_per_sample} {'token' if plan_result.units_per_sample == 1 else 'tokens'} a step",
        f"{plan_result.num_devices:,} x {device.name} on {nodes:,} {'node' if nodes == 1 else 'nodes'} "
        f"({plan_result.cluster.name}); "
        f"costs from {COST_SOURCE_TEXTS[plan_result.cost_source]}",
        "",
        f"{'':<3}{'layout':<44} {'micro':>5} {'recompute':<9} {'precision':<9} {'a step':>9} {'memory':>9}  why not",
    ]
    for rank, option in enumerate((best, *select_distinct(plan_result, top - 1))):
        setup, why = option.scenario, "" if rank == 0 else describe_slowdown(best.breakdown, option.breakdown)
        lines.append(
            f"{rank + 1:<3}{_format_parallelism(option):<44} {setup.micro_size:>5} {setup.checkpointing:<9} "
            f"{setup.precision:<9} "
            f"{format_seconds(option.step_s):>9} {option.peak_bytes / BYTES_PER_GIB:>5.1f} GiB  {why}".rstrip()
        )
    per_second = plan_result.recipe.batch.global_size * plan_result.units_per_sample / best.step_s
    cost, units = plan_result.cost, "tokens" if plan_result.units_per_sample > 1 else "samples"
    lines += [
        f"   of {plan_result.num_valid:,} valid ones",
        "",
        f"a step     {format_seconds(best.step_s)}, nine times of ten {format_seconds(plan_result.low_s)} to "
        f"{format_seconds(plan_result.high_s)}",
        *_format_warmup(plan_result),
        f"speed      {format_rate(per_second, units)}, MFU {format_percent(plan_result.mfu)}",
        f"memory     {best.peak_bytes / BYTES_PER_GIB:.1f} of {device.memory_gib:g} GiB a device",
        f"run        {plan_result.recipe.steps:,} steps in {format_duration(cost.wall_s)}, {cost.device_hours:,.1f} "
        f"device-hours",
    ]
    if plan_result.energy is not None:
        lines.append(
            f"energy     {plan_result.energy.site_kwh:,.1f} kWh with cooling, {plan_result.energy.node_w:,.0f} W a node"
        )
    if plan_result.power_cap_slowdown is not None:
        cap, words = plan_result.power_cap_slowdown, f"{plan_result.cluster.prices.power_cap_w:,.0f} W a device"
        source_text = (
            "measured on this family" if cap.is_measured else "from other families, for want of its own figures"
        )
        range_text = f"{cap.low:.2f} to {cap.high:.2f}"
        lines.append(
            f"power cap  {words}: computing takes {cap.expected:.2f} times as long ({range_text}; {source_text})"
        )
    cost_items = [
        (name, value) for name, value in (("rent", cost.rent_cost), ("energy", cost.energy_cost)) if value is not None
    ]
    if cost_items:
        words = ", ".join(f"{name} {value:,.2f} {plan_result.cluster.prices.currency}" for name, value in cost_items)
        lines.append(f"cost       {words}")
    if plan_result.checkpoint_plan is not None:
        lines.append(
            f"failures   every {format_duration(plan_result.checkpoint_plan.mtbf_s)}; save every "
            f"{format_duration(plan_result.checkpoint_plan.interval_s)} "
            f"(Daly), then {format_percent(plan_result.checkpoint_plan.goodput.productive)} of the time is productive"
        )
    if len(plan_result.scaling) > 1:
        smallest = plan_result.scaling[0]
        shown = ", ".join(
            f"{world:,}: {format_percent(speed / smallest[1] * smallest[0] / world)}"
            for world, speed in plan_result.scaling[1:][-5:]
        )
        lines.append(f"scaling    efficiency against {smallest[0]:,}, as many samples each: {shown}")
    return lines


def _format_warmup(plan_result: "RunPlan") -> list[str]:
    """The first steps, where they are of another kind."""
    from phalanx.planner.timeline import format_seconds

    warmup = plan_result.warmup_phase
    if warmup is None:
        return []
    return [f"           each of the first {warmup.num_steps:,}, in which all travels: {format_seconds(warmup.step_s)}"]


def select_distinct(plan_result: "RunPlan", count: int) -> list["Candidate"]:
    """The best others that are something else, and not only the same with shards and replicas divided otherwise."""
    seen, shown = {_candidate_key(plan_result.best)}, []
    for option in plan_result.alternatives:
        if _candidate_key(option) not in seen:
            seen.add(_candidate_key(option))
            shown.append(option)
    return shown[:count]


def _candidate_key(candidate: "Candidate") -> tuple[Any, ...]:
    setup, parallelism = candidate.scenario, candidate.scenario.parallelism
    inner = (
        parallelism.tensor,
        parallelism.pipeline,
        parallelism.context > 1,
        parallelism.expert > 1,
        parallelism.pipeline_schedule,
        setup.virtual_stages,
    )
    return (*inner, setup.checkpointing, setup.precision, parallelism.shard > 1)


COST_SOURCE_TEXTS = {"sheet": "data sheets", "fitted": "fitted curves", "measured": "measurements of this machine"}


def format_breakdown(plan_result: "RunPlan") -> list[str]:
    """Where time and memory of the best choice go."""
    from phalanx.autoconfig.plan import BYTES_PER_GIB
    from phalanx.planner.timeline import draw_timeline, format_breakdown

    memory = {name: value for name, value in vars(plan_result.footprint).items() if name != "rank" and value > 0}
    return [
        "",
        "where the time of a step goes",
        format_breakdown(plan_result.best.breakdown),
        "",
        "where the memory of the fullest device goes",
        *(f"  {name:<42} {value / BYTES_PER_GIB:>7.2f} GiB" for name, value in memory.items()),
        f"  {'in all':<42} {plan_result.footprint.total / BYTES_PER_GIB:>7.2f} GiB",
        "",
        "the step in time",
        draw_timeline(plan_result.step_events()),
    ]


def to_json(plan_result: "RunPlan", top: int, out: Path) -> dict[str, Any]:
    """The plan as JSON values."""
    from phalanx.autoconfig.plan import list_chosen_keys

    def candidate_to_json(one: "Candidate") -> dict[str, Any]:
        setup = one.scenario
        return {
            "layout": setup.parallelism.model_dump(),
            "micro": setup.micro_size,
            "recompute": setup.checkpointing,
            "precision": setup.precision,
            "chunks": setup.virtual_stages,
            "step_seconds": one.step_s,
            "memory_bytes": one.peak_bytes,
            "parts": vars(one.breakdown),
        }

    return {
        "cluster": plan_result.cluster.name,
        "devices": plan_result.num_devices,
        "device": plan_result.cluster.node.accelerator.name,
        "parameters": plan_result.parameters,
        "valid": plan_result.num_valid,
        "costs_from": plan_result.cost_source,
        "choices": [candidate_to_json(each) for each in (plan_result.best, *select_distinct(plan_result, top - 1))],
        "low_seconds": plan_result.low_s,
        "high_seconds": plan_result.high_s,
        "opening": None if plan_result.warmup_phase is None else asdict(plan_result.warmup_phase),
        "mfu": plan_result.mfu,
        "memory": dict(vars(plan_result.footprint)),
        "budget": asdict(plan_result.cost),
        "energy": None if plan_result.energy is None else asdict(plan_result.energy),
        "saving": None if plan_result.checkpoint_plan is None else asdict(plan_result.checkpoint_plan),
        "power_cap": None if plan_result.power_cap_slowdown is None else asdict(plan_result.power_cap_slowdown),
        "scaling": [{"devices": world, "units_per_second": speed} for world, speed in plan_result.scaling],
        "changes": list_chosen_keys(plan_result),
        "recipe": str(out),
    }


def _render_trace(plan_result: "RunPlan") -> str:
    from phalanx.planner.timeline import chrome_trace

    return chrome_trace(plan_result.step_events())


def _format_parallelism(candidate: "Candidate") -> str:
    parallelism = candidate.scenario.parallelism
    sizes = [
        f"{name} {getattr(parallelism, name)}"
        for name in ("replicate", "shard", "tensor", "pipeline", "context", "expert")
        if getattr(parallelism, name) > 1
    ]
    if parallelism.pipeline > 1 and (candidate.scenario.virtual_stages > 1 or parallelism.pipeline_schedule != "1f1b"):
        sizes.append(
            f"{parallelism.pipeline_schedule}"
            + (f" {candidate.scenario.virtual_stages}" if candidate.scenario.virtual_stages > 1 else "")
        )
    return ", ".join(sizes) or "one device"
