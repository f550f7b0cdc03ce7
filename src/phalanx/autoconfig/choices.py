"""Resolve a recipe: replace every `auto` by a value, and say why. Pure: numbers in, recipe out.

What changes bits (precision, micro-batch, threads, compile, exchange) is chosen once, on the first start of a run, and
stays pinned in `resolved.yaml`; `resume_recipe` makes the recipe of a later start from it. For another number of
workers, when nodes are lost or join, only data parallelism changes: global batch, data order and loss stay.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from phalanx.errors import RecipeError
from phalanx.formatting import BYTES_PER_MIB, format_plural
from phalanx.recipe import Recipe, ResolvedRecipe
from phalanx.recipe.devices import device_kind_of
from phalanx.recipe.diff import KEYS_FREE_ON_RESUME
from phalanx.recipe.grad_sync_defaults import (
    DEFAULT_BUCKET_MIB,
    DEFAULT_WARMUP_STEPS,
    DETERMINISTIC_SLOWDOWN_KEY,
    MAX_DETERMINISM_SLOWDOWN,
    NONDETERMINISTIC_OP_KEY,
    given_start,
    gradient_bytes_per_rank,
    inter_node_bucket_mib,
    num_warmup_steps,
    overlaps_with_backward,
    start_key,
)
from phalanx.recipe.schema import Parallelism
from phalanx.recipe.work_division import find_batch_problems, find_parallelism_problems, list_divisors

MIN_BF16_SPEEDUP = 1.2
"""bf16 is chosen when forward and backward of this model are faster than in fp32 by at least this factor."""
AUTO_PRECISIONS = ("fp32", "bf16")
"""Precisions among which `auto` chooses."""
MIN_STEPS_TO_COMPILE = 100
"""Steps from which compiling on a GPU is worth it: it takes 10 to 30 s and saves up to half of a step."""
LOSS_MODES = ("whole", "chunked")
"""How trials call the loss without and with `memory.chunked_loss`."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables with which a user, torchrun or a cluster limits the threads of a process."""
CORES_REASON = "cores for"
"""Marks a number of threads that comes from the number of cores alone: fewer may be tried."""
COMMON_WORLD_SIZES = (1, 2, 3, 4, 6, 8)
PREDICTION_RULE = (
    "forward and backward of a micro-batch, timed alone, times a worker's micro-batches, plus the update; "
    "without gradient synchronization"
)


@dataclass(frozen=True)
class AutoChoice:
    """One `auto` and what became of it."""

    key: str
    value: Any
    reason: str


def choose_num_threads(
    recipe: Recipe, cores: int, world_size: int, environ: Mapping[str, str] = MappingProxyType({})
) -> AutoChoice:
    """Choose the CPU threads of a worker: OMP_NUM_THREADS where it is set, else the cores divided by the workers."""
    if recipe.num_threads != "auto":
        return AutoChoice("num_threads", recipe.num_threads, "given")
    if recipe.determinism == "elastic":
        return AutoChoice("num_threads", 1, "determinism: elastic needs the same number on any world size")
    for name in THREAD_VARIABLES:
        first = environ.get(name, "").split(",")[0].strip()  # OMP_NUM_THREADS may list one number a nesting level
        if first.isdecimal() and int(first) > 0:
            return AutoChoice("num_threads", int(first), f"{name}={environ[name]}")
    num_threads = max(1, cores // world_size)
    return AutoChoice("num_threads", num_threads, f"{cores} {CORES_REASON} {format_plural(world_size, 'worker')}")


def predict_precision(recipe: Recipe, device: str, bf16: bool = True) -> str:
    """What the precision will probably be, before anything was timed. `bf16`: whether the device has instructions for
    it."""
    if recipe.precision != "auto":
        return recipe.precision
    return "bf16" if device_kind_of(device).is_gpu and bf16 else "fp32"


def precisions_to_time(recipe: Recipe, device: str, bf16: bool = True) -> list[str]:
    """Return the precisions to time. On a GPU with `bf16` there is nothing to time: its tensor cores have no fp32.
    Without `bf16` there is nothing to time either: the hardware has no instructions for it."""
    if recipe.precision != "auto":
        return [recipe.precision]
    return list(AUTO_PRECISIONS) if device == "cpu" and bf16 else [predict_precision(recipe, device, bf16)]


def choose_compile(recipe: Recipe, device: str, num_blocks: int, compiler: bool = True) -> AutoChoice:
    """Choose whether to compile a model with `num_blocks` repeated blocks. On a GPU eager kernels are bound by launches
    and memory, and compiling takes the time of one block; a run of a few steps does not earn that back. `compiler`:
    whether this machine has a C compiler."""
    if recipe.compile != "auto":
        return AutoChoice("compile", recipe.compile, "given")
    if not device_kind_of(device).is_gpu:
        return AutoChoice("compile", False, f"the rule on {device_kind_of(device).description}")
    if not compiler:
        return AutoChoice("compile", False, "torch.compile needs a C compiler (gcc or CC) and Python.h on a GPU")
    if not num_blocks:
        return AutoChoice("compile", False, "the model has no repeated blocks")
    if isinstance(recipe.parallelism, Parallelism) and recipe.parallelism.splits_backward:
        schedule = recipe.parallelism.pipeline_schedule
        return AutoChoice("compile", False, f"blocks of a {schedule} pipeline cannot be compiled")
    if recipe.steps < MIN_STEPS_TO_COMPILE:
        reason = f"{recipe.steps:,} steps, fewer than {MIN_STEPS_TO_COMPILE}, do not pay back compilation"
        return AutoChoice("compile", False, reason)
    return AutoChoice("compile", True, f"{num_blocks} repeated blocks on a GPU")


def choose_determinism(recipe: Recipe, trial: Mapping[str, Any], device: str) -> list[AutoChoice]:
    """What `determinism: auto` becomes on a GPU, by what a trial found deterministic kernels to cost. RecipeError
    where the recipe asks for bits that an operation of its model cannot keep on this device."""
    determinism, slowdown = recipe.determinism, trial.get(DETERMINISTIC_SLOWDOWN_KEY)
    nondeterministic_op = trial.get(NONDETERMINISTIC_OP_KEY)
    if nondeterministic_op is not None and determinism in ("fixed-world", "elastic"):
        raise RecipeError(
            f"determinism: {nondeterministic_op} has no deterministic kernel on this device, so no run gives the same "
            "bits twice; use determinism=off, or a model without it"
        )
    if determinism != "auto" or device == "cpu":
        return []
    if nondeterministic_op is not None:
        reason = f"{nondeterministic_op} has no deterministic kernel on this device"
        return [AutoChoice("determinism", "off", f"{reason}: a run that resumes may end with other bits")]
    if slowdown is None:
        return [AutoChoice("determinism", "off", "what deterministic kernels cost on this device could not be timed")]
    reason = f"deterministic kernels cost {max(slowdown, 0.0):.1%} of forward and backward"
    if slowdown < MAX_DETERMINISM_SLOWDOWN:
        return [AutoChoice("determinism", "fixed-world", f"{reason}, less than {MAX_DETERMINISM_SLOWDOWN:.0%}")]
    reason += ": a run that resumes may end with other bits; fixed-world promises them"
    return [AutoChoice("determinism", "off", reason)]


def choose_precision(
    recipe: Recipe, seconds: Mapping[str, float], device: str = "cpu", bf16: bool = True
) -> AutoChoice:
    """The precision, by the time that this very model takes for forward and backward. Those that ran out of memory have
    no time. `bf16`: whether the device has instructions for it."""
    if recipe.precision != "auto":
        return AutoChoice("precision", recipe.precision, "given")
    if not bf16:
        reason = "CPU has no instructions for bf16" if device == "cpu" else "GPU has none for bf16; fp16 may be faster"
        return AutoChoice("precision", "fp32", f"this {reason}")
    timed_precisions = [name for name in AUTO_PRECISIONS if name in seconds]
    if not timed_precisions:
        reason = f"the rule for a model on {device} that could not be timed"
        return AutoChoice("precision", predict_precision(recipe, device), reason)
    if len(timed_precisions) == 1:
        is_rule = timed_precisions == precisions_to_time(recipe, device)
        reason = f"the rule on {device}" if is_rule else "the other ran out of memory"
        return AutoChoice("precision", timed_precisions[0], reason)
    ratio = seconds["fp32"] / seconds["bf16"]
    times = f"{seconds['fp32']:.3g} s in fp32, {seconds['bf16']:.3g} s in bf16"
    reason = f"forward and backward of a micro-batch take {times}: {ratio:.2f} x"
    return AutoChoice("precision", "bf16" if ratio >= MIN_BF16_SPEEDUP else "fp32", reason)


def choose_bucket_mib(
    recipe: Recipe, num_parameters: int, world_size: int, num_nodes: int, device: str = "cpu"
) -> list[AutoChoice]:
    """Choose the bucket size where it matters: replicas of a model of `num_parameters` trained parameters reduce
    gradients between nodes, overlapped with backward. On one node the reduction takes from backward the processors that
    it would overlap with."""
    parallelism = Parallelism.model_validate(parallelism_values(recipe, world_size))
    is_chosen = recipe.grad_sync.bucket_mib == "auto" and num_nodes > 1
    if not is_chosen or not overlaps_with_backward(recipe, parallelism, device):
        return []
    gradient_bytes = gradient_bytes_per_rank(num_parameters, parallelism)
    reason = (
        f"of {gradient_bytes / BYTES_PER_MIB:.3g} MiB of gradients, for {num_nodes} nodes: buckets that are "
        "sent early overlap with backward"
    )
    return [AutoChoice("grad_sync.bucket_mib", inter_node_bucket_mib(gradient_bytes, recipe.grad_sync), reason)]


def choose_warmup_steps(recipe: Recipe) -> list[AutoChoice]:
    """After how many steps an exchange becomes what it is named for, where something is to be said about it."""
    key, steps = start_key(recipe), num_warmup_steps(recipe)
    if key is None or (given_start(recipe) != "auto" and steps < recipe.steps):
        return []
    reason = "no fewer" if steps == DEFAULT_WARMUP_STEPS else f"a third of {recipe.steps:,} steps together"
    if steps >= recipe.steps:
        reason = f"the run ends before that, after {recipe.steps:,} steps"
    return [AutoChoice(key, steps, reason)]


def choose_without_trials(
    recipe: Recipe,
    cores: int,
    world_size: int,
    device: str,
    bf16: bool = True,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> list[AutoChoice]:
    """Choose threads, memory, micro-batch and precision for a session, in which the model is not tried first."""

    def choose(key: str, given: Any, value: Any, reason: str) -> AutoChoice:
        return AutoChoice(key, value, reason) if given == "auto" else AutoChoice(key, given, "given")

    memory, batch = recipe.memory, recipe.batch
    micro_size = max(1, batch.global_size // required_divisor(recipe, world_size))
    precision = choose_precision(recipe, {}, device, bf16)
    if recipe.precision == "auto" and bf16:
        precision = replace(precision, reason=f"the rule for a session on {device}")
    return [
        choose_num_threads(recipe, cores, world_size, environ),
        choose("memory.activation_checkpointing", memory.activation_checkpointing, "none", "the rule for a session"),
        choose("memory.chunked_loss", memory.chunked_loss, False, "a session computes its own loss"),
        choose("batch.micro_size", batch.micro_size, micro_size, "one micro-batch for each worker and step"),
        precision,
        *choose_determinism(recipe, {}, device),
        *choose_warmup_steps(recipe),
    ]


def resolve_recipe(recipe: Recipe, choices: list[AutoChoice], world_size: int) -> ResolvedRecipe:
    """The recipe with `auto_choices` for threads, memory, micro-batch and precision made, and the remaining `auto` set
    to what this version does."""
    values_by_key = {choice.key: choice.value for choice in choices}
    values = recipe.model_dump()
    values["num_threads"] = values_by_key["num_threads"]
    values["batch"]["micro_size"] = values_by_key["batch.micro_size"]
    values["precision"] = values_by_key["precision"]
    values["parallelism"] = parallelism_values(recipe, world_size)
    for key in ("activation_checkpointing", "chunked_loss"):
        values["memory"][key] = values_by_key[f"memory.{key}"]
    values["compile"] = values_by_key.get("compile", recipe.compile if recipe.compile != "auto" else False)
    grad_sync = values["grad_sync"]
    if recipe.determinism == "auto":
        values["determinism"] = values_by_key.get("determinism", "fixed-world")
    if recipe.grad_sync.bucket_mib == "auto":
        grad_sync["bucket_mib"] = values_by_key.get("grad_sync.bucket_mib", DEFAULT_BUCKET_MIB)
    if recipe.grad_sync.warmup_steps == "auto":
        grad_sync["warmup_steps"] = DEFAULT_WARMUP_STEPS
    if recipe.grad_sync.algorithm == "auto":
        grad_sync["algorithm"] = "all-reduce"
    if recipe.local_sgd is not None:
        values["local_sgd"]["warmup_steps"] = num_warmup_steps(recipe)
    return ResolvedRecipe.model_validate(values)


def parallelism_values(recipe: Recipe, world_size: int) -> dict[str, Any]:
    """The layout that is given, or every worker a replica."""
    given = recipe.parallelism
    return (given if isinstance(given, Parallelism) else Parallelism(replicate=world_size)).model_dump()


def num_data_parallel_groups(recipe: Recipe, world_size: int) -> int:
    """Among how many groups of workers the batch is divided."""
    parallelism = recipe.parallelism
    return parallelism.replicate * parallelism.shard if isinstance(parallelism, Parallelism) else world_size


def required_divisor(recipe: Recipe, world_size: int) -> int:
    """Among how many the batch must be divisible.

    Under `determinism: elastic` there must be enough micro-batches for other numbers of replicas to share, whatever it
    is now: otherwise the choice, and with it the bits, would depend on it.
    """
    num_groups = num_data_parallel_groups(recipe, world_size)
    if recipe.determinism != "elastic":
        return num_groups
    shard_size = recipe.parallelism.shard if isinstance(recipe.parallelism, Parallelism) else 1
    common_groups = [size * shard_size for size in COMMON_WORLD_SIZES]
    return math.lcm(*(size for size in common_groups if recipe.batch.global_size % size == 0), num_groups)


def resume_recipe(resolved: ResolvedRecipe, given: Recipe, world_size: int) -> ResolvedRecipe:
    """Return the recipe of a resumed run: the resolved recipe, with the keys that may change, and the paths of prepared
    data, as given now."""
    values, new = resolved.model_dump(), given.model_dump()
    for key in KEYS_FREE_ON_RESUME:
        section, _, name = key.partition(".")
        if name:
            values[section][name] = new[section][name]
        else:
            values[section] = new[section]
    values["data"]["source"] = new["data"]["source"]
    values["evaluation"]["source"] = new["evaluation"]["source"]
    parallelism = resume_parallelism(resolved, given, world_size)
    values["parallelism"] = parallelism.model_dump()
    values["batch"]["micro_size"] = divide_micro_size(resolved, given, parallelism.replicate * parallelism.shard)
    return ResolvedRecipe.model_validate(values)


def build_plan_json(
    trial_profile: Mapping[str, Any],
    auto_choices: list[AutoChoice],
    seconds: Mapping[str, float],
    recipe: ResolvedRecipe,
) -> dict[str, Any]:
    """plan.json: what was found out and chosen, and the step time that follows; null where nothing could be timed."""
    micro_size = recipe.batch.micro_size
    micro_batches_per_worker = recipe.batch.global_size // (micro_size * num_data_parallel_groups(recipe, 1))
    breakdown_s = None
    if recipe.precision in seconds:
        breakdown_s = {
            "computing": micro_batches_per_worker * seconds[recipe.precision],
            "grad_sync": 0.0,
            "optimizer": seconds["update"],
        }
    peak_bytes = trial_profile.get("peaks") or {}
    peak_by_mode: Mapping[str, int | None] = peak_bytes.get(LOSS_MODES[recipe.memory.chunked_loss is True]) or next(
        iter(peak_bytes.values()), {}
    )
    return {
        **{key: value for key, value in trial_profile.items() if key != "peaks"},
        "peak_bytes_per_sample": peak_by_mode,
        "activation_bytes_per_sample": peak_by_mode.get(recipe.memory.activation_checkpointing) or 0,
        "auto_choices": [asdict(choice) for choice in auto_choices],
        "predicted_step_s": None if breakdown_s is None else sum(breakdown_s.values()),
        "predicted_breakdown_s": breakdown_s,
        "prediction_rule": PREDICTION_RULE,
    }


def divide_recipe(full: ResolvedRecipe, given: Recipe, world_size: int) -> ResolvedRecipe:
    """Divide a run among `world_size` workers. `given`: the recipe as the user wrote it.

    Raises:
        RecipeError: it cannot be divided; says by what.
    """
    values = full.model_dump()
    parallelism = divide_parallelism(full.parallelism, world_size)
    num_groups = parallelism.replicate * parallelism.shard
    values["parallelism"] = parallelism.model_dump()
    values["batch"]["micro_size"] = divide_micro_size(full, given, num_groups)
    divided = ResolvedRecipe.model_validate(values)
    problems = [
        *find_batch_problems(divided.batch.global_size, divided.batch.micro_size, num_groups),
        *find_parallelism_problems(divided, parallelism, world_size),
    ]
    if problems:
        raise RecipeError("; ".join(f"{key}: {problem}" for key, problem in problems))
    return divided


def divide_parallelism(parallelism: Parallelism, world_size: int) -> Parallelism:
    """Divide replicate x shard again. Tensor, pipeline, context and expert ranks stay as they are.

    Parameters are sharded over at least as many ranks as before, or over all: a rank then holds no more of them than
    before, if that is possible.

    Raises:
        RecipeError: the other dimensions do not divide `world_size`.
    """
    fixed_ranks = parallelism.tensor * parallelism.pipeline * parallelism.context
    if world_size % fixed_ranks:
        raise RecipeError(
            f"parallelism: tensor x pipeline x context takes {fixed_ranks} workers, and {world_size} workers are not a "
            "multiple of that; give the parallelism to resume with"
        )
    num_groups = world_size // fixed_ranks
    shard = next((size for size in list_divisors(num_groups) if size >= parallelism.shard), num_groups)
    return parallelism.model_copy(update={"replicate": num_groups // shard, "shard": shard})


def resume_parallelism(resolved: ResolvedRecipe, given: Recipe, world_size: int) -> Parallelism:
    """Return the parallelism of a resumed run: as given now, or as before, divided again among the workers."""
    if isinstance(given.parallelism, Parallelism):
        return given.parallelism
    return divide_parallelism(resolved.parallelism, world_size)


def divide_micro_size(resolved: ResolvedRecipe, given: Recipe, num_groups: int) -> int:
    """Return the micro-batch for another number of workers: the resolved one. If the recipe leaves it `auto` and the
    new number of workers does not divide the batch evenly, it becomes smaller, except under `elastic`, where it is part
    of the bits. `num_groups`: workers, or groups of workers, that share the batch."""
    micro_size, global_batch = resolved.batch.micro_size, resolved.batch.global_size
    if given.batch.micro_size != "auto" or resolved.determinism == "elastic" or global_batch % num_groups:
        return micro_size
    return max(size for size in list_divisors(global_batch // num_groups) if size <= micro_size)
