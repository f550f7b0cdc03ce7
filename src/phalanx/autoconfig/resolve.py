"""A recipe's first resolution: trials in processes of their own, choices from what they found (`plan`), and facts about
the machine. It writes nothing but the memory of what trials found.

A trial may fill the machine's memory and die of it: that is an answer like any other, remembered like any other, and
the next best choice is tried.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from phalanx.autoconfig import trial_names
from phalanx.autoconfig.choices import (
    COMMON_WORLD_SIZES,
    CORES_REASON,
    LOSS_MODES,
    AutoChoice,
    build_plan_json,
    choose_bucket_mib,
    choose_compile,
    choose_determinism,
    choose_num_threads,
    choose_precision,
    choose_warmup_steps,
    precisions_to_time,
    predict_precision,
    resolve_recipe,
)
from phalanx.autoconfig.memory_choice import (
    MemoryProfile,
    WorkerMemory,
    choose_memory,
    fits_unsharded,
    loss_modes_to_try,
    num_shards,
    state_bytes_per_parameter,
)
from phalanx.autoconfig.model_profile import profile_model, select_number_format
from phalanx.autoconfig.plan import plan_run
from phalanx.cluster import Cluster, Machine, discover_machine, find_data_sheet, load_cluster
from phalanx.cluster.calibration.anomalies import MAX_BUSY_CORES
from phalanx.cluster.calibration.hardware_key import default_calibration_path
from phalanx.compat import has_compiler
from phalanx.data import open_data
from phalanx.data.cache import expect_data_info
from phalanx.errors import RecipeError, SubprocessError
from phalanx.planner.device_costs import device_costs_for_stack, phalanx_stack
from phalanx.planner.measured_costs import MeasuredCosts, MissingMeasurementError
from phalanx.planner.scenario import Scenario, transport_of
from phalanx.planner.step_time import StepBreakdown, measured_step_time
from phalanx.recipe import Recipe, ResolvedRecipe
from phalanx.recipe.grad_sync_defaults import (
    CHANGED_PARAMETERS_KEY,
    CHANGED_STATE_KEY,
    GPU_ONLY_MODULES_KEY,
    explain_not_elastic,
)
from phalanx.recipe.load import LoadedRecipe
from phalanx.recipe.schema import Parallelism
from phalanx.run.cache import load_or_measure

SMALL_STATE_SHARE = 0.1
"""Share of one process's memory up to which the training state of a sharded model is small."""
MAX_FEWER_THREADS_SLOWDOWN = 0.03
"""Relative slowdown of forward and backward that is accepted for half of the threads."""
HOPELESS_RATIO = 1.2
"""A trial of fewer threads ends with the first round that takes this many times as long as with all."""
MAX_TIMED_MICRO_BATCH_S = 0.25
"""Seconds of forward and backward of a micro-batch above which fewer threads are not tried."""
SubprocessCall = Callable[[str, Any], Any]
"""Runs `module:function(payload)` in a process of its own."""


@dataclass
class TrialTimes:
    """What trials took that were not in the cache, in seconds. `announce` is called when one begins."""

    announce: Callable[[str], None] = lambda text: None
    trace_s: float = 0.0
    trials_s: float = 0.0

    def run(self, call: SubprocessCall, function: str, payload: dict[str, Any]) -> Any:
        """Announce and time a trial."""
        self.announce(f"resolving auto: {trial_names.describe_trial(function, payload)}")
        start_time = time.perf_counter()
        try:
            return call_catching_oom(call, function, payload)
        finally:
            elapsed_s = time.perf_counter() - start_time
            if function == trial_names.TRACE_TRIAL:
                self.trace_s += elapsed_s
            else:
                self.trials_s += elapsed_s


def cache_trials(call: SubprocessCall, machine: Machine, code_hash: str, times: TrialTimes) -> SubprocessCall:
    """Wrap `call` for trials, so that results of this machine from the last day are reused: a second start is faster
    and makes the same choices although times vary. The matmul rate, which takes longest, does not depend on the user's
    code: it is reused for every recipe. Times that other processes disturbed are not kept."""

    def run_trial(function: str, payload: dict[str, Any]) -> Any:
        key = {
            "trial": function,
            "payload": {name: value for name, value in payload.items() if name != "slow_s"},  # a measured time
            "code": None if function == trial_names.MATMUL_TRIAL else code_hash,
            "machine": [machine.device_name, machine.physical_cores],
            "torch": version("torch"),
        }
        return load_or_measure("trials", key, lambda: times.run(call, function, payload), is_kept=is_undisturbed)

    return run_trial


def is_undisturbed(trial: Mapping[str, Any] | None) -> bool:
    """Whether a trial measured no times, or had the CPU almost to itself."""
    return float((trial or {}).get(trial_names.OTHER_LOAD_KEY, 0.0)) <= trial_names.MAX_OTHER_LOAD


def call_catching_oom(call: SubprocessCall, function: str, payload: dict[str, Any]) -> Any:
    """`call`, where a trial that may fill memory says so instead of failing when the kernel kills it for that."""
    try:
        return call(function, payload)
    except SubprocessError as error:
        if not error.killed or function not in trial_names.MEMORY_FILLING_TRIALS:
            raise
        return {trial_names.OUT_OF_MEMORY_KEY: 1.0}


def resolve_auto(
    given: Recipe, folder: Path, machine: Machine, world_size: int, call: SubprocessCall, num_nodes: int = 1
) -> tuple[ResolvedRecipe, dict[str, Any], dict[str, Any]]:
    """Run the trials of a recipe with prepared data, choose, and return the resolved recipe, the plan and the cluster
    facts, for `world_size` workers on `num_nodes` nodes like this machine."""
    local_cluster = load_traced_cluster(machine, given, folder, call)
    parallelism = [] if local_cluster is None else choose_parallelism(given, folder, local_cluster, world_size)
    if parallelism:
        given = given.model_copy(update={"parallelism": parallelism[0].value})
    threads = choose_num_threads(given, machine.physical_cores, world_size, os.environ)
    payload = {"recipe": make_trial_recipe(given), "folder": str(folder), "threads": threads.value}
    # Workers share the memory of a CPU; under `elastic` the choice must not depend on how many there are.
    num_sharing = max(world_size, *COMMON_WORLD_SIZES) if given.determinism == "elastic" else world_size
    memory_bytes = machine.device_memory_bytes // (num_sharing if machine.device == "cpu" else 1)
    bf16 = machine.has_fast_bf16
    memory_budget = WorkerMemory(machine.device, memory_bytes, world_size, bf16)
    single_budget = WorkerMemory(machine.device, machine.device_memory_bytes, 1, bf16)
    profile, needs = measure_memory(given, single_budget, world_size, payload, call)
    check_model_state(given, profile, world_size, machine.device)
    blocks = profile.get("blocks", 0)
    seconds: dict[str, float] = {}  # a model that no process holds whole cannot be timed in one
    trial: dict[str, Any] = {}
    if num_shards(given) > 1 and not fits_unsharded(given, needs, single_budget):
        chosen = choose_memory(given, needs, memory_budget)
    else:
        chosen, seconds, trial = try_memory_choices(given, needs, memory_budget, payload, call, blocks)
    bucket = choose_bucket_mib(given, needs.trainable_parameters, world_size, num_nodes, machine.device)
    precision = choose_precision(given, seconds, machine.device, bf16)
    if machine.device == "cpu" and seconds and threads.value > 1 and CORES_REASON in threads.reason:
        threads = choose_fewest_threads(threads, precision.value, seconds, trial, call)
    choices = [threads, *chosen, precision, *bucket, *choose_warmup_steps(given)]
    if given.compile == "auto" and machine.device != "cpu":
        choices.append(choose_compile(given, machine.device, blocks, has_compiler()))
    choices += choose_determinism(given, seconds, machine.device)
    recipe = resolve_recipe(given, choices, world_size)
    layouts = [replace(each, value=each.value.model_dump(exclude_defaults=True)) for each in parallelism]
    choices = [*layouts, *choices]
    matmul_rates = dict(call(trial_names.MATMUL_TRIAL, {"device": machine.device, "threads": threads.value}))
    load_key = trial_names.OTHER_LOAD_KEY
    other_busy_cores = max(matmul_rates.pop(load_key, 0.0), seconds.get(load_key, 0.0))
    data_sheet = find_data_sheet(machine)
    cluster = {
        "host": machine.hostname,
        "device": machine.device,
        "device_name": machine.device_name,
        "device_count": machine.device_count,
        "physical_cores": machine.physical_cores,
        "memory_bytes": machine.memory_bytes,
        "threads_per_worker": threads.value,
        "measured_matmul_tflops": matmul_rates,
        trial_names.OTHER_LOAD_KEY: round(other_busy_cores, 1),
        "data_sheet_tflops": None if data_sheet is None else data_sheet.tflops,
        "data_sheet_source": None if data_sheet is None else data_sheet.source,
    }
    plan = build_plan_json(profile, choices, seconds, recipe)
    return recipe, {**plan, **predict_step_parts(recipe, folder, local_cluster, world_size)}, cluster


def check_model_state(given: Recipe, profile: Mapping[str, Any], world_size: int, device: str) -> None:
    """Raise RecipeError where the model's forward changes state, which breaks the determinism of the recipe, or where
    the model has layers that `world_size` workers cannot run on this device."""
    if given.determinism == "elastic" and (changed_state := profile.get(CHANGED_STATE_KEY)):
        raise RecipeError(explain_not_elastic(changed_state))
    if (sync_norm_layers := profile.get(GPU_ONLY_MODULES_KEY)) and world_size > 1 and device == "cpu":
        raise RecipeError(
            f"model.build: SyncBatchNorm ({sync_norm_layers}) computes over several workers on GPUs only; use one "
            "worker, BatchNorm, or GroupNorm, which needs no statistics of others"
        )


def describe_other_load(given: Recipe, cluster: Mapping[str, Any]) -> list[str]:
    """Warn about values that were chosen by times which were measured while other programs used the CPU."""
    cores = cluster.get(trial_names.OTHER_LOAD_KEY) or 0.0
    if cores <= trial_names.MAX_OTHER_LOAD or "auto" not in (given.precision, given.num_threads):
        return []
    return [
        f"other programs use {cores:.1f} cores: the rates and times measured now are too low; they are measured again "
        "at the next start"
    ]


def load_traced_cluster(machine: Machine, given: Recipe, folder: Path, call: SubprocessCall) -> Cluster | None:
    """Load this machine as `phalanx calibrate` measured it, and trace the recipe's model, so that steps can be
    predicted. None where the machine is not calibrated or the model cannot be traced."""
    local_cluster = load_calibrated_cluster(machine)
    if local_cluster is None:
        return None
    payload = {"recipe": given.model_dump(mode="json"), "folder": str(folder)}
    try:
        call(trial_names.TRACE_TRIAL, payload)
    except RecipeError:  # trials tell what is wrong with it, if anything is
        return None
    return local_cluster


def choose_parallelism(given: Recipe, folder: Path, local_cluster: Cluster, world_size: int) -> list[AutoChoice]:
    """Choose what `parallelism: auto` becomes for several GPUs. CPUs take replicas: what sharding costs there is not
    predicted."""
    needs_whole_replicas = given.determinism == "elastic" or given.local_sgd is not None
    is_cpu = local_cluster.node.accelerator.generation == "cpu"
    if given.parallelism != "auto" or world_size == 1 or needs_whole_replicas or is_cpu:
        return []
    path = default_calibration_path(discover_machine(device=given.device))
    try:
        planned = plan_run(LoadedRecipe(given, None, folder, {}), str(path), world_size)
    except RecipeError:  # the model cannot be traced, or nothing is predicted to fit
        return []
    reason = f"the fastest of {planned.num_valid} that are valid: {planned.best.step_s:.3g} s a step predicted"
    reason += f"; the next best takes {planned.alternatives[0].step_s:.3g} s" if planned.alternatives else ""
    return [AutoChoice("parallelism", planned.best.scenario.parallelism, reason)]


def predict_step_parts(
    recipe: ResolvedRecipe, folder: Path, local_cluster: Cluster | None, world_size: int
) -> dict[str, Any]:
    """What the probe's file says of a step, for plan.json."""
    if local_cluster is None:
        return {}
    micro_size, checkpointing = recipe.batch.micro_size, recipe.memory.activation_checkpointing
    parts = predict_step(recipe, micro_size, checkpointing, folder, local_cluster, world_size)
    if parts is None:
        return {}
    computing = parts.total - parts.grad_sync - parts.optimizer - parts.other
    by_part = {"computing": computing, "grad_sync": parts.grad_sync, "optimizer": parts.optimizer}
    return {"calibrated_step_s": parts.total, "calibrated_breakdown_s": by_part, "calibrated_by": "phalanx calibrate"}


def measure_memory(
    given: Recipe, single_budget: WorkerMemory, world_size: int, payload: dict[str, Any], call: SubprocessCall
) -> tuple[dict[str, Any], MemoryProfile]:
    """The profile of a model, and what it says of memory. Ways of recomputing that fill the memory that one process has
    `single_budget` with a sample or two are left out, the hungriest first. A model that the layout divides, and that is
    too large for one process, is not loaded for it. RecipeError when no way is left."""
    facts = open_data(given.data, given.evaluation, given.seed).info
    logits = 4 * (facts.seq_len or 0) * (facts.vocab_size or 0)
    budget = WorkerMemory(single_budget.device, single_budget.memory_bytes, world_size)
    trial_payload = {**payload, "losses": loss_modes_to_try(given, logits, budget)}
    # The precision is chosen by timing micro-batches, so it is not known yet: the likely one is taken.
    trial_payload["precision"] = predict_precision(given, single_budget.device, single_budget.bf16)
    if isinstance(given.parallelism, Parallelism) and given.parallelism.context > 1:
        trial_payload["context"] = given.parallelism.context

    def make_needs(profile: dict[str, Any]) -> MemoryProfile:
        return MemoryProfile(profile["trainable_parameters"], profile["frozen_parameters"], profile["peaks"], logits)

    if num_shards(given) > 1:
        # Following a model takes seconds: a small one is measured at once, and the mode that needs least goes first.
        per_parameter = state_bytes_per_parameter(given, single_budget.device)
        num_small = int(SMALL_STATE_SHARE * single_budget.memory_bytes / per_parameter)
        profile = call(trial_names.META_PROFILE_TRIAL, {**trial_payload, "ways": ["full"], "num_small": num_small})
        check_forward(given, profile)
        if profile and not fits_unsharded(given, make_needs(profile), single_budget):
            profile = call(trial_names.META_PROFILE_TRIAL, trial_payload)
            return profile, make_needs(profile)
    for modes in (["none", "selective", "full"], ["selective", "full"], ["full"]):
        profile = call(trial_names.PROFILE_TRIAL, {**trial_payload, "ways": modes})
        if trial_names.OUT_OF_MEMORY_KEY not in profile:
            check_forward(given, profile)
            return profile, make_needs(profile)
    raise RecipeError(
        "model: forward and backward of two samples run out of memory, even with full activation checkpointing; "
        "use a smaller model or sequence"
    )


def check_forward(given: Recipe, profile: Mapping[str, Any]) -> None:
    """RecipeError where forwards change parameters that the layout shards: they change what is gathered for them; or
    where the loss is to be taken in chunks and cannot."""
    if given.memory.chunked_loss is True and profile and "chunked" not in profile["peaks"]:
        raise RecipeError(
            "memory.chunked_loss: true needs a language model that computes its logits with one nn.Linear without "
            "bias and without adapter, as its last operation; use auto or false"
        )
    if uncalled := profile.get(trial_names.UNCALLED_ADAPTERS_KEY):
        raise RecipeError(
            f"adapter.target_modules: the model never calls {uncalled[0]}, but uses its weight in a function, so an "
            f"adapter there would not learn ({len(uncalled)} such layers); name the others in adapter.target_modules"
        )
    parallelism, changed_parameters = given.parallelism, profile.get(CHANGED_PARAMETERS_KEY)
    if changed_parameters and isinstance(parallelism, Parallelism) and parallelism.shard * parallelism.context > 1:
        raise RecipeError(
            f"parallelism.shard: forwards of the model change parameter {changed_parameters[0]!r}, and of a sharded "
            "one the change is lost; keep it in a buffer, or use parallelism.replicate"
        )


def try_memory_choices(
    given: Recipe,
    needs: MemoryProfile,
    memory_budget: WorkerMemory,
    payload: dict[str, Any],
    call: SubprocessCall,
    blocks: int = 0,
) -> tuple[list[AutoChoice], dict[str, float], dict[str, Any]]:
    """Try what is predicted to fit. Return the activation checkpointing, loss and micro-batch of a trial that did not
    run out of memory, its seconds, compiled and with deterministic kernels where the run of a model with `blocks`
    repeated blocks will be, and its payload. After a trial that runs out of memory, the next best is tried. A trial
    holds the whole model: no seconds where one worker cannot hold it and the parallelism shards it."""
    precisions = precisions_to_time(given, memory_budget.device, memory_budget.bf16)
    failed_choices: list[tuple[str, str, int]] = []
    while True:
        choices = choose_memory(given, needs, memory_budget, failed_choices)
        activation_checkpointing, loss, micro = (choice.value for choice in choices)
        trial = {
            **payload,
            "micro": micro,
            "precisions": precisions,
            "recompute": activation_checkpointing,
            "chunked_loss": loss,
            "compile": choose_compile(given, memory_budget.device, blocks, has_compiler()).value,
            "determinism": given.determinism,
            "alone": memory_budget.world_size == 1,
            "offload": given.optimizer.offload,
        }
        seconds = call(trial_names.TIMING_TRIAL, trial)
        if trial_names.OUT_OF_MEMORY_KEY not in seconds:
            return choices, seconds, trial
        if num_shards(given) > 1:  # that one worker cannot hold alone what all hold together proves nothing
            return choices, {}, trial
        failed_choices.append((activation_checkpointing, LOSS_MODES[loss], micro))


def choose_fewest_threads(
    threads: AutoChoice, precision: str, seconds: Mapping[str, float], trial: dict[str, Any], call: SubprocessCall
) -> AutoChoice:
    """Choose the fewest threads within `MAX_FEWER_THREADS_SLOWDOWN` of the time with all. Threads that wait for each
    other are of no use to a small model, and on a machine that other programs use they make it many times slower. A
    micro-batch of more than `MAX_TIMED_MICRO_BATCH_S` has matrices that are large enough for all threads."""
    count, best_s = threads.value, seconds[precision]
    if best_s > MAX_TIMED_MICRO_BATCH_S:
        return threads
    while count > 1:
        fewer = {"threads": count // 2, "precisions": [precision], "slow_s": HOPELESS_RATIO * best_s}
        fewer_s = call(trial_names.TIMING_TRIAL, {**trial, **fewer})[precision]
        if fewer_s > best_s * (1 + MAX_FEWER_THREADS_SLOWDOWN):
            break
        count, best_s = count // 2, min(best_s, fewer_s)
    if count == threads.value:
        return threads
    return AutoChoice("num_threads", count, f"as fast as {threads.value} threads for this model")


def make_trial_recipe(given: Recipe) -> dict[str, Any]:
    """What a trial must know of a recipe; the rest takes its defaults, so that it does not make trials differ."""
    values = given.model_dump(mode="json")
    return {key: values[key] for key in ("device", "model", "adapter", "task", "data", "batch", "optimizer", "seed")}


def predict_step(
    recipe: Recipe, micro_size: int, checkpointing: str, folder: Path, cluster: Cluster, world_size: int
) -> StepBreakdown | None:
    """Seconds of a step by cause, of a resolved recipe on this machine as it was measured; None where that cannot be
    said: on GPUs and for divided models by data sheets only, and not for what was not measured."""
    measured, parallelism = cluster.measured, recipe.parallelism
    if measured is None or cluster.node.accelerator.generation != "cpu" or not isinstance(parallelism, Parallelism):
        return None
    is_eager_replica = parallelism.replicate == parallelism.world and recipe.compile is False
    if not is_eager_replica or recipe.precision not in ("fp32", "bf16"):
        return None
    loaded = LoadedRecipe(recipe, None, folder, {})
    profile = profile_model(loaded, expect_data_info(recipe.data, folder), select_number_format(recipe.precision))
    stack = phalanx_stack(cluster.node.accelerator, world_size)
    cpu_stack = replace(stack, fuses_memory_ops=False, compute_factor=1.0, comm_factor=1.0)
    setup = Scenario(
        profile,
        cluster,
        parallelism,
        micro_size,
        recipe.batch.global_size,
        recipe.precision,
        checkpointing=checkpointing,
        zero_level=0,
        stack=cpu_stack,
        transport=transport_of(recipe, profile),
    )
    costs = device_costs_for_stack(cluster.node.accelerator, "fp32", cpu_stack)
    try:
        return measured_step_time(setup, costs, MeasuredCosts(measured, world_size))
    except MissingMeasurementError:
        return None


def load_calibrated_cluster(machine: Machine) -> Cluster | None:
    """Load this machine as `phalanx calibrate` measured it under today's driver and libraries; None where it did not,
    or while other programs used the cores."""
    path = default_calibration_path(machine)
    try:
        cluster = load_cluster(str(path)) if path.is_file() else None
    except RecipeError:  # torn, or of another version: `phalanx calibrate` makes it again, and training does without
        return None
    if cluster is None or (cluster.measured is not None and cluster.measured.busy_cores >= MAX_BUSY_CORES):
        return None
    return cluster
