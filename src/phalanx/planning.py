"""`phalanx plan`: a recipe's model followed, a cluster described, the best layout chosen, and what a run would take.

Nothing is trained and no data are read: text is only asked for its tokenizer. What was learned of a model is kept,
so that a second plan needs no torch.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.cluster import Cluster, Machine, load_cluster, this_machine
from phalanx.cluster.probe import default_cluster_file
from phalanx.data.foretold import foretold
from phalanx.errors import RecipeError, UsageError
from phalanx.plan.budget import Budget, budget
from phalanx.plan.energy import Energy, run_energy
from phalanx.plan.fitting import what_would_fit
from phalanx.plan.footprint import Footprint, footprint
from phalanx.plan.goodput import Goodput, daly_interval, failure_interval, goodput
from phalanx.plan.measured import Here, NotMeasured
from phalanx.plan.memory import LANGUAGE, LARGE_LOGITS
from phalanx.plan.profile import Product, Profile
from phalanx.plan.rates import SPREAD, Rates
from phalanx.plan.search import Found, Option, Space, search
from phalanx.plan.setup import Setup
from phalanx.plan.stacks import OURS, rates_of, stack
from phalanx.plan.step import Parts, step, step_here
from phalanx.plan.timeline import WORDS, Event, timeline
from phalanx.plan.work import priced_by
from phalanx.profiling import numbers_of, profile_of
from phalanx.recipe import Recipe, check, expanded, load_recipe
from phalanx.recipe.load import Loaded
from phalanx.recipe.rewrite import rewritten
from phalanx.recipe.schema import Layout

GIB = 2.0**30
USABLE = 0.95
"""Of a device's memory: what predictions of memory are off by at most is left free."""
NINETY = 1.645
WORTH = 0.99
"""Another precision than the usual one must save at least so much."""
SAVED_BYTES = 12.0
"""Of a checkpoint for each parameter: weight and two moments in fp32."""
STALL = 0.01
"""Share of a blocking save that an asynchronous one holds training up (docs/results/checkpoint.md: 0.2 to 0.5 %)."""
RESTART = 120.0
"""Seconds from a failure to the next step, where the cluster's file does not tell: finding out, starting, loading."""


@dataclass(frozen=True)
class Planned:
    """A recipe on a cluster: the choice, what comes close, and what a run takes."""

    recipe: Recipe
    cluster: Cluster
    devices: int
    best: Option
    others: tuple[Option, ...]
    footprint: Footprint
    low: float
    high: float
    """Seconds of a step between which nine of ten measurements should lie."""
    layer: str
    """Whence the costs: sheet, fitted or measured."""
    valid: int
    parameters: int
    tokens: int
    """Units of a sample."""
    mfu: float
    budget: Budget
    energy: Energy | None
    saving: "Saving | None"
    scaling: tuple[tuple[int, float], ...]
    """Devices, and units a second on so many with the same layout for each replica."""
    rates: Rates

    def events(self) -> list[Event]:
        """The time line of the best choice."""
        return timeline(self.best.setup, self.rates)


@dataclass(frozen=True)
class Saving:
    """How often to save, and what becomes of wall time then."""

    between_failures: float
    stall: float
    interval: float
    goodput: Goodput


def plan(
    recipe: "str | os.PathLike[str] | Recipe | None" = None,
    cluster: str | None = None,
    gpus: int | None = None,
    overrides: Sequence[str] = (),
) -> Planned:
    """Foretell a recipe (a file's path or a value) as `phalanx plan` does, writing nothing. Raises PhalanxError for
    whatever the user can mend."""
    if isinstance(recipe, Recipe):
        loaded = Loaded(expanded(recipe, Path.cwd()), None, Path.cwd(), {})
    else:
        loaded = load_recipe(None if recipe is None else Path(recipe), overrides)
    return plan_run(loaded, cluster, gpus, Path.cwd())


def plan_run(loaded: Loaded, cluster: str | None, gpus: int | None = None, folder: Path | None = None) -> Planned:
    """Foretell a recipe on a cluster (a name of the catalogue or a file), on `gpus` of its devices (default all), with
    the best layout, micro-batch, recomputation, precision and schedule of those that the recipe leaves open.

    RecipeError: nothing is called so, the recipe cannot be followed, or nothing fits; the message tells by how much and
    what would. UsageError: the cluster has not so many devices.
    """
    where = sized(cluster, gpus, folder) if cluster is not None else _here()
    devices = gpus or where.devices
    recipe = loaded.recipe
    if isinstance(recipe.layout, Layout):
        with loaded.locating():
            check(recipe, loaded.folder, devices, loaded.at)
    facts = foretold(recipe.data, loaded.folder)
    profile = profile_of(loaded, facts)
    found, rates, room = _searched(recipe, profile, where, devices)
    if not found.options:
        raise RecipeError(_why_nothing(recipe, found, where, devices, room))
    return _outcome(recipe, where, devices, profile, found, rates)


def _here() -> Cluster:
    """This machine, as it was measured. UsageError: it was not."""
    path = default_cluster_file(this_machine())
    if not path.is_file():
        raise UsageError("--cluster: not given, and this machine has not been measured: run `phalanx probe` first")
    return load_cluster(str(path))


def sized(text: str, gpus: int | None, folder: Path | None = None) -> Cluster:
    """The cluster of that name with as many nodes as `gpus` devices need; one that is described in a file, or whose
    number is given, must have them."""
    if gpus is not None and gpus < 1:
        raise UsageError(f"--gpus {gpus}: expected a number of devices, at least 1")
    cluster = load_cluster(text, folder)
    if gpus is None or gpus <= cluster.devices:
        return cluster
    named = ":" not in text and "/" not in text and not text.lower().endswith((".yaml", ".yml"))
    if named and cluster.node.scale_out is not None:
        count = load_cluster(cluster.node.name).node.count
        return load_cluster(f"{cluster.node.name}:{-(-gpus // count)}")
    raise UsageError(
        f"--gpus {gpus}: {cluster.name} has {cluster.devices} devices, {cluster.nodes} nodes of {cluster.node.count}"
    )


def _searched(recipe: Recipe, profile: Profile, cluster: Cluster, devices: int) -> tuple[Found, Rates, float]:
    """The best of every precision that may be used."""
    device = cluster.node.accelerator
    ours = replace(stack(OURS), fused=recipe.compile is not False)
    room = device.memory_gib * GIB * USABLE
    space = Space(
        devices=devices,
        batch=recipe.batch.global_,
        layout=recipe.layout if isinstance(recipe.layout, Layout) else None,
        micro=recipe.batch.micro if isinstance(recipe.batch.micro, int) else None,
        ways=("none", "selective", "full") if recipe.memory.recompute == "auto" else (recipe.memory.recompute,),
        domain=cluster.domain,
        replicas_only=recipe.exchange.exact == "replicas",
        sequences=profile.tokens > 1,
    )

    def needed(setup: Setup) -> float:
        return memory_of(recipe, setup).total

    best: tuple[Found, Rates] | None = None
    for precision in _precisions(recipe, device.tflops):
        rates = rates_of(device, precision, ours)
        base = Setup(
            profile,
            cluster,
            space.layout or Layout(),
            1,
            recipe.batch.global_,
            precision,
            stack=ours,
            optimizer=recipe.optim.name,
        )
        found = search(base, rates, priced_by(rates), space, partial(step, rates=rates), needed, room)
        if best is None or (found.options and (not best[0].options or _first(found) < WORTH * _first(best[0]))):
            best = found, rates
    assert best is not None
    if best[0].valid == 0:
        raise RecipeError(
            f"batch.global: {recipe.batch.global_} samples and {profile.blocks} blocks cannot be divided among "
            f"{devices} devices; a multiple of {devices} samples can"
        )
    return best[0], best[1], room


def _first(found: Found) -> float:
    return found.options[0].seconds


def _precisions(recipe: Recipe, known: Any) -> list[str]:
    """What may be computed in: as given, else what `auto` chooses from, if the device has it."""
    if recipe.precision != "auto":
        if recipe.precision not in known and not (recipe.precision == "bf16" and "fp16" in known):
            raise RecipeError(
                f"precision: {recipe.precision} is not among what the device computes in: {', '.join(known)}"
            )
        return [recipe.precision]
    return [name for name in ("bf16", "fp32") if name in known] or [next(iter(known))]


def memory_of(recipe: Recipe, setup: Setup) -> Footprint:
    """Bytes on the fullest device, with the recipe's optimizer and loss."""
    return footprint(setup, **trained_how(recipe, setup))


def trained_how(recipe: Recipe, setup: Setup) -> dict[str, Any]:
    """What `footprint` must know beside a setup. Of logits that are too large for `memory.loss: auto`, chunks."""
    loss = recipe.memory.loss
    if loss == "auto":
        head = setup.profile.segments[-1]
        heads = (op for op in head.of("forward") if isinstance(op, Product))
        logits = max((4.0 * op.m.at(setup.micro) * op.n.at(setup.micro) for op in heads), default=0.0)
        loss = "chunked" if recipe.task == LANGUAGE and logits > LARGE_LOGITS else "whole"
    return {
        "optimizer": recipe.optim.name,
        "state": recipe.optim.state,
        "offload": recipe.memory.offload == "optimizer",
        "loss": loss,
    }


def _why_nothing(recipe: Recipe, found: Found, cluster: Cluster, devices: int, room: float) -> str:
    """That nothing fits: by how much, and what would."""
    assert found.least is not None
    least = found.least
    over = (least.memory - room) / GIB
    device = cluster.node.accelerator
    lines = (
        f"nothing fits: of {found.valid:,} layouts for {devices:,} x {device.name} not even the smallest, which is "
        f"{over:.1f} GiB above {USABLE:.0%} of a device's {device.memory_gib:g}"
    )
    fit = what_would_fit(least.setup, **trained_how(recipe, least.setup), capacity=room)
    return f"{lines}. It {fit.words}"


def _outcome(recipe: Recipe, cluster: Cluster, devices: int, profile: Profile, found: Found, rates: Rates) -> Planned:
    best = found.options[0]
    nodes = -(-devices // cluster.node.count)
    spread = SPREAD[rates.layer]
    samples = float(recipe.batch.global_ * recipe.steps)
    peak = rates.peak * devices
    flops = (profile.flops("forward") + profile.flops("backward")) * recipe.batch.global_
    saving = _saving(cluster, nodes, profile.parameters, best.seconds)
    productive = saving.goodput.productive if saving is not None else 1.0
    load = min(1.0, 0.3 + 0.7 * best.parts.products / best.seconds)
    money = budget(samples, recipe.batch.global_, best.seconds, devices, cluster.prices, productive)
    energy = run_energy(cluster, money.seconds, nodes, load)
    if energy is not None:
        money = budget(samples, recipe.batch.global_, best.seconds, devices, cluster.prices, productive, energy)
    return Planned(
        recipe=recipe,
        cluster=cluster,
        devices=devices,
        best=best,
        others=found.options[1:],
        footprint=memory_of(recipe, best.setup),
        low=best.seconds * 2.718281828 ** (-NINETY * spread),
        high=best.seconds * 2.718281828 ** (NINETY * spread),
        layer=rates.layer,
        valid=found.valid,
        parameters=profile.parameters,
        tokens=profile.tokens,
        mfu=flops / best.seconds / peak,
        budget=money,
        energy=energy,
        saving=saving,
        scaling=_scaling(best.setup, rates),
        rates=rates,
    )


def _saving(cluster: Cluster, nodes: int, parameters: int, step_seconds: float) -> Saving | None:
    """The best interval between checkpoints; None where nobody knows how often nodes fail or how fast storage is."""
    failures = failure_interval(cluster.reliability, nodes)
    storage = cluster.storage
    rates = [rate for rate in (storage.write_gbps, (storage.node_write_gbps or 0.0) * nodes) if rate]
    if failures is None or not rates:
        return None
    stall = max(STALL * parameters * SAVED_BYTES / (min(rates) * 1e9), 0.01)
    interval = max(daly_interval(stall, failures), step_seconds)
    restart = cluster.reliability.restart_seconds or RESTART
    return Saving(failures, stall, interval, goodput(stall, restart, failures, interval))


def _scaling(setup: Setup, rates: Rates) -> tuple[tuple[int, float], ...]:
    """Units a second on one replica and on more, up to what was asked for; each replica divided as chosen, and with as
    many samples of its own (weak scaling)."""
    layout = setup.layout
    own = setup.batch // setup.parts
    curve = []
    groups = setup.parts
    sizes = sorted({1, groups, *(2**power for power in range(groups.bit_length()) if 2**power <= groups)})
    for count in sizes:
        shard = min(layout.shard, count)
        if count % shard:
            continue
        smaller = layout.model_copy(update={"replicate": count // shard, "shard": shard})
        here = replace(setup, layout=smaller, batch=own * count)
        units = here.batch * setup.profile.tokens / step(here, rates).total
        curve.append((smaller.world, units))
    return tuple(curve)


def foretold_here(recipe: Recipe, folder: Path, cluster: Cluster, world: int) -> Parts | None:
    """Seconds of a step by cause, of a resolved recipe on this machine as it was measured; None where that cannot be
    said: on GPUs and for divided models by data sheets only, and not for what was not measured."""
    measured, layout = cluster.measured, recipe.layout
    if measured is None or cluster.node.accelerator.generation != "cpu" or not isinstance(layout, Layout):
        return None
    if layout.replicate != layout.world or recipe.compile is not False or recipe.precision not in ("fp32", "bf16"):
        return None
    assert isinstance(recipe.batch.micro, int)
    loaded = Loaded(recipe, None, folder, {})
    profile = profile_of(loaded, foretold(recipe.data, folder), numbers_of(recipe.precision))
    ours = replace(stack(OURS), fused=False, computing=1.0, communicating=1.0, launch=0.0, step_seconds=0.0)
    setup = Setup(
        profile,
        cluster,
        layout,
        recipe.batch.micro,
        recipe.batch.global_,
        recipe.precision,
        recompute="none" if recipe.memory.recompute == "auto" else recipe.memory.recompute,
        zero=0,
        stack=ours,
    )
    try:
        return step_here(setup, rates_of(cluster.node.accelerator, "fp32", ours), Here(measured, world))
    except NotMeasured:
        return None


def probed(machine: Machine) -> Cluster | None:
    """This machine as `phalanx probe` measured it under today's driver and libraries; None where it did not."""
    path = default_cluster_file(machine)
    try:
        return load_cluster(str(path)) if path.is_file() else None
    except RecipeError:  # torn, or of another version: `phalanx probe` makes it again, and training does without
        return None


def automatic_layout(recipe: Recipe, folder: Path, cluster: Cluster, world: int) -> tuple[Layout, str] | None:
    """The layout for so many workers of this machine, and why. On a CPU whole replicas, as long as these fit: what
    dividing a model costs there is not foretold. None where the model cannot be followed, or nothing is foretold to
    fit."""
    loaded = Loaded(recipe, None, folder, {})
    device = cluster.node.accelerator
    try:
        if device.generation == "cpu":
            profile = profile_of(loaded, foretold(recipe.data, folder), numbers_of(recipe.precision))
            micro = recipe.batch.micro if isinstance(recipe.batch.micro, int) else 1
            base = Setup(profile, cluster, Layout(replicate=world), micro, recipe.batch.global_, "fp32", zero=0)
            needed = memory_of(recipe, replace(base, recompute="full")).total
            share = device.memory_gib * GIB / world
            return (base.layout, "a replica fits into each worker's memory") if needed <= share else None
        planned = plan_run(loaded, str(default_cluster_file(this_machine())), world)
    except RecipeError:
        return None
    layout, seconds = planned.best.setup.layout, planned.best.seconds
    others = f"; the next best takes {planned.others[0].seconds:.3g} s" if planned.others else ""
    return layout, f"the fastest of {planned.valid} that are valid: {seconds:.3g} s a step foretold{others}"


def chosen(planned: Planned) -> dict[str, Any]:
    """The choice, as dotted keys of the recipe and their values; those that the recipe gives already are left out."""
    setup, recipe = planned.best.setup, planned.recipe
    layout = {name: value for name, value in setup.layout.model_dump().items() if value not in (1, None, False, "1f1b")}
    if setup.chunks > 1:
        layout["schedule"] = "interleaved"
        layout["stages"] = stages_of(setup)
    changes: dict[str, Any] = {}
    if not isinstance(recipe.layout, Layout):
        changes["layout"] = layout or {"replicate": 1}
    if recipe.batch.micro == "auto":
        changes["batch.micro"] = setup.micro
    if recipe.memory.recompute == "auto":
        changes["memory.recompute"] = setup.recompute
    if recipe.precision == "auto":
        changes["precision"] = setup.precision
    return changes


def stages_of(setup: Setup) -> list[int]:
    """Blocks of each stage of an interleaved pipeline."""
    from phalanx.plan.step import even

    return even(setup.profile.blocks, setup.layout.pipeline * setup.chunks)


def text_of(loaded: Loaded, overrides: Sequence[str], planned: Planned) -> str:
    """The recipe as it was given, with overrides and the choice in it."""
    device = planned.cluster.node.accelerator.name
    name = "the default recipe" if loaded.path is None else loaded.path.name
    head = [
        f"Planned by `phalanx plan` from {name} for {planned.devices} x {device}:",
        f"a step is foretold to take {planned.best.seconds:.3g} s ({planned.low:.3g} to {planned.high:.3g}) and "
        f"{planned.best.memory / GIB:.1f} GiB of a device.",
    ]
    text = "" if loaded.path is None else loaded.path.read_text(encoding="utf-8-sig")
    return rewritten(text, overrides, chosen(planned), {}, head)


def parts_against(best: Parts, other: Parts) -> str:
    """Why another choice loses: what it spends more on than the best, in a word or two."""
    more = {name: getattr(other, name) - getattr(best, name) for name in WORDS}
    worst = max(more, key=lambda name: more[name])
    return f"{WORDS[worst]}: +{100 * more[worst] / best.total:.0f} %" if more[worst] > 0.002 * best.total else "as fast"
