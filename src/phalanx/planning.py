"""`phalanx plan`: a recipe's model followed, a cluster described, the best layout chosen, and what a run would take.

Nothing is trained and no data are read: text is only asked for its tokenizer. What was learned of a model is kept,
so that a second plan needs no torch.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.beside import Call
from phalanx.cluster import Cluster, load_cluster, this_machine
from phalanx.cluster.datasheet import torch_devices
from phalanx.cluster.probe import default_cluster_file
from phalanx.data.foretold import foretold
from phalanx.data.reader import Facts
from phalanx.errors import RecipeError, UsageError
from phalanx.plan.buckets import best_bucket
from phalanx.plan.budget import Budget, budget
from phalanx.plan.energy import Energy, Slowdown, capped_slowdown, device_power, run_energy
from phalanx.plan.fitting import what_would_fit
from phalanx.plan.footprint import Footprint, footprint
from phalanx.plan.holdings import keeping
from phalanx.plan.memory import LANGUAGE, LARGE_LOGITS
from phalanx.plan.opening import Opening, opening_of
from phalanx.plan.profile import Product, Profile
from phalanx.plan.rates import SPREAD, Rates
from phalanx.plan.resolve import LOSSES
from phalanx.plan.search import Found, Option, Space, search
from phalanx.plan.setup import Setup, wire_of
from phalanx.plan.stacks import own_stack, rates_of
from phalanx.plan.stalls import Saving, saving_of, stalled
from phalanx.plan.step import Parts, step
from phalanx.plan.timeline import WORDS, Event, timeline
from phalanx.plan.work import priced_by
from phalanx.profiling import profile_of
from phalanx.recipe import Recipe, check, expanded, grown, load_recipe
from phalanx.recipe.load import Loaded
from phalanx.recipe.rewrite import rewritten
from phalanx.recipe.schema import Parallelism

GIB = 2.0**30
USABLE = 0.95
"""Of a device's memory: what predictions of memory are off by at most is left free."""
NINETY = 1.645
LEAST_PRODUCTIVE = 1e-3
"""Share of the time below which a run on failing nodes does not come to its end."""
WORTH = 0.99
"""Another precision than the usual one must save at least so much."""


@dataclass(frozen=True)
class Planned:
    """A recipe on a cluster: the choice, what comes close, and what a run takes."""

    recipe: Recipe
    cluster: Cluster
    devices: int
    best: Option
    others: tuple[Option, ...]
    footprint: Footprint
    opening: Opening | None
    """The first steps, where they are of another kind; `best`, `low` and `high` are of those that follow."""
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
    saving: Saving | None
    cap: Slowdown | None
    """What the cluster's power cap makes of computing; it is in all times."""
    scaling: tuple[tuple[int, float], ...]
    """Devices, and units a second on so many with the same layout for each replica."""
    rates: Rates

    def events(self) -> list[Event]:
        """The time line of the best choice."""
        return timeline(self.best.setup, self.rates, parts=self.best.parts)


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


def plan_run(
    loaded: Loaded,
    cluster: str | None,
    gpus: int | None = None,
    folder: Path | None = None,
    beside: Call | None = None,
) -> Planned:
    """Foretell a recipe on a cluster (a name of the catalogue or a file), on `gpus` of its devices (default all), with
    the best layout, micro-batch, recomputation, precision and schedule of those that the recipe leaves open. Its model
    is followed in the process `beside`, where one is given.

    RecipeError: nothing is called so, the recipe cannot be followed, or nothing fits; the message tells by how much and
    what would. UsageError: the cluster has not so many devices.
    """
    where = sized(cluster, gpus, folder) if cluster is not None else _here(loaded.recipe.device)
    with loaded.locating():
        check_kind(loaded.recipe.device, where)
    devices = gpus or where.devices
    loaded = replace(loaded, recipe=grown(loaded.recipe, devices))
    recipe = loaded.recipe
    with loaded.locating():
        check(recipe, loaded.folder, devices if isinstance(recipe.parallelism, Parallelism) else None, loaded.at)
    facts = foretold(recipe.data, loaded.folder)
    profile = profile_of(loaded, facts, beside=beside)
    found, rates, room = _searched(recipe, profile, where, devices)
    if not found.options:
        raise RecipeError(_why_nothing(recipe, found, where, devices, room))
    cap = _capped(where, found.options[0])
    if cap is not None and cap.expected > 1:
        found, rates, room = _searched(recipe, profile, where, devices, cap.expected)
    return _outcome(recipe, where, devices, profile, found, rates, cap, _sample_bytes(facts))


def _here(device: str) -> Cluster:
    """This machine, as it was measured with a recipe's device. UsageError: it was not."""
    path = default_cluster_file(this_machine(device=device))
    if not path.is_file():
        probe = "CUDA_VISIBLE_DEVICES= phalanx calibrate" if device == "cpu" else "phalanx calibrate"
        raise UsageError(f"--cluster: not given, and this machine has not been measured: run `{probe}` first")
    return load_cluster(str(path))


def check_kind(device: str, cluster: Cluster) -> None:
    """RecipeError where a recipe's `device` is another than the cluster computes with."""
    kinds = torch_devices(cluster.node.accelerator)
    if device == "auto" or device in kinds:
        return
    valid = " or ".join([*(f"device={kind}" for kind in kinds), "device=auto"])
    other = {"cpu": ", such as cpu", "cuda": ", such as h100"}.get(device, "")
    raise RecipeError(
        f"device: found {device}, but {cluster.name} computes with {cluster.node.accelerator.name}; use {valid}, or "
        f"another --cluster{other}"
    )


def sized(text: str, gpus: int | None, folder: Path | None = None) -> Cluster:
    """The cluster of that name with as many nodes as `gpus` devices need; one that is described in a file, or whose
    number is given, must have them."""
    if gpus is not None and gpus < 1:
        raise UsageError(f"--num-gpus {gpus}: expected a number of devices, at least 1")
    cluster = load_cluster(text, folder)
    if gpus is None or gpus <= cluster.devices:
        return cluster
    named = ":" not in text and "/" not in text and not text.lower().endswith((".yaml", ".yml"))
    if named and cluster.node.scale_out is not None:
        count = load_cluster(cluster.node.name).node.count
        return load_cluster(f"{cluster.node.name}:{-(-gpus // count)}")
    raise UsageError(
        f"--num-gpus {gpus}: {cluster.name} has {cluster.devices} devices: {cluster.nodes} nodes x {cluster.node.count}"
    )


def _capped(cluster: Cluster, option: Option) -> Slowdown | None:
    """What the cluster's power cap makes of computing, for the load that an option is without it."""
    device, cap = cluster.node.accelerator, cluster.prices.power_cap_w
    drawn = device_power(device, _load(option.parts))
    if cap is None or drawn is None:
        return None
    try:
        return capped_slowdown(device, cap, drawn)
    except ValueError as why:
        raise RecipeError(f"{cluster.name}: prices.power_cap_w: {cap:g} W: {why}") from None


def _load(parts: Parts) -> float:
    """Of the devices, as `device_power` takes it: products draw the most."""
    return min(1.0, 0.3 + 0.7 * parts.products / parts.total)


def _sample_bytes(facts: Facts) -> float:
    """Bytes of a sample as it lies in storage: tokens of 32 bits, pixels of 8."""
    return 4.0 * facts.sequence if facts.sequence else float(math.prod(facts.shape or ()))


def _searched(
    recipe: Recipe, profile: Profile, cluster: Cluster, devices: int, slower: float = 1.0
) -> tuple[Found, Rates, float]:
    """The best of every precision that may be used, where computing takes `slower` times as long as usual."""
    device, usual = cluster.node.accelerator, own_stack(cluster.node.accelerator, devices)
    ours = replace(usual, computing=usual.computing * slower, fused=recipe.compile is not False)
    room = device.memory_gib * GIB * USABLE
    space = Space(
        devices=devices,
        batch=recipe.batch.global_size,
        layout=recipe.parallelism if isinstance(recipe.parallelism, Parallelism) else None,
        micro=recipe.batch.micro_size if isinstance(recipe.batch.micro_size, int) else None,
        ways=("none", "selective", "full")
        if recipe.memory.activation_checkpointing == "auto"
        else (recipe.memory.activation_checkpointing,),
        domain=cluster.domain,
        replicas_only=recipe.determinism == "elastic" or recipe.local_sgd is not None,
        sequences=profile.tokens > 1,
    )

    def needed(setup: Setup) -> float:
        return memory_of(recipe, setup).total

    offload = recipe.optimizer.offload
    kept = keeping(recipe.optimizer.name, recipe.optimizer.state_dtype, offload, recipe.optimizer.momentum)
    best: tuple[Found, Rates] | None = None
    for precision in _precisions(recipe, device.tflops):
        rates = rates_of(device, precision, ours)
        base = Setup(
            profile,
            cluster,
            space.layout or Parallelism(),
            1,
            recipe.batch.global_size,
            precision,
            stack=ours,
            optimizer=recipe.optimizer.name,
            wire=wire_of(recipe, profile),
        )
        if best is not None and best[0].options and rates.kept_up < best[1].kept_up:
            continue  # nothing else differs but that it takes more memory
        found = search(base, rates, priced_by(rates), space, partial(step, rates=rates), needed, room, kept)
        if best is None or (found.options and (not best[0].options or _first(found) < WORTH * _first(best[0]))):
            best = found, rates
    assert best is not None
    if best[0].valid == 0:
        raise RecipeError(
            f"batch.global_size: {recipe.batch.global_size} samples and {profile.blocks} blocks cannot be divided "
            f"among {devices} devices; a multiple of {devices} samples can"
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
    """What `footprint` must know beside a setup. Of logits that are too large for `memory.chunked_loss: auto`,
    chunks."""
    chunked = recipe.memory.chunked_loss
    if chunked == "auto":
        head = setup.profile.segments[-1]
        heads = (op for op in head.of("forward") if isinstance(op, Product))
        logits = max((4.0 * op.m.at(setup.micro) * op.n.at(setup.micro) for op in heads), default=0.0)
        chunked = recipe.task == LANGUAGE and logits > LARGE_LOGITS
    return {
        "optimizer": recipe.optimizer.name,
        "state": recipe.optimizer.state_dtype,
        "offload": recipe.optimizer.offload,
        "loss": LOSSES[chunked],
        "momentum": recipe.optimizer.momentum,
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


def _outcome(
    recipe: Recipe,
    cluster: Cluster,
    devices: int,
    profile: Profile,
    found: Found,
    rates: Rates,
    cap: Slowdown | None,
    sample_bytes: float,
) -> Planned:
    nodes = -(-devices // cluster.node.count)
    saving = saving_of(cluster, nodes, profile.parameters, found.options[0].seconds)
    read = sample_bytes * recipe.batch.global_size
    options = tuple(
        replace(each, parts=stalled(each.parts, cluster.storage, nodes, read, saving)) for each in found.options
    )
    best = options[0]
    spread = SPREAD[rates.layer]
    low, high = (cap.low / cap.expected, cap.high / cap.expected) if cap is not None else (1.0, 1.0)
    samples = float(recipe.batch.global_size * recipe.steps)
    peak = rates.peak * devices
    flops = (profile.flops("forward") + profile.flops("backward")) * recipe.batch.global_size
    # what checkpoints cost is in the step already
    productive = saving.goodput.productive + saving.goodput.blocked if saving is not None else 1.0
    if productive < LEAST_PRODUCTIVE:
        raise RecipeError(
            f"{cluster.name}: {nodes:,} nodes would fail again before they have made progress; check reliability and "
            "storage of the cluster, or use fewer --num-gpus"
        )
    load = _load(best.parts)
    opening = opening_of(recipe, best, rates)
    usual = best.seconds if opening is None else opening.mean(best.seconds, recipe.steps)
    money = budget(samples, recipe.batch.global_size, usual, devices, cluster.prices, productive)
    energy = run_energy(cluster, money.seconds, nodes, load)
    if energy is not None:
        money = budget(samples, recipe.batch.global_size, usual, devices, cluster.prices, productive, energy)
    return Planned(
        recipe=recipe,
        cluster=cluster,
        devices=devices,
        best=best,
        others=options[1:],
        footprint=memory_of(recipe, best.setup),
        opening=opening,
        low=best.seconds * math.exp(-NINETY * spread) * low,
        high=best.seconds * math.exp(NINETY * spread) * high,
        layer=rates.layer,
        valid=found.valid,
        parameters=profile.parameters,
        tokens=profile.tokens,
        mfu=flops / best.seconds / peak,
        budget=money,
        energy=energy,
        saving=saving,
        cap=cap,
        scaling=_scaling(best.setup, rates),
        rates=rates,
    )


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


def chosen(planned: Planned) -> dict[str, Any]:
    """The choice, as dotted keys of the recipe and their values; those that the recipe gives already are left out."""
    setup, recipe = planned.best.setup, planned.recipe
    layout = {name: value for name, value in setup.layout.model_dump().items() if value not in (1, None, False, "1f1b")}
    if setup.chunks > 1:
        layout["schedule"] = "interleaved"
        layout["stages"] = stages_of(setup)
    changes: dict[str, Any] = {}
    if not isinstance(recipe.parallelism, Parallelism):
        changes["parallelism"] = layout or {"replicate": 1}
    if recipe.batch.micro_size == "auto":
        changes["batch.micro_size"] = setup.micro
    if recipe.memory.activation_checkpointing == "auto":
        changes["memory.activation_checkpointing"] = setup.recompute
    if recipe.precision == "auto":
        changes["precision"] = setup.precision
    if recipe.grad_sync.bucket_mib == "auto" and (bucket := best_bucket(setup, planned.rates)) is not None:
        changes["grad_sync.bucket_mib"] = bucket
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
