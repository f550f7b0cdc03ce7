"""What a step needs of a worker's memory, and what follows: how much is recomputed, how the loss is computed, and how
many samples at once. Pure: what a model needs was measured by trials (`train/trial.py`) and comes in as numbers.

A step holds the training state (weights, gradients, moments of the optimizer) and, for each sample of the micro-batch,
what forward keeps for backward. The first is counted, the second measured, and divided among ranks as the layout does.
It is an estimate, good enough to begin with: a trial of the choice follows, and `failed` says what did not survive one.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from phalanx.errors import RecipeError
from phalanx.plan.resolve import LOSSES, Choice, parts_of, shared_among
from phalanx.plan.setup import WIRES, Wire, wire_of
from phalanx.recipe import Recipe
from phalanx.recipe.checks import divisors
from phalanx.recipe.devices import sizes_for
from phalanx.recipe.exchanges import candidates
from phalanx.recipe.pipelines import fitting, stages_of
from phalanx.recipe.schema import Parallelism

WAYS = ("none", "selective", "full")
"""Ways of recomputing, the cheapest first."""
PART = {"cpu": (1, 2), "cuda": (17, 20)}
"""What a step may fill of a worker's memory where the micro-batch is chosen: a CPU's is shared with data, checkpoints
that are being written and other programs, a GPU's is split into pieces of which some never fit."""
LARGE_LOGITS = 256 * 10**6
"""Bytes of fp32 logits from which it pays on a CPU never to hold them all."""
LOGITS_PART = 16
"""On a GPU, all logits may take this part of its memory: in chunks they cost a pass over the head's weight each."""
LANGUAGE = "language-modeling"


@dataclass(frozen=True)
class Needs:
    """What trials found out about a model: parameters that are trained and that are `frozen`, and the bytes that a
    sample adds at the peak of forward and backward, by way of computing the loss, then by way of recomputing. None: so
    it cannot be computed, or a single sample was too much already. `logits` are the fp32 bytes of those of a sample."""

    trainable: int
    frozen: int
    peaks: Mapping[str, Mapping[str, int | None]]
    logits: int = 0


@dataclass(frozen=True)
class Room:
    """What one worker has: bytes of memory on a device of torch, among so many workers."""

    device: str
    memory: int
    world: int
    bf16: bool = True
    """Whether a GPU computes in that."""


@dataclass(frozen=True)
class Option:
    """One way to go: with what it takes, bytes of the state and of activations."""

    recompute: str
    loss: str
    micro: int
    state: int
    activations: int


Tried = tuple[str, str, int]
"""How a trial went about it: recompute, loss and micro-batch."""


def parameter_bytes(recipe: Recipe, device: str) -> int:
    """Bytes of training state for each parameter that is trained: fp32 weight and gradient, and what the optimizer
    keeps (muon's matrices need half of what is counted, its other parameters all)."""
    optim = recipe.optimizer
    if optim.offload and device != "cpu":
        kept = 0
    elif optim.name in ("sgd", "lars"):
        kept = 4 if optim.momentum or optim.name == "lars" else 0  # lars has its buffer at momentum 0, too
    else:
        kept = {"fp32": 8, "bf16": 4, "int8": 2}[optim.state_dtype]
    single = isinstance(recipe.parallelism, Parallelism) and recipe.parallelism.replicate == 1
    methods = candidates(recipe, device)
    wires = [wire_of(recipe)] if len(methods) == 1 else [WIRES.get(each, Wire()) for each in methods]
    travelling = max(0.0 if single and not wire.keeps else wire.memory for wire in wires)
    # Matrix products in 16 bits keep a copy of their weights from forward to backward; FSDP gathers them in 16 bits.
    cast = device != "cpu" and recipe.precision not in ("fp32", "tf32") and _layout(recipe).shard == 1
    return 8 + kept + math.ceil(travelling) + 2 * cast


def state_bytes(recipe: Recipe, trainable: int, frozen: int, device: str) -> int:
    """Bytes of weights, gradients and optimizer state on one worker; what is frozen has only its weights."""
    return (parameter_bytes(recipe, device) * trainable + 4 * frozen) // _ranks(recipe)


def divides_state(recipe: Recipe) -> bool:
    """Whether no worker holds the whole model."""
    return _ranks(recipe) > 1


def fits_whole(recipe: Recipe, needs: Needs, room: Room) -> bool:
    """Whether one process could train the whole model, undivided, with at least a sample at once."""
    peaks = [peak for ways in needs.peaks.values() for peak in ways.values() if peak is not None]
    state = parameter_bytes(recipe, room.device) * needs.trainable + 4 * needs.frozen
    return state + min(peaks, default=0) <= room.memory


def activation_bytes(recipe: Recipe, peak: int, micro: int, world: int) -> int:
    """Bytes that micro-batches of `micro` samples hold on one worker at the peak of a step, where a sample takes `peak`
    without any layout. Stages of a pipeline hold their part of several micro-batches at once."""
    layout = _layout(recipe)
    samples = float(micro)
    if layout.pipeline > 1:
        in_all = recipe.batch.global_size // parts_of(recipe, world) // micro
        at_once = in_all if layout.pipeline_schedule == "gpipe" else min(in_all, layout.pipeline)
        samples = micro * at_once / layout.pipeline
    ranks = layout.context
    if layout.tensor > 1 and (recipe.data.seq_len // layout.context) % layout.tensor == 0:
        ranks *= layout.tensor  # they cut the sequence wherever they do not cut the width
    return math.ceil(peak * samples / ranks)


def sizes(recipe: Recipe, world: int) -> list[int]:
    """Micro-batches that may be chosen, the largest first: they divide what a worker gets of the batch, and leave a
    pipeline enough of them. RecipeError when there are none."""
    if recipe.batch.micro_size != "auto":
        return [recipe.batch.micro_size]
    share = recipe.batch.global_size // shared_among(recipe, world)
    found, layout = divisors(share)[::-1], _layout(recipe)
    if layout.pipeline == 1:
        return found
    stages = stages_of(layout)
    running = [size for size in found if fitting(layout.pipeline_schedule, share // size, stages, layout.pipeline)]
    # With twice as many micro-batches as stages, a third of the time is lost to filling and draining at most.
    for least in (2 * stages, stages, 1):
        if enough := [size for size in running if share // size >= least]:
            return enough
    raise RecipeError(
        f"batch.micro_size: no micro-batch lets {layout.pipeline_schedule} run {stages} stages on {layout.pipeline} "
        f"ranks with the {share} samples of a step; raise batch.global_size, to "
        f"{stages * (recipe.batch.global_size // share)} or a multiple"
    )


def smaller_micro(recipe: Recipe) -> int | None:
    """The micro-batch to go on with when that of a resolved recipe was too large; None when there is none smaller."""
    values = recipe.model_dump()
    now, values["batch"]["micro_size"] = recipe.batch.micro_size, "auto"
    assert isinstance(now, int)
    # `auto` wants micro-batches enough for a pipeline, and smaller ones only make more of them.
    return next((size for size in sizes(Recipe.model_validate(values), 1) if size < now), None)


def large_logits(room: Room) -> int:
    """Bytes of fp32 logits from which they are computed in chunks."""
    return LARGE_LOGITS if room.device == "cpu" else max(LARGE_LOGITS, room.memory // LOGITS_PART)


def losses_to_try(recipe: Recipe, logits: int, room: Room) -> list[str]:
    """Ways of computing the loss whose need of memory is worth a trial; `logits` as in `Needs`."""
    if recipe.task != LANGUAGE:
        return ["whole"]
    if _layout(recipe).tensor > 1:
        return ["chunked"]  # ranks that hold parts of the vocabulary never have all logits
    if recipe.memory.chunked_loss != "auto":
        return [LOSSES[recipe.memory.chunked_loss is True]]
    return (
        ["whole", "chunked"]
        if _logits(recipe, logits, sizes(recipe, room.world)[0]) > large_logits(room)
        else ["whole"]
    )


def _ways(recipe: Recipe) -> tuple[str, ...]:
    """Of recomputing, as little as possible first."""
    if recipe.memory.activation_checkpointing != "auto":
        return (recipe.memory.activation_checkpointing,)
    return tuple(way for way in WAYS if way != "selective" or not _layout(recipe).splits_backward)


def options(recipe: Recipe, needs: Needs, loss: str, room: Room) -> list[Option]:
    """What is predicted to fit, the best first: as little recomputed as possible, then as many samples at once."""
    given = recipe.batch.micro_size != "auto"
    most, least = (1, 1) if given else PART[sizes_for(room.device)]
    usable = room.memory * most // least
    state = state_bytes(recipe, needs.trainable, needs.frozen, room.device)
    peaks = needs.peaks.get(loss) or next(iter(needs.peaks.values()))
    ways = _ways(recipe)
    found = []
    for way in ways:
        if (peak := peaks.get(way)) is None:
            continue
        for micro in sizes(recipe, room.world):
            held = activation_bytes(recipe, peak, micro, room.world)
            if state + held <= usable:
                found.append(Option(way, loss, micro, state, held))
    return found


Forecast = Callable[[str, int], float | None]
"""Seconds of a step with a way of recomputing and a micro-batch; None where that cannot be said."""
WORTH = 0.98
"""A smaller micro-batch must be foretold to take less than this share of the largest one's time."""


def choose_memory(
    recipe: Recipe, needs: Needs, room: Room, failed: Collection[Tried] = (), forecast: Forecast | None = None
) -> list[Choice]:
    """Recomputation, loss and micro-batch. RecipeError when nothing fits; it names a micro-batch that would where one
    was given. A micro-batch that was given may fill all of the memory. Of micro-batches that fit the largest is taken,
    or the one that `forecast` says to be fastest."""
    loss, found = _loss(recipe, needs, room)
    left = [one for one in found if (one.recompute, one.loss, one.micro) not in failed]
    if not left:
        raise RecipeError(_too_large(recipe, needs, room, loss, failed))
    best, why = left[0], ""
    if forecast is not None and recipe.batch.micro_size == "auto":
        best, why = _fastest(left, forecast)
    return [
        Choice("memory.activation_checkpointing", best.recompute, _why_recompute(recipe, needs, best, failed)),
        Choice("memory.chunked_loss", best.loss == "chunked", _why_loss(recipe, needs, room, best)),
        Choice("batch.micro_size", best.micro, why or _why_micro(recipe, room, best, failed)),
    ]


def _fastest(left: Sequence[Option], forecast: Forecast) -> tuple[Option, str]:
    """The option that is foretold to be fastest among those that recompute as little as the first, and why it is taken;
    no reason where that is the first itself."""
    first = left[0]
    usual = forecast(first.recompute, first.micro)
    if usual is None:
        return first, ""
    alike = [one for one in left if one.recompute == first.recompute]
    seconds = {one.micro: forecast(one.recompute, one.micro) or math.inf for one in alike}
    best = min(alike, key=lambda one: seconds[one.micro])
    if seconds[best.micro] >= WORTH * usual:
        return first, ""
    told = f"{seconds[best.micro]:.3g} s a step foretold from the probe, {usual:.3g} s with {first.micro}"
    return best, told


def _loss(recipe: Recipe, needs: Needs, room: Room) -> tuple[str, list[Option]]:
    """How to compute the loss, and what fits then."""
    if recipe.memory.chunked_loss != "auto":
        given = LOSSES[recipe.memory.chunked_loss is True]
        return given, options(recipe, needs, given, room)
    if "chunked" in needs.peaks:
        # By the micro-batch that it allows itself: with all logits fewer samples fit, and it would seem to be needless.
        chunked = options(recipe, needs, "chunked", room)
        if "whole" not in needs.peaks or (
            chunked and _logits(recipe, needs.logits, chunked[0].micro) > large_logits(room)
        ):
            return "chunked", chunked
    return "whole", options(recipe, needs, "whole", room)


def _logits(recipe: Recipe, logits: int, micro: int) -> int:
    """Bytes of the fp32 logits of a micro-batch on one worker."""
    return logits * micro // _layout(recipe).context


def _why_recompute(recipe: Recipe, needs: Needs, best: Option, failed: Collection[Tried]) -> str:
    if recipe.memory.activation_checkpointing != "auto":
        return "given"
    if best.recompute == "none":
        return "activations fit into memory"
    before = WAYS[: WAYS.index(best.recompute)]
    tried = any(way in before for way, _, _ in failed)
    peaks = needs.peaks.get(best.loss) or {}
    taken = ", ".join(f"{peak / 1e6:.0f} MB with {way}" for way in before if (peak := peaks.get(way)) is not None)
    what = "a trial ran out of memory" if tried else "not even one sample would fit"
    return f"with less of it {what}" + (f" (a sample takes {taken})" if taken else "")


def _why_loss(recipe: Recipe, needs: Needs, room: Room, best: Option) -> str:
    if recipe.memory.chunked_loss != "auto":
        return "given"
    if recipe.task != LANGUAGE:
        return "chunks are for language models"
    if best.loss == "chunked" and "whole" not in needs.peaks:
        return "tensor ranks hold parts of the vocabulary"
    size = f"all logits of a micro-batch take {_logits(recipe, needs.logits, best.micro) / 1e6:.0f} MB in fp32"
    if best.loss == "whole" and _logits(recipe, needs.logits, best.micro) > large_logits(room):
        return f"{size}, but this model's output layer cannot be computed in chunks"
    return f"{size}, {'more' if best.loss == 'chunked' else 'no more'} than {large_logits(room) / 1e6:.0f}"


def _why_micro(recipe: Recipe, room: Room, best: Option, failed: Collection[Tried]) -> str:
    if recipe.batch.micro_size != "auto":
        return "given"
    of_all = sizes(recipe, room.world)
    parts = shared_among(recipe, room.world)
    layout = _layout(recipe)
    if best.micro != of_all[0]:
        why = f"the largest whose activations ({best.activations / 1e9:.2f} GB) fit into {_part(room)} of the memory"
    elif layout.pipeline > 1:
        count = recipe.batch.global_size // parts // best.micro
        why = f"{count} micro-batches a step for the {stages_of(layout)} stages of the pipeline"
    elif recipe.determinism == "elastic":
        why = f"determinism: elastic: {parts} micro-batches can be shared by any number of workers that divides it"
    else:
        why = "a worker's whole share at once"
    larger = sorted({size for way, _, size in failed if way == best.recompute and size > best.micro})
    if larger:
        why = f"{why}; a trial of {larger[0]} ran out of memory"
    return why


def _too_large(recipe: Recipe, needs: Needs, room: Room, loss: str, failed: Collection[Tried]) -> str:
    """Why nothing is left, and what would be right."""
    micro = recipe.batch.micro_size
    state = state_bytes(recipe, needs.trainable, needs.frozen, room.device)
    peaks = needs.peaks.get(loss) or next(iter(needs.peaks.values()))
    ways = _ways(recipe)
    per_sample = [peak for way in ways if (peak := peaks.get(way)) is not None]
    more = "" if ways[-1] == "full" else ", memory.activation_checkpointing=full"
    if isinstance(micro, int):
        automatic = recipe.model_dump()
        automatic["batch"]["micro_size"] = "auto"
        others = options(Recipe.model_validate(automatic), needs, loss, room)
        least = max((size for _, _, size in failed), default=micro)
        fitting = max((one.micro for one in others if one.micro < least), default=None)
        cure = (
            f"batch.micro_size={fitting} would fit" if fitting else f"not even one would fit: use a smaller model{more}"
        )
        if failed or not per_sample:
            return f"batch.micro_size: a trial of {micro} samples at once ran out of memory; {cure}"
        needed = state + activation_bytes(recipe, min(per_sample), micro, room.world)
        return (
            f"batch.micro_size: {micro} samples at once need at least {needed / 1e9:.1f} GB, and a worker has "
            f"{room.memory / 1e9:.1f} GB; {cure}"
        )
    if failed or not per_sample:
        what = "trials ran out of memory, the last with " + (
            f"{min(size for _, _, size in failed)} samples at once" if failed else "one sample"
        )
        return f"batch.micro_size: not even one micro-batch fits: {what}; use a smaller model or sequence{more}"
    most, least = PART[sizes_for(room.device)]
    left = max(room.memory * most // least - state, 0)
    smallest = activation_bytes(recipe, min(per_sample), sizes(recipe, room.world)[-1], room.world)
    return (
        f"batch.micro_size: not even one sample fits: it takes {smallest / 1e6:.0f} MB in forward and backward, and "
        f"{left / 1e6:.0f} MB are left beside parameters and optimizer state; "
        f"use a smaller model or sequence{more}, or give batch.micro_size to try all the same"
    )


def _part(room: Room) -> str:
    most, least = PART[sizes_for(room.device)]
    return "half" if (most, least) == (1, 2) else f"{most / least:.0%}"


def _layout(recipe: Recipe) -> Parallelism:
    return recipe.parallelism if isinstance(recipe.parallelism, Parallelism) else Parallelism()


def _ranks(recipe: Recipe) -> int:
    """Among how many ranks parameters are divided."""
    layout = _layout(recipe)
    return layout.shard * layout.context * layout.tensor * layout.pipeline
