"""What must hold between the keys of a recipe and the workers that it gets; nothing is imported or run."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from phalanx.errors import RecipeError
from phalanx.recipe.batch_scaling import scale_batch_with_workers
from phalanx.recipe.devices import DeviceKind, device_kind_of
from phalanx.recipe.field_types import MOST_SAMPLES
from phalanx.recipe.grad_sync_defaults import DEFAULT_WARMUP_STEPS
from phalanx.recipe.imports import HF_PREFIX
from phalanx.recipe.pipelines import fitting, stages_of, stages_problem
from phalanx.recipe.schema import (
    SOURCE_KINDS,
    DataConfig,
    DataSource,
    EvaluationConfig,
    GradSyncConfig,
    LocalSgdConfig,
    LrScheduleConfig,
    OptimizerConfig,
    Parallelism,
    Recipe,
)
from phalanx.recipe.validation_errors import join_problems, suggest_nearest

WORLD_DIMENSIONS = ("replicate", "shard", "tensor", "pipeline", "context")
"""Dimensions of the parallelism; their product is the world size."""
BUILT_IN_TASKS = {"language-modeling": "tokens", "classification": "images"}
"""What is learned -> the kind of data that it is learned from."""
"""Tasks that ship; any other is an import path."""
OPTIMIZERS_WITH = {"betas": ("adamw", "lamb", "muon"), "momentum": ("sgd", "muon", "lars")}
"""Key of `optimizer` -> optimizers that use it."""
DECAYS_WITH = {
    "power": ("poly",),
    "milestones": ("step",),
    "gamma": ("step",),
    "min_lr_ratio": ("cosine", "linear", "poly"),
}
"""Key of `optimizer.schedule` -> decays that use it."""
SOURCES_WITH = {
    "text_field": ("jsonl", "parquet"),
    "exclude": ("text", "jsonl", "parquet"),
    "image_size": ("images",),
}
"""Key of a source -> kinds of sources that use it."""
OF_TEXT = ("tokenizer", "seq_len", "document_masking")
"""Keys of `data` that pictures do not use."""
MIN_FP8_CAPABILITY = (8, 9)
"""CUDA compute capability (Ada, Hopper) from which tensor cores know fp8."""
BF16_SINCE = (8, 0)
"""Likewise (Ampere) of bf16, which torch computes on older ones as well, slowly."""
FP8_VARIABLE = "PHALANX_FLOAT8"
"""Environment variable; "always" takes fp8 for every layer that fits, on any device, without measuring. For tests."""
NO_FP8_TEXT = (
    "fp8 needs tensor cores that support it (NVIDIA Ada, Hopper or later: compute capability 8.9), and {} has none; "
    "bf16, fp16 or fp32 would be valid here"
)
"""What to say to that of a device by this name."""


def num_workers_for(recipe: Recipe, default: int) -> int:
    """Return the default number of workers: as many as the recipe's parallelism takes, or `default` where that is
    auto."""
    return recipe.parallelism.world if isinstance(recipe.parallelism, Parallelism) else default


def check_recipe(
    recipe: Recipe,
    folder: Path,
    num_workers: int | None = 1,
    location_of: Callable[[str], str] = str,
    begins: bool = True,
) -> None:
    """Raise RecipeError when `recipe` cannot run on `num_workers` workers; one line for each problem.

    `folder` is the recipe's; without `num_workers` only what holds for any number of workers is checked. `location_of`
    formats where a key was written, for errors (`LoadedRecipe.location_of`). A run that no longer `begins` needs no
    `init_from`.
    """
    if not begins:
        recipe = recipe.model_copy(update={"init_from": None})
    problems = [f"{location_of(key)}: {problem}" for key, problem in _find_problems(recipe, folder, num_workers)]
    if problems:
        raise join_problems(problems)


def check_task(recipe: Recipe, kind: str, at: Callable[[str], str] = str) -> None:
    """RecipeError where a task of ours cannot learn from data of this kind, or where pictures have keys of text."""
    wanted = BUILT_IN_TASKS.get(recipe.task, kind)
    if wanted != kind:
        other = next(name for name, of in BUILT_IN_TASKS.items() if of == kind)
        raise RecipeError(
            f"{at('task')}: {recipe.task} is for {wanted}, and the data are {kind}; use {other}, a task of your own "
            f"(module:Class), or a data.source of {wanted}"
        )
    if kind == "images":
        for name in OF_TEXT:
            if getattr(recipe.data, name) != getattr(DataConfig(), name):
                raise RecipeError(f"{at(f'data.{name}')}: is for text, and the data are images: leave it out")


def has_fp8(capability: Sequence[int] | None) -> bool:
    """Whether a device of this CUDA compute capability (None: it is no such device) multiplies in fp8."""
    return capability is not None and tuple(capability) >= MIN_FP8_CAPABILITY


def has_bf16(capability: Sequence[int] | None) -> bool:
    """Whether a device of this CUDA compute capability (None: it is no such device) is no slower in bf16 than in fp32:
    False for NVIDIA GPUs before Ampere."""
    return capability is None or tuple(capability) >= BF16_SINCE


def check_device(
    recipe: Recipe,
    device: str,
    name: str,
    capability: Sequence[int] | None,
    location_of: Callable[[str], str] = str,
    fp8_anywhere: bool = False,
    rocm: bool = False,
) -> None:
    """RecipeError when what `recipe` asks for cannot be had on this device of torch ("cpu", "cuda", ...), `rocm` if it
    is AMD's."""
    device_kind = device_kind_of(device, rocm)
    fp8 = fp8_anywhere or ("fp8" in device_kind.precisions and has_fp8(capability))
    if problems := [
        f"{location_of(key)}: {problem}" for key, problem in device_problems(recipe, device_kind, name, fp8)
    ]:
        raise join_problems(problems)


def _find_problems(recipe: Recipe, folder: Path, num_workers: int | None) -> Iterator[tuple[str, str]]:
    """Each key with what is wrong about it."""
    if ":" not in recipe.task and recipe.task not in BUILT_IN_TASKS:
        known = f"expected {', '.join(BUILT_IN_TASKS)} or module:Class"
        yield "task", f"found {recipe.task!r}, {known}{suggest_nearest(recipe.task, tuple(BUILT_IN_TASKS))}"
    if recipe.init_from is not None and num_workers is not None:
        path = recipe.init_from.removeprefix(HF_PREFIX)
        if path == recipe.init_from and (folder / path / "config.json").is_file():
            yield "init_from", f"{folder / path} is a Hugging Face directory, or an export; give {HF_PREFIX}{path}"
        elif not (folder / path).exists():
            noun = "checkpoint or run" if path == recipe.init_from else "directory"
            yield "init_from", f"there is no {noun} at {folder / path}"
    yield from _device(recipe, num_workers or 1)
    yield from _optimizer(recipe)
    yield from _grad_sync(recipe)
    num_groups = num_workers
    if isinstance(recipe.parallelism, Parallelism):
        yield from _check_parallelism(recipe, recipe.parallelism, num_workers or recipe.parallelism.world)
        num_groups = recipe.parallelism.replicate * recipe.parallelism.shard
    yield from _sources(recipe)
    lr_scaling = recipe.optimizer.lr_scaling
    if lr_scaling is not None and lr_scaling.base_batch_size is None and not recipe.batch.scale_with_workers:
        yield (
            "optimizer.lr_scaling",
            "base_batch_size is missing: for how many samples of a step is optimizer.lr right? "
            "(batch.scale_with_workers: true would say so)",
        )
    if num_workers is not None and num_groups is not None:
        samples = scale_batch_with_workers(recipe, num_workers).batch.global_size
        if samples > MOST_SAMPLES:
            yield (
                "batch.global_size",
                f"{samples:,} samples of {num_workers:,} workers, expected at most {MOST_SAMPLES:,} in all",
            )
        else:
            yield from _check_batch(samples, recipe.batch.micro_size, num_groups)


def _promised(recipe: Recipe) -> str:
    """What `determinism` promises about what is sent: `auto` never sends less than `fixed-world`."""
    return "fixed-world" if recipe.determinism == "auto" else recipe.determinism


def _grad_sync(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """How gradients are added, and what they are sent as."""
    grad_sync, determinism, usual = recipe.grad_sync, _promised(recipe), GradSyncConfig()
    compression, method, lossy = grad_sync.compression, grad_sync.method, grad_sync.compression != "none"
    key, other = ("grad_sync.compression", "none") if lossy else ("grad_sync.algorithm", "all-reduce")
    if lossy and grad_sync.algorithm not in ("auto", "all-reduce"):
        yield (
            key,
            f"{compression} goes with algorithm: auto or all-reduce, and the algorithm is {grad_sync.algorithm}: "
            "use one of these, or compression: none",
        )
    for name, given in (("warmup_steps", (DEFAULT_WARMUP_STEPS,)), ("powersgd_rank", ())):
        if getattr(grad_sync, name) not in (getattr(usual, name), *given) and compression != "powersgd":
            what = f"is for compression: powersgd, and the compression is {compression}: leave it out"
            yield f"grad_sync.{name}", what
    if recipe.local_sgd is not None:
        if method not in ("auto", "all-reduce"):
            yield key, f"{method} is for gradients, and local_sgd sends weights: use {other}, or local_sgd: null"
        yield from _local_sgd(recipe, recipe.local_sgd)
        return
    if method in ("auto", "all-reduce"):
        return
    if determinism == "elastic":
        allowed = "off" if lossy else "fixed-world"
        yield (
            key,
            f"found {method}, but determinism: elastic has an order of addition of its own: use {other}, or "
            f"determinism: {allowed}",
        )
    elif lossy and determinism != "off":
        yield (
            key,
            f"{method} rounds what it sends, which determinism: {determinism} forbids: use none, or determinism: off",
        )
    if isinstance(recipe.parallelism, Parallelism):
        layout = recipe.parallelism
        sharded = layout.shard * layout.context * layout.expert > 1
        if layout.replicate == 1 < layout.world:
            yield key, f"{method} is for replicas, and there are none: give parallelism.replicate, or use {other}"
        elif layout.pipeline > 1 or (sharded and layout.replicate * layout.shard != layout.world):
            yield key, f"{method} goes with replicate and shard, or replicate and tensor: give these, or use {other}"
        elif method == "powersgd" and layout.replicate != layout.world:
            yield key, "powersgd projects whole gradients: give parallelism.replicate only, or use int8"
    if method in ("int8", "powersgd") and recipe.precision == "fp16":
        yield key, f"{method} keeps what it could not send, but the loss scale of fp16 changes: use bf16"


def _local_sgd(recipe: Recipe, local_sgd: LocalSgdConfig) -> Iterator[tuple[str, str]]:
    """Workers that take steps of their own."""
    layout, determinism = recipe.parallelism, _promised(recipe)
    if determinism != "off":
        why = f"workers take local steps, which determinism: {determinism} forbids"
        yield "local_sgd", f"{why}: use local_sgd: null, or determinism: off"
    if isinstance(layout, Parallelism) and layout.replicate != layout.world:
        yield (
            "local_sgd",
            "is for workers that hold the whole model: give parallelism.replicate only, or local_sgd: null",
        )
    if local_sgd.method == "average" and local_sgd.outer_optimizer != LocalSgdConfig().outer_optimizer:
        yield (
            "local_sgd.outer_optimizer",
            "is for method: diloco, and average takes the plain mean: leave it out, or use diloco",
        )
    every, fragments, delay = local_sgd.sync_every, local_sgd.num_fragments, local_sgd.sync_delay
    if fragments > every:
        yield (
            "local_sgd.num_fragments",
            f"found {fragments}, but at most one leaves after a step: at most sync_every = {every}",
        )
    elif delay >= every // fragments:
        between = every // fragments
        yield (
            "local_sgd.sync_delay",
            f"found {delay}, but the next fragment leaves after {between}: at most {between - 1}",
        )
    if recipe.optimizer.state_dtype == "int8":
        yield "optimizer.state_dtype", "int8 state has no mean over workers, which local_sgd may have to take: use bf16"


def _check_parallelism(recipe: Recipe, parallelism: Parallelism, num_workers: int) -> Iterator[tuple[str, str]]:
    if parallelism.world != num_workers:
        factors = " x ".join(
            f"{name} {getattr(parallelism, name)}" for name in WORLD_DIMENSIONS if getattr(parallelism, name) > 1
        )
        yield (
            "parallelism",
            f"takes {parallelism.world} workers ({factors or 'one of each'}), but the run has {num_workers}: "
            f"use --nproc-per-node {parallelism.world} or parallelism=auto",
        )
    shard_ranks = parallelism.shard * parallelism.context
    if shard_ranks % parallelism.expert:
        yield "parallelism.expert", f"found {parallelism.expert}, which must divide shard x context = {shard_ranks}"
    other_dimensions = parallelism.replicate * parallelism.shard != parallelism.world or parallelism.expert > 1
    if recipe.determinism == "elastic" and other_dimensions:
        yield (
            "parallelism",
            "determinism: elastic goes with replicate and shard only: give these, or determinism: fixed-world",
        )
    if recipe.optimizer.name == "muon" and parallelism.tensor > 1:
        yield (
            "parallelism.tensor",
            "muon works on whole matrices, which tensor ranks do not have; use parallelism.shard or adamw",
        )
    if recipe.compile == "cuda-graphs" and parallelism.replicate != parallelism.world:
        yield (
            "compile",
            "cuda-graphs cannot hold the communication of a divided model: give parallelism.replicate only, or true",
        )
    if recipe.compile is True and parallelism.splits_backward:
        yield (
            "compile",
            f"blocks of a {parallelism.pipeline_schedule} pipeline cannot be compiled; use false, or "
            "parallelism.pipeline_schedule=1f1b",
        )
    if recipe.memory.activation_checkpointing == "selective" and parallelism.splits_backward:
        reason = (
            f"a {parallelism.pipeline_schedule} pipeline's backward comes in two parts, of which selective repeats one"
        )
        yield "memory.activation_checkpointing", f"{reason}; use full or none, or parallelism.pipeline_schedule=1f1b"
    yield from _pipeline(recipe, parallelism)
    if parallelism.async_tp and parallelism.tensor == 1:
        yield (
            "parallelism.async_tp",
            "affects communication between tensor ranks only; give parallelism.tensor, or false",
        )
    for name in ("tensor", "expert"):
        if recipe.optimizer.state_dtype == "int8" and getattr(parallelism, name) > 1:
            what = "optimizer.state_dtype = int8 keeps blocks of whole rows, which would be cut; use bf16"
            yield f"parallelism.{name}", what
    for name in ("tensor", "context"):
        if getattr(parallelism, name) > 1 and recipe.task == "classification":
            yield f"parallelism.{name}", "is for models of sequences; classification of images has none"
    if (seq_len := recipe.data.seq_len) % parallelism.context:
        yield "parallelism.context", f"found {parallelism.context}, which must divide data.seq_len = {seq_len}"


def _pipeline(recipe: Recipe, layout: Parallelism) -> Iterator[tuple[str, str]]:
    """Stages and micro-batches of a pipeline."""
    stages, ranks = stages_of(layout), layout.pipeline
    if ranks == 1:
        if layout.layers_per_stage is not None:
            yield "parallelism.layers_per_stage", "is for pipelines: give parallelism.pipeline, or leave it out"
        if layout.pipeline_schedule != Parallelism().pipeline_schedule:
            what = f"{layout.pipeline_schedule} is for pipelines: give parallelism.pipeline, or leave it out"
            yield "parallelism.pipeline_schedule", what
        return
    if problem := stages_problem(layout.pipeline_schedule, stages, ranks):
        yield "parallelism.pipeline" if layout.layers_per_stage is None else "parallelism.layers_per_stage", problem
        return
    parts = layout.replicate * layout.shard
    share, micro = recipe.batch.global_size // parts, recipe.batch.micro_size
    if recipe.batch.global_size % parts or (isinstance(micro, int) and share % micro):
        return  # which is another problem
    sizes = [size for size in list_divisors(share) if fitting(layout.pipeline_schedule, share // size, stages, ranks)]
    what = f"{layout.pipeline_schedule} with {stages} stages on {ranks} ranks"
    if not sizes:
        yield "batch.global_size", f"{what} has no micro-batch that fits the {share} samples of a step; raise it"
    elif isinstance(micro, int) and micro not in sizes:
        valid = ", ".join(map(str, sizes))
        yield "batch.micro_size", f"{what} cannot run {share // micro} micro-batches a step; {valid} would be valid"


def _device(recipe: Recipe, workers: int) -> Iterator[tuple[str, str]]:
    """What no device of a kind that the recipe names has, whichever machine it is on."""
    if recipe.device == "auto":
        return
    kind = device_kind_of(recipe.device)
    fp8_anywhere = os.environ.get(FP8_VARIABLE) == "always"
    yield from device_problems(recipe, kind, kind.description, "fp8" in kind.precisions or fp8_anywhere)
    if workers > 1 and kind.dist_backend is None:
        yield (
            "device",
            f"found {recipe.device}, on which torch has no way to exchange gradients; use one worker, or cpu",
        )


def device_problems(recipe: Recipe, kind: DeviceKind, name: str, fp8: bool) -> Iterator[tuple[str, str]]:
    """What a recipe asks for that a kind of device does not have; `name` is what the device is called."""
    if recipe.precision == "fp8" and not fp8:
        yield "precision", NO_FP8_TEXT.format(name + kind.fp8_note)
    if recipe.compile == "cuda-graphs" and not kind.has_cuda_graphs:
        what = "has none" if kind.is_gpu else "is no GPU"
        yield "compile", f"cuda-graphs need a GPU that has them, and {name} {what}; true or false would be valid"
    if recipe.determinism in ("fixed-world", "elastic") and not kind.names_nondeterministic_ops:
        yield (
            "determinism",
            f"found {recipe.determinism}, but torch does not say which kernels give the same bits twice on {name}; "
            "auto or off would be valid, or device=cpu",
        )


def _sources(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Folders of pictures, and keys that only other sources have."""
    several_given = isinstance(recipe.data.source, list)
    sources = {f"data.source.{number}" if several_given else "data.source": each for number, each in _listed(recipe)}
    if recipe.evaluation.source is not None:
        sources["evaluation.source"] = recipe.evaluation.source
    for key, source in sources.items():
        if source.images is not None and source.image_size is None:
            yield key, "images need a common size, for instance `image_size: [224, 224]`"
        (kind,) = (name for name in SOURCE_KINDS if getattr(source, name) is not None)
        for name, kinds in SOURCES_WITH.items():
            if (
                getattr(source, name) != DataSource.model_fields[name].get_default(call_default_factory=True)
                and kind not in kinds
            ):
                yield f"{key}.{name}", f"is for {', '.join(kinds)}, and the source is {kind}: leave it out"
    if all(source.images is not None or source.idx is not None for _, source in _listed(recipe)):
        for name in OF_TEXT:
            if getattr(recipe.data, name) != getattr(DataConfig(), name):
                yield f"data.{name}", "is for text, and the source has images: leave it out"
    if (
        recipe.evaluation.source is not None
        and recipe.evaluation.holdout_fraction != EvaluationConfig().holdout_fraction
    ):
        yield (
            "evaluation.holdout_fraction",
            "is a share of the training data, and evaluation.source names other data: leave one out",
        )


def _listed(recipe: Recipe) -> Iterator[tuple[int, DataSource]]:
    source = recipe.data.source
    yield from enumerate(source if isinstance(source, list) else [source])


def _optimizer(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """The optimizer's state, where it is kept, and keys that only others have."""
    name, state = recipe.optimizer.name, recipe.optimizer.state_dtype
    for key, names in OPTIMIZERS_WITH.items():
        if getattr(recipe.optimizer, key) != getattr(OptimizerConfig(), key) and name not in names:
            yield f"optimizer.{key}", f"is for {', '.join(names)}, and the optimizer is {name}: leave it out"
    schedule = recipe.optimizer.schedule
    for key, decays in DECAYS_WITH.items():
        if getattr(schedule, key) != getattr(LrScheduleConfig(), key) and schedule.decay not in decays:
            what = f"is for decay: {', '.join(decays)}, and it is {schedule.decay}: leave it out"
            yield f"optimizer.schedule.{key}", what
    if state != "fp32" and name != "adamw":
        yield "optimizer.state_dtype", f"{state} is for adamw; {name} keeps its state in fp32"
    if recipe.optimizer.offload and name not in ("adamw", "sgd"):
        yield (
            "optimizer.offload",
            f"true goes with adamw and sgd; a step of {name} needs whole matrices, not only the part that a "
            "worker holds",
        )
    if recipe.memory.chunked_loss is True and recipe.task == "classification":
        yield "memory.chunked_loss", "true is for language models, and the task is classification: use auto or false"


def _check_batch(global_size: int, micro_size: int | str, num_groups: int) -> Iterator[tuple[str, str]]:
    """`num_groups`: workers, or groups of them, among which the batch is divided."""
    if global_size % num_groups:
        below, above = global_size // num_groups * num_groups, (global_size // num_groups + 1) * num_groups
        valid_sizes = " or ".join(str(size) for size in (below, above) if size)
        yield (
            "batch.global_size",
            f"{global_size} samples cannot be divided among {num_groups} workers; {valid_sizes} can",
        )
    elif isinstance(micro_size, int) and global_size % (micro_size * num_groups):
        samples_per_group = global_size // num_groups
        best = min(list_divisors(samples_per_group), key=lambda size: (abs(size - micro_size), size))
        yield (
            "batch.micro_size",
            (
                f"{micro_size} x {num_groups} {'worker' if num_groups == 1 else 'workers'} = "
                f"{micro_size * num_groups} does not divide "
                f"batch.global_size = {global_size}; the nearest micro-batch that does is {best}"
            ),
        )


def list_divisors(number: int) -> list[int]:
    """All of them, the smallest first."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]
