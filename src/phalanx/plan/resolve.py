"""Resolve a recipe: replace every `auto` by a value, and say why. Pure: numbers in, recipe out.

What changes bits (precision, micro-batch, threads, compile, exchange) is chosen once, on the first start of a run, and
stays pinned in `resolved.yaml`; `go_on` makes the recipe of a later start from it.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.errors import RecipeError
from phalanx.recipe import Recipe
from phalanx.recipe.checks import divisors
from phalanx.recipe.devices import kind_of
from phalanx.recipe.exchanges import (
    BUCKET,
    DETERMINISM_LIMIT,
    DETERMINISTIC_COST,
    FIRST,
    MIB,
    NONDETERMINISTIC,
    bucket_between_nodes,
    first_steps,
    given_start,
    gradients_of_one,
    is_chosen_while_training,
    start_key,
    travels_beside,
)
from phalanx.recipe.schema import MOST_THREADS, Parallelism

GAIN = 1.2
"""bf16 is chosen when forward and backward of this model are at least so many times faster than in fp32."""
AUTOMATIC = ("fp32", "bf16")
"""Precisions among which `auto` chooses."""
COMPILED_STEPS = 100
"""Steps from which compiling on a GPU is worth it: it takes 10 to 30 s and saves up to half of a step."""
LOSSES = ("whole", "chunked")
"""How trials call the loss without and with `memory.chunked_loss`."""
COMMON_WORLDS = (1, 2, 3, 4, 6, 8)
PREDICTION = (
    "forward and backward of a micro-batch, timed alone, times a worker's micro-batches, plus the update; "
    "the exchange of gradients between workers is not in it yet"
)


@dataclass(frozen=True)
class Choice:
    """One `auto` and what became of it."""

    key: str
    value: Any
    why: str


def choose_threads(recipe: Recipe, cores: int, world: int) -> Choice:
    """CPU threads of a worker."""
    if recipe.num_threads != "auto":
        return Choice("num_threads", recipe.num_threads, "given")
    if recipe.determinism == "elastic":
        return Choice("num_threads", 1, "determinism: elastic needs the same number on any world size")
    threads = min(max(1, cores // world), MOST_THREADS)
    return Choice("num_threads", threads, f"{cores} cores for {world} {'worker' if world == 1 else 'workers'}")


def likely_precision(recipe: Recipe, device: str, bf16: bool = True) -> str:
    """What the precision will probably be, before anything was timed. `bf16`: whether a GPU computes in that."""
    if recipe.precision != "auto":
        return recipe.precision
    return "bf16" if kind_of(device).is_gpu and bf16 else "fp32"


def precisions_to_time(recipe: Recipe, device: str, bf16: bool = True) -> list[str]:
    """The precisions whose time decides. On a GPU with `bf16` that is taken without a race: its tensor cores have no
    fp32."""
    if recipe.precision != "auto":
        return [recipe.precision]
    return list(AUTOMATIC) if device == "cpu" else [likely_precision(recipe, device, bf16)]


def choose_compile(recipe: Recipe, device: str, blocks: int, compiler: bool = True) -> Choice:
    """Whether a model with so many repeated blocks is compiled. On a GPU eager kernels are bound by launches and
    memory, and compiling takes the time of one block; a run of a few steps does not earn it back. `compiler`: whether
    this machine has one of C."""
    if recipe.compile != "auto":
        return Choice("compile", recipe.compile, "given")
    if not kind_of(device).compiles:
        return Choice("compile", False, f"the rule on {kind_of(device).what}")
    if not compiler:
        return Choice("compile", False, "torch.compile needs a C compiler (gcc or CC) and Python.h on a GPU")
    if not blocks:
        return Choice("compile", False, "the model has no repeated blocks")
    if isinstance(recipe.parallelism, Parallelism) and recipe.parallelism.splits_backward:
        return Choice(
            "compile", False, f"blocks of a {recipe.parallelism.pipeline_schedule} pipeline cannot be compiled"
        )
    if recipe.steps < COMPILED_STEPS:
        return Choice("compile", False, f"{recipe.steps:,} steps, fewer than {COMPILED_STEPS}, do not earn it back")
    return Choice("compile", True, f"{blocks} repeated blocks on a GPU")


def choose_exact(recipe: Recipe, trial: Mapping[str, Any], device: str) -> list[Choice]:
    """What `determinism: auto` becomes on a GPU, by what a trial found deterministic kernels to cost. RecipeError
    where the recipe asks for bits that an operation of its model cannot keep on this device."""
    exact, name, cost = recipe.determinism, trial.get(NONDETERMINISTIC), trial.get(DETERMINISTIC_COST)
    if name is not None and exact in ("fixed-world", "elastic"):
        raise RecipeError(
            f"determinism: {name} has no deterministic kernel on this device, so no run gives the same bits twice; "
            "use determinism=off, or a model without it"
        )
    if exact != "auto" or device == "cpu":
        return []
    if not kind_of(device).deterministic:
        why = f"torch does not say which kernels of {kind_of(device).what} are deterministic"
        return [Choice("determinism", "off", f"{why}: a run that resumes may end with other bits")]
    if name is not None:
        why = f"{name} has no deterministic kernel on this device: a run that resumes may end with other bits"
        return [Choice("determinism", "off", why)]
    if cost is None:
        return [Choice("determinism", "off", "what deterministic kernels cost on this device could not be timed")]
    why = f"deterministic kernels cost {max(cost, 0.0):.1%} of forward and backward"
    if cost < DETERMINISM_LIMIT:
        return [Choice("determinism", "fixed-world", f"{why}, less than {DETERMINISM_LIMIT:.0%}")]
    return [
        Choice("determinism", "off", f"{why}: a run that resumes may end with other bits; fixed-world promises them")
    ]


def choose_precision(recipe: Recipe, seconds: Mapping[str, float], device: str = "cpu", bf16: bool = True) -> Choice:
    """The precision, by the time that this very model takes for forward and backward. Those that ran out of memory have
    no time. `bf16`: whether a GPU computes in that."""
    if recipe.precision != "auto":
        return Choice("precision", recipe.precision, "given")
    if not bf16:
        return Choice("precision", "fp32", "this GPU does not compute in bf16; fp16 may be faster")
    timed = [name for name in AUTOMATIC if name in seconds]
    if not timed:
        why = f"the rule for a model on {device} that could not be timed"
        return Choice("precision", likely_precision(recipe, device), why)
    if len(timed) == 1:
        rule = timed == precisions_to_time(recipe, device)
        return Choice("precision", timed[0], f"the rule on {device}" if rule else "the other ran out of memory")
    ratio = seconds["fp32"] / seconds["bf16"]
    why = f"forward and backward of a micro-batch take {seconds['fp32']:.3g} s in fp32, {seconds['bf16']:.3g} s in bf16"
    return Choice("precision", "bf16" if ratio >= GAIN else "fp32", f"{why}: {ratio:.2f} x")


def choose_bucket(recipe: Recipe, parameters: int, world: int, nodes: int, device: str = "cpu") -> list[Choice]:
    """How many gradients travel together, where something is to be said about it: replicas of a model of so many
    trained parameters exchange theirs beside backward, between nodes. On one node an exchange takes from the processors
    what it would hide behind."""
    layout = Parallelism.model_validate(laid_out(recipe, world))
    if recipe.grad_sync.bucket_mib != "auto" or nodes == 1 or not travels_beside(recipe, layout, device):
        return []
    gradients = gradients_of_one(parameters, layout)
    why = f"of {gradients / MIB:.3g} MiB of gradients, for {nodes} nodes: what is sent early is hidden behind backward"
    return [Choice("grad_sync.bucket_mib", bucket_between_nodes(gradients, recipe.grad_sync), why)]


def choose_start(recipe: Recipe) -> list[Choice]:
    """After how many steps an exchange becomes what it is named for, where something is to be said about it."""
    key, steps = start_key(recipe), first_steps(recipe)
    if key is None or (given_start(recipe) != "auto" and steps < recipe.steps):
        return []
    why = "no fewer" if steps == FIRST else f"a third of {recipe.steps:,} steps together"
    if steps >= recipe.steps:
        why = f"the run ends before that, after {recipe.steps:,} steps"
    return [Choice(key, steps, why)]


def choices_untried(recipe: Recipe, cores: int, world: int, device: str, bf16: bool = True) -> list[Choice]:
    """Threads, memory, micro-batch and precision for a loop of the user's own, whose model nobody has tried."""
    threads = choose_threads(recipe, cores, world)
    micro = Choice("batch.micro_size", recipe.batch.micro_size, "given")
    if recipe.batch.micro_size == "auto":
        parts = shared_among(recipe, world)
        micro = Choice("batch.micro_size", max(1, recipe.batch.global_size // parts), "a worker's whole share at once")
    precision = choose_precision(recipe, {}, device, bf16)
    if recipe.precision == "auto" and bf16:
        why = f"the rule for a loop of one's own on {device}"
        precision = Choice("precision", likely_precision(recipe, device), why)
    recompute = Choice("memory.activation_checkpointing", recipe.memory.activation_checkpointing, "given")
    if recipe.memory.activation_checkpointing == "auto":
        recompute = Choice("memory.activation_checkpointing", "none", "the rule for a loop of one's own")
    loss = Choice("memory.chunked_loss", recipe.memory.chunked_loss, "given")
    if recipe.memory.chunked_loss == "auto":
        loss = Choice("memory.chunked_loss", False, "the loss is the loop's own")
    return [threads, recompute, loss, micro, precision, *choose_exact(recipe, {}, device), *choose_start(recipe)]


def resolve(recipe: Recipe, choices: list[Choice], world: int) -> Recipe:
    """The recipe with `choices` for threads, memory, micro-batch and precision made, and the remaining `auto` set to
    what this version does."""
    chosen = {choice.key: choice.value for choice in choices}
    values = recipe.model_dump()
    values["num_threads"] = chosen["num_threads"]
    values["batch"]["micro_size"] = chosen["batch.micro_size"]
    values["precision"] = chosen["precision"]
    values["parallelism"] = laid_out(recipe, world)
    for key in ("activation_checkpointing", "chunked_loss"):
        values["memory"][key] = chosen[f"memory.{key}"]
    values["compile"] = chosen.get("compile", recipe.compile if recipe.compile != "auto" else False)
    grad_sync = values["grad_sync"]
    if recipe.determinism == "auto":
        values["determinism"] = chosen.get("determinism", "fixed-world")
    if recipe.grad_sync.bucket_mib == "auto":
        grad_sync["bucket_mib"] = chosen.get("grad_sync.bucket_mib", BUCKET)
    if recipe.grad_sync.warmup_steps == "auto":
        grad_sync["warmup_steps"] = FIRST
    if recipe.grad_sync.algorithm == "auto" and not is_chosen_while_training(recipe):
        grad_sync["algorithm"] = "all-reduce"
    if recipe.local_sgd is not None:
        values["local_sgd"]["warmup_steps"] = first_steps(recipe)
    return Recipe.model_validate(values)


def laid_out(recipe: Recipe, world: int) -> dict[str, Any]:
    """The layout that is given, or every worker a replica."""
    return (
        recipe.parallelism if isinstance(recipe.parallelism, Parallelism) else Parallelism(replicate=world)
    ).model_dump()


def parts_of(recipe: Recipe, world: int) -> int:
    """Among how many groups of workers the batch is divided."""
    layout = recipe.parallelism
    return layout.replicate * layout.shard if isinstance(layout, Parallelism) else world


def shared_among(recipe: Recipe, world: int) -> int:
    """Among how many the batch must be divisible.

    Under `determinism: elastic` there must be enough micro-batches for other numbers of replicas to share, whatever it
    is now: otherwise the choice, and with it the bits, would depend on it.
    """
    parts = parts_of(recipe, world)
    if recipe.determinism != "elastic":
        return parts
    shard = recipe.parallelism.shard if isinstance(recipe.parallelism, Parallelism) else 1
    common = [size * shard for size in COMMON_WORLDS]
    return math.lcm(*(size for size in common if recipe.batch.global_size % size == 0), parts)


def go_on(resolved: Recipe, given: Recipe, world: int) -> Recipe:
    """The recipe of a run that goes on: what was resolved, with the keys that are free to change, and the places of
    prepared data, as given now."""
    values, new = resolved.model_dump(), given.model_dump()
    for key in ("name", "steps", "checkpoint", "fault_tolerance", "callbacks", "device"):
        values[key] = new[key]
    for key in ("every", "max_samples"):
        values["evaluation"][key] = new["evaluation"][key]
    values["data"]["source"] = new["data"]["source"]
    values["evaluation"]["source"] = new["evaluation"]["source"]
    values["parallelism"] = layout = layout_again(resolved, given, world)
    values["batch"]["micro_size"] = fitting_micro(resolved, given, layout["replicate"] * layout["shard"])
    return Recipe.model_validate(values)


def layout_again(resolved: Recipe, given: Recipe, world: int) -> dict[str, Any]:
    """The layout of a run that goes on: as given now, or as it was, with as many replicas as the workers make."""
    if isinstance(given.parallelism, Parallelism) or not isinstance(resolved.parallelism, Parallelism):
        return laid_out(given, world)
    replica = resolved.parallelism.world // resolved.parallelism.replicate
    if world % replica:
        raise RecipeError(
            f"parallelism: a replica of this run takes {replica} workers, and {world} are no multiple of that; "
            "give the parallelism to go on with"
        )
    return {**resolved.parallelism.model_dump(), "replicate": world // replica}


def fitting_micro(resolved: Recipe, given: Recipe, world: int) -> int | str:
    """The micro-batch of a run that goes on: what was resolved. One that nobody gave and that a changed number of
    workers cannot share gets smaller where that costs no promise: under `elastic` it is part of the bits. `world`:
    workers, or groups of them, that share the batch."""
    micro, batch = resolved.batch.micro_size, resolved.batch.global_size
    if given.batch.micro_size != "auto" or resolved.determinism == "elastic" or batch % world or micro == "auto":
        return micro
    return max(size for size in divisors(batch // world) if size <= micro)


def plan_of(
    profile: Mapping[str, Any], choices: list[Choice], seconds: Mapping[str, float], recipe: Recipe
) -> dict[str, Any]:
    """plan.json: what was found out and chosen, and the step time that follows; null where nothing could be timed."""
    micro = recipe.batch.micro_size
    assert isinstance(micro, int)
    own = recipe.batch.global_size // (micro * parts_of(recipe, 1))
    parts = None
    if recipe.precision in seconds:
        parts = {"computing": own * seconds[recipe.precision], "exchange": 0.0, "optimizer": seconds["update"]}
    peaks = profile.get("peaks") or {}
    by_way: Mapping[str, int | None] = peaks.get(LOSSES[recipe.memory.chunked_loss is True]) or next(
        iter(peaks.values()), {}
    )
    return {
        **{key: value for key, value in profile.items() if key != "peaks"},
        "peak_bytes_per_sample": by_way,
        "activation_bytes_per_sample": by_way.get(recipe.memory.activation_checkpointing) or 0,
        "auto_choices": [asdict(choice) for choice in choices],
        "predicted_step_s": None if parts is None else sum(parts.values()),
        "predicted_breakdown_s": parts,
        "prediction_rule": PREDICTION,
    }
