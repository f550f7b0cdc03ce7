"""What must hold between the keys of a recipe and the workers that it gets; nothing is imported or run."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from phalanx.errors import RecipeError
from phalanx.recipe.devices import DeviceKind, kind_of
from phalanx.recipe.exchanges import FIRST, heeds_start
from phalanx.recipe.explain import nearest, several
from phalanx.recipe.growing import grown
from phalanx.recipe.imports import HUGGING_FACE
from phalanx.recipe.pipelines import fitting, stages_of, stages_problem
from phalanx.recipe.schema import (
    LOCAL,
    LOSSY,
    MOST_SAMPLES,
    SOURCE_KINDS,
    Data,
    Evaluate,
    Exchange,
    Layout,
    Optim,
    Recipe,
    Schedule,
    Source,
)

WORLD = ("replicate", "shard", "tensor", "pipeline", "context")
"""Dimensions of a layout whose product is the world."""
TASKS = {"language-modeling": "tokens", "classification": "images"}
"""What is learned -> the kind of data that it is learned from."""
"""Tasks that ship; any other is an import path."""
OPTIMIZERS_WITH = {"betas": ("adamw", "lamb", "muon"), "momentum": ("sgd", "muon", "lars")}
"""Key of `optim` -> optimizers that use it."""
DECAYS_WITH = {"power": ("poly",), "drops": ("step",), "gamma": ("step",), "final": ("cosine", "linear", "poly")}
"""Key of `optim.schedule` -> decays that use it."""
SOURCES_WITH = {"field": ("jsonl", "parquet"), "exclude": ("text", "jsonl", "parquet"), "size": ("images",)}
"""Key of a source -> kinds of sources that use it."""
OF_TEXT = ("tokenizer", "sequence", "documents")
"""Keys of `data` that pictures do not use."""
FP8_SINCE = (8, 9)
"""CUDA compute capability (Ada, Hopper) from which tensor cores know fp8."""
BF16_SINCE = (8, 0)
"""Likewise (Ampere) of bf16, which torch computes on older ones as well, slowly."""
FP8 = "PHALANX_FP8"
"""Environment variable; "always" takes fp8 for every layer that fits, on any device, without measuring. For tests."""
NO_FP8 = (
    "fp8 needs tensor cores that know it (NVIDIA Ada, Hopper or later: compute capability 8.9), and {} has none; "
    "bf16, fp16 or fp32 would be valid here"
)
"""What to say to that of a device by this name."""


def workers_for(recipe: Recipe, otherwise: int) -> int:
    """How many workers a run has when nobody says: as many as its layout takes, and `otherwise` where that is auto."""
    return recipe.layout.world if isinstance(recipe.layout, Layout) else otherwise


def check(
    recipe: Recipe, folder: Path, workers: int | None = 1, at: Callable[[str], str] = str, begins: bool = True
) -> None:
    """RecipeError when `recipe` cannot run on so many workers; one line for each problem.

    `folder` is the recipe's; without `workers` only what holds for any number of them is checked. `at` says in errors
    where a key was written (`Loaded.at`). A run that no longer `begins` needs no `init`.
    """
    if not begins:
        recipe = recipe.model_copy(update={"init": None})
    problems = [f"{at(key)}: {problem}" for key, problem in _problems(recipe, folder, workers)]
    if problems:
        raise several(problems)


def check_task(recipe: Recipe, kind: str, at: Callable[[str], str] = str) -> None:
    """RecipeError where a task of ours cannot learn from data of this kind, or where pictures have keys of text."""
    wanted = TASKS.get(recipe.task, kind)
    if wanted != kind:
        other = next(name for name, of in TASKS.items() if of == kind)
        raise RecipeError(
            f"{at('task')}: {recipe.task} is for {wanted}, and the data are {kind}; use {other}, a task of your own "
            f"(module:Class), or a data.source of {wanted}"
        )
    if kind == "images":
        for name in OF_TEXT:
            if getattr(recipe.data, name) != getattr(Data(), name):
                raise RecipeError(f"{at(f'data.{name}')}: is for text, and the data are pictures: leave it out")


def has_fp8(capability: Sequence[int] | None) -> bool:
    """Whether a device of this CUDA compute capability (None: it is no such device) multiplies in fp8."""
    return capability is not None and tuple(capability) >= FP8_SINCE


def has_bf16(capability: Sequence[int] | None) -> bool:
    """Whether a device of this CUDA compute capability (None: it is no such device) is no slower in bf16 than in fp32:
    False for NVIDIA GPUs before Ampere."""
    return capability is None or tuple(capability) >= BF16_SINCE


def check_device(
    recipe: Recipe,
    device: str,
    name: str,
    capability: Sequence[int] | None,
    at: Callable[[str], str] = str,
    fp8_anywhere: bool = False,
    rocm: bool = False,
) -> None:
    """RecipeError when what `recipe` asks for cannot be had on this device of torch ("cpu", "cuda", ...), `rocm` if it
    is AMD's."""
    kind = kind_of(device, rocm)
    fp8 = fp8_anywhere or ("fp8" in kind.precisions and has_fp8(capability))
    if problems := [f"{at(key)}: {problem}" for key, problem in device_problems(recipe, kind, name, fp8)]:
        raise several(problems)


def _problems(recipe: Recipe, folder: Path, workers: int | None) -> Iterator[tuple[str, str]]:
    """Each key with what is wrong about it."""
    if ":" not in recipe.task and recipe.task not in TASKS:
        known = f"expected {', '.join(TASKS)} or module:Class"
        yield "task", f"found {recipe.task!r}, {known}{nearest(recipe.task, tuple(TASKS))}"
    if recipe.init is not None and workers is not None:
        path = recipe.init.removeprefix(HUGGING_FACE)
        if path == recipe.init and (folder / path / "config.json").is_file():
            yield "init", f"{folder / path} is a Hugging Face directory, or an export; give {HUGGING_FACE}{path}"
        elif not (folder / path).exists():
            kind = "checkpoint or run" if path == recipe.init else "directory"
            yield "init", f"there is no {kind} at {folder / path}"
    yield from _device(recipe, workers or 1)
    yield from _optimizer(recipe)
    yield from _exchange(recipe)
    replicas = workers
    if isinstance(recipe.layout, Layout):
        yield from _layout(recipe, recipe.layout, workers or recipe.layout.world)
        replicas = recipe.layout.replicate * recipe.layout.shard
    yield from _sources(recipe)
    scaling = recipe.optim.scaling
    if scaling is not None and scaling.base_batch is None and recipe.batch.per is None:
        yield (
            "optim.scaling",
            "base_batch is missing: for how many samples of a step is optim.lr right? (batch.per: worker would say so)",
        )
    if workers is not None and replicas is not None:
        samples = grown(recipe, workers).batch.global_
        if samples > MOST_SAMPLES:
            yield (
                "batch.global",
                f"{samples:,} samples of {workers:,} workers, expected at most {MOST_SAMPLES:,} in all",
            )
        else:
            yield from _batch(samples, recipe.batch.micro, replicas)


def _asked(exchange: Exchange) -> str:
    """What `exact` promises about what is sent: `auto` never sends less than `world`."""
    return "world" if exchange.exact == "auto" else exchange.exact


def _exchange(recipe: Recipe) -> Iterator[tuple[str, str]]:
    strategy, exact, key = recipe.exchange.strategy, _asked(recipe.exchange), "exchange.strategy"
    for name in ("every", "outer", "fragments", "delay", "wire"):
        if getattr(recipe.exchange, name) != getattr(Exchange(), name) and strategy not in LOCAL:
            yield f"exchange.{name}", f"is for strategy: local or diloco, and the strategy is {strategy}: leave it out"
    if recipe.exchange.start not in ("auto", FIRST) and not heeds_start(recipe.exchange):
        told = f"is for strategy: powersgd, local or diloco, and the strategy is {strategy}: leave it out"
        yield "exchange.start", told
    if recipe.exchange.low_rank != Exchange().low_rank and strategy != "powersgd":
        yield "exchange.low_rank", f"is for strategy: powersgd, and the strategy is {strategy}: leave it out"
    if strategy in LOCAL:
        yield from _local(recipe)
        return
    if strategy in ("auto", "allreduce"):
        return
    if exact == "replicas":
        yield key, f"found {strategy}, but exact: replicas has a way of its own to add up: use auto, or exact: world"
    elif strategy in LOSSY and exact != "no":
        yield key, f"{strategy} rounds what it sends, which exact: {exact} forbids: use allreduce, or exact: no"
    if isinstance(recipe.layout, Layout):
        layout, sharded = recipe.layout, recipe.layout.shard * recipe.layout.context * recipe.layout.expert > 1
        if layout.replicate == 1 < layout.world:
            yield key, f"{strategy} is for replicas, and layout has none: give layout.replicate, or allreduce"
        elif layout.pipeline > 1 or (sharded and layout.replicate * layout.shard != layout.world):
            yield key, f"{strategy} goes with replicate and shard, or replicate and tensor: give these, or allreduce"
        elif strategy == "powersgd" and layout.replicate != layout.world:
            yield key, "powersgd projects whole gradients: give layout.replicate only, or int8"
    if strategy in ("int8", "powersgd") and recipe.precision == "fp16":
        yield key, f"{strategy} keeps what it could not send, but the loss scale of fp16 changes: use bf16"


def _local(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Workers that take steps of their own."""
    strategy, exact, key = recipe.exchange.strategy, _asked(recipe.exchange), "exchange.strategy"
    if exact != "no":
        yield key, f"{strategy} has workers train apart, which exact: {exact} forbids: use allreduce, or exact: no"
    if isinstance(recipe.layout, Layout) and recipe.layout.replicate != recipe.layout.world:
        yield key, f"{strategy} is for workers that hold the whole model: give layout.replicate only, or allreduce"
    if strategy == "local" and recipe.exchange.outer != Exchange().outer:
        yield "exchange.outer", "is for strategy: diloco, and local takes the plain mean: leave it out, or use diloco"
    every, fragments, delay = recipe.exchange.every, recipe.exchange.fragments, recipe.exchange.delay
    if fragments > every:
        yield "exchange.fragments", f"found {fragments}, but at most one leaves after a step: at most every = {every}"
    elif delay >= every // fragments:
        between = every // fragments
        yield "exchange.delay", f"found {delay}, but the next fragment leaves after {between}: at most {between - 1}"
    if recipe.optim.state == "8bit":
        yield "optim.state", f"8bit state has no mean over workers, which {strategy} may have to take: use bf16"


def _layout(recipe: Recipe, layout: Layout, workers: int) -> Iterator[tuple[str, str]]:
    if layout.world != workers:
        product = " x ".join(f"{name} {getattr(layout, name)}" for name in WORLD if getattr(layout, name) > 1)
        yield (
            "layout",
            f"takes {layout.world} workers ({product or 'one of each'}), but the run has {workers}: "
            f"use --nproc {layout.world} or layout=auto",
        )
    sharded = layout.shard * layout.context
    if sharded % layout.expert:
        yield "layout.expert", f"found {layout.expert}, which must divide shard x context = {sharded}"
    others = layout.replicate * layout.shard != layout.world or layout.expert > 1
    if recipe.exchange.exact == "replicas" and others:
        yield "layout", "exchange.exact = replicas goes with replicate and shard only: give these, or exact: world"
    if recipe.optim.name == "muon" and layout.tensor > 1:
        yield "layout.tensor", "muon works on whole matrices, which tensor ranks do not have; use layout.shard or adamw"
    if recipe.compile == "graphs" and layout.replicate != layout.world:
        yield "compile", "graphs cannot hold the communication of a divided model: give layout.replicate only, or true"
    if recipe.compile is True and layout.splits_backward:
        yield (
            "compile",
            f"blocks of a {layout.schedule} pipeline cannot be compiled; use false, or layout.schedule=1f1b",
        )
    if recipe.memory.recompute == "selective" and layout.splits_backward:
        why = f"a {layout.schedule} pipeline's backward comes in two parts, of which selective repeats one"
        yield "memory.recompute", f"{why}; use full or none, or layout.schedule=1f1b"
    yield from _pipeline(recipe, layout)
    if layout.overlap and layout.tensor == 1:
        yield "layout.overlap", "is about what tensor ranks send each other; give layout.tensor, or false"
    for name in ("tensor", "expert"):
        if recipe.optim.state == "8bit" and getattr(layout, name) > 1:
            yield f"layout.{name}", "optim.state = 8bit keeps blocks of whole rows, which would be cut; use bf16"
    for name in ("tensor", "context"):
        if getattr(layout, name) > 1 and recipe.task == "classification":
            yield f"layout.{name}", "is for models of sequences; classification of images has none"
    if (length := recipe.data.sequence) % layout.context:
        yield "layout.context", f"found {layout.context}, which must divide data.sequence = {length}"


def _pipeline(recipe: Recipe, layout: Layout) -> Iterator[tuple[str, str]]:
    """Stages and micro-batches of a pipeline."""
    stages, ranks = stages_of(layout), layout.pipeline
    if ranks == 1:
        if layout.stages is not None:
            yield "layout.stages", "is for pipelines: give layout.pipeline, or leave it out"
        if layout.schedule != Layout().schedule:
            yield "layout.schedule", f"{layout.schedule} is for pipelines: give layout.pipeline, or leave it out"
        return
    if problem := stages_problem(layout.schedule, stages, ranks):
        yield "layout.pipeline" if layout.stages is None else "layout.stages", problem
        return
    parts = layout.replicate * layout.shard
    share, micro = recipe.batch.global_ // parts, recipe.batch.micro
    if recipe.batch.global_ % parts or (isinstance(micro, int) and share % micro):
        return  # which is another problem
    sizes = [size for size in divisors(share) if fitting(layout.schedule, share // size, stages, ranks)]
    what = f"{layout.schedule} with {stages} stages on {ranks} ranks"
    if not sizes:
        yield "batch.global", f"{what} has no micro-batch that fits the {share} samples of a step; raise it"
    elif isinstance(micro, int) and micro not in sizes:
        valid = ", ".join(map(str, sizes))
        yield "batch.micro", f"{what} cannot run {share // micro} micro-batches a step; {valid} would be valid"


def _device(recipe: Recipe, workers: int) -> Iterator[tuple[str, str]]:
    """What no device of a kind that the recipe names has, whichever machine it is on."""
    if recipe.device == "auto":
        return
    kind = kind_of(recipe.device)
    fp8_anywhere = os.environ.get(FP8) == "always"
    yield from device_problems(recipe, kind, kind.what, "fp8" in kind.precisions or fp8_anywhere)
    if workers > 1 and kind.backend is None:
        yield (
            "device",
            f"found {recipe.device}, on which torch has no way to exchange gradients; use one worker, or cpu",
        )


def device_problems(recipe: Recipe, kind: DeviceKind, name: str, fp8: bool) -> Iterator[tuple[str, str]]:
    """What a recipe asks for that a kind of device does not have; `name` is what the device is called."""
    if recipe.precision == "fp8" and not fp8:
        yield "precision", NO_FP8.format(name + kind.about_fp8)
    if recipe.compile == "graphs" and not kind.graphs:
        what = "has none" if kind.is_gpu else "is no GPU"
        yield "compile", f"graphs are CUDA graphs, and {name} {what}; true or false would be valid"
    if recipe.exchange.exact in ("world", "replicas") and not kind.deterministic:
        yield (
            "exchange.exact",
            f"found {recipe.exchange.exact}, but torch does not say which kernels give the same bits twice on {name}; "
            "auto or no would be valid, or device=cpu",
        )


def _sources(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Folders of pictures, and keys that only other sources have."""
    several_given = isinstance(recipe.data.source, list)
    sources = {f"data.source.{number}" if several_given else "data.source": each for number, each in _listed(recipe)}
    if recipe.evaluate.source is not None:
        sources["evaluate.source"] = recipe.evaluate.source
    for key, source in sources.items():
        if source.images is not None and source.size is None:
            yield key, "images need a common size, for instance `size: [224, 224]`"
        (kind,) = (name for name in SOURCE_KINDS if getattr(source, name) is not None)
        for name, kinds in SOURCES_WITH.items():
            if (
                getattr(source, name) != Source.model_fields[name].get_default(call_default_factory=True)
                and kind not in kinds
            ):
                yield f"{key}.{name}", f"is for {', '.join(kinds)}, and the source is {kind}: leave it out"
    if all(source.images is not None or source.idx is not None for _, source in _listed(recipe)):
        for name in OF_TEXT:
            if getattr(recipe.data, name) != getattr(Data(), name):
                yield f"data.{name}", "is for text, and the source has pictures: leave it out"
    if recipe.evaluate.source is not None and recipe.evaluate.share != Evaluate().share:
        yield "evaluate.share", "is a share of the training data, and evaluate.source names other data: leave one out"


def _listed(recipe: Recipe) -> Iterator[tuple[int, Source]]:
    source = recipe.data.source
    yield from enumerate(source if isinstance(source, list) else [source])


def _optimizer(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """The optimizer's state, where it is kept, and keys that only others have."""
    name, state = recipe.optim.name, recipe.optim.state
    for key, names in OPTIMIZERS_WITH.items():
        if getattr(recipe.optim, key) != getattr(Optim(), key) and name not in names:
            yield f"optim.{key}", f"is for {', '.join(names)}, and the optimizer is {name}: leave it out"
    schedule = recipe.optim.schedule
    for key, decays in DECAYS_WITH.items():
        if getattr(schedule, key) != getattr(Schedule(), key) and schedule.decay not in decays:
            what = f"is for decay: {', '.join(decays)}, and it is {schedule.decay}: leave it out"
            yield f"optim.schedule.{key}", what
    if state != "fp32" and name != "adamw":
        yield "optim.state", f"{state} is for adamw; {name} keeps its state in fp32"
    if recipe.memory.offload == "optimizer" and name not in ("adamw", "sgd"):
        yield (
            "memory.offload",
            f"optimizer goes with adamw and sgd; a step of {name} needs whole matrices, not only the part that a "
            "worker holds",
        )
    if recipe.memory.loss == "chunked" and recipe.task == "classification":
        yield "memory.loss", "chunked is for language models, and the task is classification: use auto or whole"


def _batch(samples: int, micro: int | str, parts: int) -> Iterator[tuple[str, str]]:
    """`parts`: workers, or groups of them, among which the batch is divided."""
    if samples % parts:
        below, above = samples // parts * parts, (samples // parts + 1) * parts
        fits = " or ".join(str(size) for size in (below, above) if size)
        yield "batch.global", f"{samples} samples cannot be divided among {parts} workers; {fits} can"
    elif isinstance(micro, int) and samples % (micro * parts):
        share = samples // parts
        best = min(divisors(share), key=lambda size: (abs(size - micro), size))
        yield (
            "batch.micro",
            (
                f"{micro} x {parts} {'worker' if parts == 1 else 'workers'} = {micro * parts} does not divide "
                f"batch.global = {samples}; the nearest micro-batch that does is {best}"
            ),
        )


def divisors(number: int) -> list[int]:
    """All of them, the smallest first."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]
