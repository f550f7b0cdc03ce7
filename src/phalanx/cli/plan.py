"""`phalanx plan`: predict a run on a cluster, and choose its parallelism."""

import gc
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.options import JsonOption, OverridesArgument, RecipeArgument, name_output
from phalanx.errors import UsageError
from phalanx.formatting import (
    BYTES_PER_GIB,
    NOT_MEASURED_TEXT,
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    format_plural,
    format_rate,
    format_significant,
)
from phalanx.run.mixture import format_epochs
from phalanx.storage.url import is_url
from phalanx.text_table import Column, format_table

if TYPE_CHECKING:
    from phalanx.autoconfig.plan import RunPlan
    from phalanx.planner.search import Candidate
    from phalanx.planner.storage_costs import StorageDemand

CANDIDATE_COLUMNS = (
    Column(),
    Column("parallelism"),
    Column("micro", is_number=True),
    Column("checkpointing"),
    Column("precision"),
    Column("step time", is_number=True),
    Column("memory", is_number=True),
    Column("compared with 1"),
)
COST_SOURCE_TEXTS = {"sheet": "data sheets", "fitted": "fitted curves", "measured": "measurements of this machine"}


def plan(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Cluster: `dgx-h100:128` (nodes), `h100:64` (devices), or a cluster file.",
            show_default="PHALANX_CLUSTER, else this machine",
        ),
    ] = None,
    num_gpus: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Devices to plan for, of all nodes.", show_default="all")
    ] = None,
    top: Annotated[int, typer.Option(min=1, metavar="K", help="Number of candidates to show.")] = 5,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Recipe to write.", show_default="NAME.planned.yaml")
    ] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Write the choice into RECIPE.")] = False,
    fits: Annotated[
        bool, typer.Option("--fits", help="Only list the longest sequences that fit on common GPUs with an adapter.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Break down step time and memory.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Predict memory, step time, energy and cost of a run on a cluster, and choose its parallelism.

    Without a cluster it plans for this machine, as measured by `phalanx calibrate`. Nothing is trained, and
    no data are read.
    """
    if fits:
        _print_fits(recipe, overrides or [], as_json)
        return
    if in_place and out is not None:
        raise UsageError(f"--in-place, --out {out}: give one of the two")
    if in_place and is_url(recipe):
        raise UsageError(f"--in-place: {recipe} is not a file; give --out FILE")
    out = Path(recipe) if in_place else out or name_output(recipe, "planned")
    gc.disable()  # nearly all objects that imports create stay
    try:
        from phalanx.app.plan import plan_recipe_file

        result = plan_recipe_file(recipe, overrides or [], cluster, num_gpus, out, in_place)
    finally:
        gc.freeze()
        gc.enable()
    if as_json:
        typer.echo(json.dumps(to_json(result, top, out), indent=2))
        return
    typer.echo("\n".join(format_plan(result, top)))
    if explain:
        typer.echo("\n".join(format_explanation(result)))
    typer.echo(f"\nwrote {out}")


def _print_fits(recipe: str, overrides: list[str], as_json: bool) -> None:
    from phalanx.app.plan import find_fits

    run, bases = find_fits(recipe, overrides)
    if as_json:
        typer.echo(json.dumps([asdict(base) for base in bases], indent=2))
        return
    rows = []
    for base in bases:
        lengths = (f"{length:,}" if length else "-" for length in base.max_seq_len.values())
        note = " (this recipe)" if base.base_dtype == run.base_dtype else ""
        rows.append((f"{base.base_dtype}{note}", f"{base.weight_bytes / BYTES_PER_GIB:.1f} GiB", *lengths))
    numbers = (Column(name, is_number=True) for name in ("weights", *bases[0].max_seq_len))
    lines = [
        f"{format_count(run.sizes.num_parameters)} parameters; adapters of rank {run.adapter_rank}: "
        f"{format_count(run.num_trained)}",
        "longest sequence on one GPU, in tokens: micro-batch 1, activation checkpointing "
        f"{run.checkpointing}, {'whole logits' if run.stack.bytes_per_logit else 'chunked loss'}",
        "",
        *format_table((Column("base model"), *numbers), rows),
        "-: not even 256 tokens",
    ]
    typer.echo("\n".join(lines))


def format_plan(run_plan: "RunPlan", top: int) -> list[str]:
    """Format the plan as lines of text."""
    from phalanx.app.plan import format_seconds, rank_candidates

    recipe, cluster, best = run_plan.recipe, run_plan.cluster, run_plan.best
    device = cluster.node.accelerator
    nodes = -(-run_plan.num_devices // cluster.node.count)
    rows = [_to_cells(rank, *each) for rank, each in enumerate(rank_candidates(run_plan, top), 1)]
    lines = [
        f"{recipe.name}: {format_count(run_plan.parameters)} parameters, {recipe.batch.global_size} samples of "
        f"{format_plural(run_plan.units_per_sample, 'token')} a step",
        f"{run_plan.num_devices:,} x {device.name} on {nodes:,} {'node' if nodes == 1 else 'nodes'} "
        f"({cluster.name}); costs from {COST_SOURCE_TEXTS[run_plan.cost_source]}",
        "",
        *format_table(CANDIDATE_COLUMNS, rows),
        f"   best of {run_plan.num_valid:,} valid candidates",
        "",
        f"step time  {format_seconds(best.step_s)} (90% interval {format_seconds(run_plan.low_s)} to "
        f"{format_seconds(run_plan.high_s)})",
    ]
    return [*lines, *_format_totals(run_plan)]


def _to_cells(rank: int, candidate: "Candidate", slowdown_reason: str) -> tuple[str, ...]:
    from phalanx.app.plan import format_seconds

    scenario = candidate.scenario
    return (
        str(rank),
        _format_parallelism(candidate),
        str(scenario.micro_size),
        scenario.checkpointing,
        scenario.precision,
        format_seconds(candidate.step_s),
        f"{candidate.peak_bytes / BYTES_PER_GIB:.1f} GiB",
        slowdown_reason,
    )


def _format_totals(run_plan: "RunPlan") -> list[str]:
    """Format speed, memory, energy, cost, failures and scaling."""
    best, cost, prices = run_plan.best, run_plan.cost, run_plan.cluster.prices
    units_per_s = run_plan.recipe.batch.global_size * run_plan.units_per_sample / best.step_s
    units = "tokens" if run_plan.units_per_sample > 1 else "samples"
    memory_gib = run_plan.cluster.node.accelerator.memory_gib
    lines = [
        f"speed      {format_rate(units_per_s, units)}, MFU {format_percent(run_plan.mfu)}",
        f"memory     {best.peak_bytes / BYTES_PER_GIB:.1f} of {memory_gib:g} GiB a device",
        f"run        {run_plan.recipe.steps:,} steps in {format_duration(cost.wall_s)}, {cost.device_hours:,.1f} "
        "device-hours",
        *([f"epochs     {format_epochs(run_plan.epochs)}"] if run_plan.epochs else []),
    ]
    lines += _format_storage(run_plan.storage_demand)
    if (energy := run_plan.energy) is not None:
        kwh = f"{energy.site_kwh:,.0f}" if energy.site_kwh >= 1_000 else format_significant(energy.site_kwh)
        lines.append(f"energy     {kwh} kWh with cooling (PUE {prices.pue:.4g}), {energy.node_w:,.0f} W a node")
    if (carbon_kg := _predict_carbon_kg(run_plan)) is not None:
        lines.append(f"carbon     {carbon_kg:,.0f} kg CO2e, {prices.carbon_g_per_kwh:g} g/kWh")
    named = (("rent", cost.rent_cost), ("energy", cost.energy_cost))
    costs = [f"{name} {value:,.2f} {prices.currency}" for name, value in named if value is not None]
    if costs:
        lines.append(f"cost       {', '.join(costs)}")
    if (checkpoints := run_plan.checkpoint_plan) is not None:
        mtbf, interval = map(format_duration, (checkpoints.mtbf_s, checkpoints.interval_s))
        productive = f"{format_percent(checkpoints.productive)} of the time is productive"
        lines.append(f"failures   every {mtbf}; with a checkpoint every {interval} (Daly), {productive}")
    if len(run_plan.scaling) > 1:
        base_world, base_speed = run_plan.scaling[0]
        shares = {world: speed / base_speed * base_world / world for world, speed in run_plan.scaling[1:][-5:]}
        efficiencies = ", ".join(f"{world:,}: {format_percent(share)}" for world, share in shares.items())
        lines.append(f"scaling    weak-scaling efficiency relative to {base_world:,}: {efficiencies}")
    return lines


def _format_storage(demand: "StorageDemand") -> list[str]:
    """Format the data rate, the time to save by tier, and what stores are asked."""
    available = demand.available_bytes_per_s
    place = "storage" if demand.first_epoch is None else demand.first_epoch.url
    text = f"{place} gives {format_bytes(available)}/s" if available else f"{place} {NOT_MEASURED_TEXT}"
    saves = ", ".join(f"{tier} {format_duration(seconds)}" for tier, seconds in demand.save_s.items())
    lines = [
        f"data       needs {format_bytes(demand.data_bytes_per_s)}/s; {text}",
        f"saving     {format_bytes(demand.checkpoint_bytes)}: {saves}",
    ]
    for cost, of in ((demand.upload, "a save"), (demand.first_epoch, "the first epoch")):
        if cost is not None:
            parts = [f"{cost.num_requests:,} requests {of}"]
            parts += [f"{format_significant(cost.usd)} USD"] if cost.usd is not None else []
            parts += [f"egress {format_significant(cost.egress_usd)} USD"] if cost.egress_usd is not None else []
            lines.append(f"store      {cost.url}: {', '.join(parts)}")
    return lines


def _predict_carbon_kg(run_plan: "RunPlan") -> float | None:
    grams, energy = run_plan.cluster.prices.carbon_g_per_kwh, run_plan.energy
    return None if grams is None or energy is None else energy.site_kwh * grams / 1e3


def format_explanation(run_plan: "RunPlan") -> list[str]:
    """Format where time and memory of the best candidate go."""
    from phalanx.app.plan import format_breakdown

    memory = {name.replace("_", " "): value for name, value in vars(run_plan.footprint).items() if value > 0}
    memory["total"] = run_plan.footprint.total
    rows = [(name, f"{value / BYTES_PER_GIB:.2f} GiB") for name, value in memory.items()]
    return [
        "",
        "step time of the best candidate",
        format_breakdown(run_plan.best.breakdown),
        "",
        "memory of the fullest device",
        *format_table([Column(min_width=42), Column(is_number=True)], rows, indent=2),
    ]


def to_json(run_plan: "RunPlan", top: int, out: Path) -> dict[str, Any]:
    """Return the plan as JSON values, with the field names of `RunPlan`."""
    from phalanx.app.plan import list_chosen_keys, rank_candidates

    energy, checkpoints = run_plan.energy, run_plan.checkpoint_plan
    return {
        "cluster": run_plan.cluster.name,
        "num_devices": run_plan.num_devices,
        "device": run_plan.cluster.node.accelerator.name,
        "parameters": run_plan.parameters,
        "num_valid": run_plan.num_valid,
        "cost_source": run_plan.cost_source,
        "candidates": [_candidate_to_json(candidate) for candidate, _ in rank_candidates(run_plan, top)],
        "low_s": run_plan.low_s,
        "high_s": run_plan.high_s,
        "mfu": run_plan.mfu,
        "memory_bytes": vars(run_plan.footprint),
        "cost": asdict(run_plan.cost),
        "energy": None if energy is None else asdict(energy),
        "carbon_kg": _predict_carbon_kg(run_plan),
        "storage_demand": asdict(run_plan.storage_demand),
        "checkpoint_plan": None if checkpoints is None else asdict(checkpoints),
        "scaling": [{"num_devices": world, "units_per_s": speed} for world, speed in run_plan.scaling],
        "epochs": run_plan.epochs,
        "changes": list_chosen_keys(run_plan),
        "recipe": str(out),
    }


def _candidate_to_json(candidate: "Candidate") -> dict[str, Any]:
    scenario = candidate.scenario
    return {
        "parallelism": scenario.parallelism.model_dump(),
        "micro_size": scenario.micro_size,
        "activation_checkpointing": scenario.checkpointing,
        "precision": scenario.precision,
        "virtual_stages": scenario.virtual_stages,
        "step_s": candidate.step_s,
        "peak_bytes": math.ceil(candidate.peak_bytes),
        "breakdown_s": vars(candidate.breakdown),
    }


def _format_parallelism(candidate: "Candidate") -> str:
    parallelism = candidate.scenario.parallelism
    dimensions = ("replicate", "shard", "tensor", "pipeline", "context", "expert")
    sizes = [f"{name} {getattr(parallelism, name)}" for name in dimensions if getattr(parallelism, name) > 1]
    schedule, num_virtual = parallelism.pipeline_schedule, candidate.scenario.virtual_stages
    if parallelism.pipeline > 1 and (num_virtual > 1 or schedule != "1f1b"):
        sizes.append(f"{schedule} {num_virtual}" if num_virtual > 1 else schedule)
    return ", ".join(sizes) or "one device"
