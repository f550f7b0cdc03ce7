"""What must hold between the keys of a recipe and the workers that it gets; nothing is imported or run."""

from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import BaseModel

from phalanx.errors import RecipeError
from phalanx.recipe.data_schema import DataConfig
from phalanx.recipe.devices import find_device_problems
from phalanx.recipe.grad_sync_defaults import DEFAULT_WARMUP_STEPS
from phalanx.recipe.imports import HF_PREFIX, huggingface_location
from phalanx.recipe.schema import (
    DistillationConfig,
    LocalSgdConfig,
    Parallelism,
    Recipe,
)
from phalanx.recipe.validation_errors import join_problems, suggest_nearest
from phalanx.recipe.work_division import find_batch_problems, find_parallelism_problems, scale_batch_with_workers
from phalanx.storage.url import is_url

BUILT_IN_TASKS = {
    "language-modeling": "tokens",
    "chat": "tokens",
    "preference": "tokens",
    "distillation": "tokens",
    "grpo": "tokens",
    "reward": "tokens",
    "text-classification": "tokens",
    "embedding": "tokens",
    "classification": "images",
}
"""What is learned -> the kind of data that it is learned from."""
"""Tasks that ship; any other is an import path."""
OPTIMIZERS_WITH = {"betas": ("adamw", "lamb", "muon"), "momentum": ("sgd", "muon", "lars")}
"""Key of `optimizer` -> optimizers that use it."""
DECAYS_WITH = {
    "decay_fraction": ("wsd",),
    "power": ("poly",),
    "milestones": ("step",),
    "gamma": ("step",),
    "min_lr_ratio": ("cosine", "linear", "wsd", "poly"),
}
"""Key of `optimizer.schedule` -> decays that use it."""
SOURCES_WITH = {
    "text_field": ("jsonl", "parquet", "arrow", "webdataset"),
    "exclude": ("text", "jsonl", "parquet", "arrow", "tokens", "webdataset"),
    "image_size": ("images", "webdataset"),
    "format": ("tokens",),
}
"""Key of a source -> kinds of sources that use it."""
OF_TEXT = ("tokenizer", "seq_len", "document_masking", "packing")
"""Keys of `data` that pictures do not use."""


def _is_given(section: BaseModel, key: str) -> bool:
    """Whether a key of a part of the recipe has another value than its default."""
    return bool(getattr(section, key) != type(section).model_fields[key].get_default(call_default_factory=True))


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
    wanted = BUILT_IN_TASKS.get(recipe.task_kind, kind)
    if wanted != kind:
        other = next(name for name, of in BUILT_IN_TASKS.items() if of == kind)
        raise RecipeError(
            f"{at('task')}: {recipe.task_kind} is for {wanted}, and the data are {kind}; use {other}, a task of your "
            f"own (module:Class), or a data.source of {wanted}"
        )
    if kind == "images":
        for name in OF_TEXT:
            if _is_given(recipe.data, name):
                raise RecipeError(f"{at(f'data.{name}')}: is for text, and the data are images: leave it out")


def _find_location_problems(key: str, location: str, folder: Path) -> Iterator[tuple[str, str]]:
    """A run, a checkpoint or a Hugging Face directory that is not there; URLs are looked up in the network later."""
    path = huggingface_location(location) or location
    if is_url(path):
        return
    if path == location and (folder / path / "config.json").is_file():
        yield key, f"{folder / path} is a Hugging Face directory, or an export; give {HF_PREFIX}{path}"
    elif not (folder / path).exists():
        noun = "checkpoint or run" if path == location else "directory"
        yield key, f"there is no {noun} at {folder / path}"


def _find_problems(recipe: Recipe, folder: Path, num_workers: int | None) -> Iterator[tuple[str, str]]:
    """Each key with what is wrong about it."""
    if ":" not in recipe.task_kind and recipe.task_kind not in BUILT_IN_TASKS:
        known = f"expected {', '.join(BUILT_IN_TASKS)} or module:Class"
        nearest = suggest_nearest(recipe.task_kind, tuple(BUILT_IN_TASKS))
        yield "task", f"found {recipe.task_kind!r}, {known}{nearest}"
    if recipe.init_from is not None and num_workers is not None:
        yield from _find_location_problems("init_from", recipe.init_from, folder)
    if isinstance(recipe.task, DistillationConfig):
        yield from _find_location_problems("task.teacher", recipe.task.teacher, folder)
        if recipe.task.on_policy and (recipe.data.chat is None or recipe.data.packing != "single"):
            yield "task.on_policy", "is for conversations, one in a sample: give data.chat={} and data.packing=single"
        if recipe.task.teacher_top_k is not None and recipe.data.prepare == "stream":
            yield "task.teacher_top_k", "is for data that are prepared before the first step: give data.prepare=first"
    if recipe.task_kind == "embedding" and recipe.batch.micro_size == "auto":
        yield "batch.micro_size", "found auto; the negatives of embedding are those of a micro-batch: give a number"
    yield from find_device_problems(recipe)
    yield from _adapter(recipe)
    yield from _images_in_messages(recipe)
    if recipe.model.quantization_aware is not None:
        yield from _quantization_aware(recipe)
    yield from _optimizer(recipe)
    yield from _grad_sync(recipe)
    num_groups = num_workers
    if isinstance(recipe.parallelism, Parallelism):
        yield from find_parallelism_problems(recipe, recipe.parallelism, num_workers or recipe.parallelism.world)
        num_groups = recipe.parallelism.replicate * recipe.parallelism.shard
    if recipe.evaluation.early_stop is not None and recipe.evaluation.every is None:
        yield "evaluation.early_stop", "needs evaluations, and evaluation.every is null: give a number of steps"
    if recipe.evaluation.tasks and huggingface_location(recipe.model.build) is None:
        yield "evaluation.tasks", f"needs a model of transformers, for lm-eval: model.build: {HF_PREFIX}PATH"
    yield from _sources(recipe)
    yield from _mixture(recipe.data)
    lr_scaling = recipe.optimizer.lr_scaling
    if lr_scaling is not None and lr_scaling.base_batch_size is None and not recipe.batch.scale_with_workers:
        problem = "base_batch_size is missing: for how many samples of a step is optimizer.lr right?"
        yield "optimizer.lr_scaling", f"{problem} (batch.scale_with_workers: true would say so)"
    if num_workers is not None and num_groups is not None:
        samples = scale_batch_with_workers(recipe, num_workers).batch.global_size
        yield from find_batch_problems(samples, recipe.batch.micro_size, num_groups)


def _adapter(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Adapters that start from the weights of the model."""
    adapter = recipe.adapter
    if adapter is None or adapter.init != "pissa":
        return
    if adapter.init_from is not None:
        yield "adapter.init", "pissa is a start from the model's weights, and adapter.init_from names another: give one"
    if adapter.base_dtype is not None:
        yield "adapter.init", f"pissa changes the weights that base_dtype: {adapter.base_dtype} freezes: give one"


def _images_in_messages(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Tasks and parallelisms that conversations with images go with."""
    if recipe.data.chat is None or not recipe.data.chat.images:
        return
    if recipe.task_kind in BUILT_IN_TASKS and recipe.task_kind not in ("chat", "language-modeling"):
        yield "data.chat.images", f"is for task: chat, and the task is {recipe.task_kind}: leave it out"
    for name in ("tensor", "pipeline", "context", "expert"):
        if isinstance(recipe.parallelism, Parallelism) and getattr(recipe.parallelism, name) > 1:
            yield f"parallelism.{name}", "does not divide a model of images: use replicate and shard"


def _quantization_aware(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Layers that round their weights as an INT4 export does."""
    key, layout = "model.quantization_aware", recipe.parallelism
    if huggingface_location(recipe.model.build) is None:
        yield key, f"is for an export to INT4, which needs a model that came with model.build: {HF_PREFIX}PATH"
    if recipe.adapter is not None:
        yield key, "rounds weights that are trained, and an adapter leaves them as they are: give one"
    if recipe.precision == "fp8":
        yield key, "and precision: fp8 round the same layers: give one"
    if isinstance(layout, Parallelism) and (layout.replicate * layout.shard != layout.world or layout.expert > 1):
        yield key, "needs whole weights: give parallelism.replicate and shard only"


def _promised(recipe: Recipe) -> str:
    """What `determinism` promises about what is sent: `auto` never sends less than `fixed-world`."""
    return "fixed-world" if recipe.determinism == "auto" else recipe.determinism


def _grad_sync(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """How gradients are added, and what they are sent as."""
    grad_sync = recipe.grad_sync
    determinism = _promised(recipe)
    compression, method, lossy = grad_sync.compression, grad_sync.method, grad_sync.compression != "none"
    key, other = ("grad_sync.compression", "none") if lossy else ("grad_sync.algorithm", "all-reduce")
    if lossy and grad_sync.algorithm not in ("auto", "all-reduce"):
        why = f"{compression} goes with algorithm: auto or all-reduce, and the algorithm is {grad_sync.algorithm}"
        yield key, f"{why}: use one of these, or compression: none"
    for name, given in (("warmup_steps", (DEFAULT_WARMUP_STEPS,)), ("powersgd_rank", ())):
        is_usual = not _is_given(grad_sync, name) or getattr(grad_sync, name) in given
        if not is_usual and compression != "powersgd":
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
        why = f"found {method}, but determinism: elastic has an order of addition of its own"
        yield key, f"{why}: use {other}, or determinism: {allowed}"
    elif lossy and determinism != "off":
        what = f"{method} rounds what it sends"
        yield key, f"{what}, which determinism: {determinism} forbids: use none, or determinism: off"
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
        problem = "is for workers that hold the whole model: give parallelism.replicate only, or local_sgd: null"
        yield "local_sgd", problem
    if local_sgd.method == "average" and _is_given(local_sgd, "outer_optimizer"):
        problem = "is for method: diloco, and average takes the plain mean: leave it out, or use diloco"
        yield "local_sgd.outer_optimizer", problem
    every, fragments, delay = local_sgd.sync_every, local_sgd.num_fragments, local_sgd.sync_delay
    if fragments > every:
        problem = f"found {fragments}, but at most one leaves after a step: at most sync_every = {every}"
        yield "local_sgd.num_fragments", problem
    elif delay >= every // fragments:
        between = every // fragments
        problem = f"found {delay}, but the next fragment leaves after {between}: at most {between - 1}"
        yield "local_sgd.sync_delay", problem
    if recipe.optimizer.state_dtype == "int8":
        yield "optimizer.state_dtype", "int8 state has no mean over workers, which local_sgd may have to take: use bf16"


def _sources(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Folders of pictures, and keys that only other sources have."""
    several_given = isinstance(recipe.data.source, list)
    sources = {f"data.source.{n}" if several_given else "data.source": one for n, one in enumerate(recipe.data.sources)}
    if recipe.evaluation.source is not None:
        sources["evaluation.source"] = recipe.evaluation.source
    for key, source in sources.items():
        if source.images is not None and source.image_size is None:
            yield key, "images need a common size, for instance `image_size: [224, 224]`"
        for name, kinds in SOURCES_WITH.items():
            if _is_given(source, name) and source.kind not in kinds:
                yield f"{key}.{name}", f"is for {', '.join(kinds)}, and the source is {source.kind}: leave it out"
    if all(source.has_images for source in recipe.data.sources):
        for name in OF_TEXT:
            if _is_given(recipe.data, name):
                yield f"data.{name}", "is for text, and the source has images: leave it out"
    if recipe.evaluation.source is not None and _is_given(recipe.evaluation, "holdout_fraction"):
        problem = "is a share of the training data, and evaluation.source names other data: leave one out"
        yield "evaluation.holdout_fraction", problem


def _mixture(data: DataConfig) -> Iterator[tuple[str, str]]:
    """The weights of the sources, step by step."""
    weights = [source.weight for source in data.sources]
    if data.temperature is not None and any(weight != 1 for weight in weights):
        yield "data.temperature", "makes the weights of the sources, and one has a `weight`: leave one out"
    if data.temperature is not None and data.prepare == "stream":
        yield "data.temperature", "needs sizes that a stream does not know at its start: give each source a `weight`"
    stages, previous_step = {"data.source": weights}, 1
    for number, stage in enumerate(data.curriculum or []):
        key = f"data.curriculum.{number}"
        stages[f"{key}.weights"] = stage.weights
        if stage.from_step <= previous_step:
            reason = (
                "the stages before have the steps until then" if number else "the first step has those of data.source"
            )
            yield f"{key}.from_step", f"found {stage.from_step}, expected at least {previous_step + 1}: {reason}"
        if len(stage.weights) != len(weights):
            yield f"{key}.weights", f"found {len(stage.weights)}, expected {len(weights)}: one for each of data.source"
        previous_step = stage.from_step
    without_weight = [key for key, stage_weights in stages.items() if not any(stage_weights)]
    yield from ((key, "all weights are 0; expected one above 0") for key in without_weight)
    for number, weights_of_source in enumerate(zip(*stages.values(), strict=False)):
        if not without_weight and not any(weights_of_source):
            yield f"data.source.{number}.weight", "is 0 in all steps: leave the source out, or give it a weight"


def _optimizer(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """The optimizer's state, where it is kept, and keys that only others have."""
    name, state = recipe.optimizer.name, recipe.optimizer.state_dtype
    for key, names in OPTIMIZERS_WITH.items():
        if _is_given(recipe.optimizer, key) and name not in names:
            yield f"optimizer.{key}", f"is for {', '.join(names)}, and the optimizer is {name}: leave it out"
    schedule = recipe.optimizer.schedule
    for key, decays in DECAYS_WITH.items():
        if _is_given(schedule, key) and schedule.decay not in decays:
            what = f"is for decay: {', '.join(decays)}, and it is {schedule.decay}: leave it out"
            yield f"optimizer.schedule.{key}", what
    if state != "fp32" and name != "adamw":
        yield "optimizer.state_dtype", f"{state} is for adamw; {name} keeps its state in fp32"
    if recipe.optimizer.offload and name not in ("adamw", "sgd"):
        why = f"a step of {name} needs whole matrices, not only the part that a worker holds"
        yield "optimizer.offload", f"true goes with adamw and sgd; {why}"
    if recipe.evaluation.weights == "ema" and recipe.optimizer.ema_decay is None:
        yield "evaluation.weights", "ema is the moving average of optimizer.ema_decay, which is null: give it, as 0.999"
    if recipe.optimizer.ema_decay is not None and recipe.local_sgd is not None:
        yield "optimizer.ema_decay", "goes without local_sgd, in which workers have weights of their own: give one"
    if recipe.memory.chunked_loss is True and recipe.task_kind == "classification":
        yield "memory.chunked_loss", "true is for language models, and the task is classification: use auto or false"
