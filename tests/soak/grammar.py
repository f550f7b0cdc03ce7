"""What a soak trains: a recipe as a pure function of a random generator, with the workers that it may run on. Most are
valid; some combine what Phalanx refuses, which must then be said before any step."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parallelism_cases import Values, draw_case

TEXTS, IMAGES, SIDE, CLASSES = 6, 240, 16, 4
SEQUENCE_MODELS = {
    "phalanx.models:transformer": 5,
    "phalanx.models:moe": 2,
    "user_models:Stateful": 2,
    "user_models:frozen": 1,
    "user_models:frozen_experts": 1,
}
IMAGE_MODELS = {"phalanx.models:resnet": 1, "soak_models:normalised": 1}
CHANGED_BY_FORWARD = ("user_models:Stateful", "soak_models:normalised")
FIXED_ORDER = ("binomial-tree", "parameter-server", "all-reduce")
ROUNDED = ("bf16", "int8", "powersgd", "average", "diloco")
"""Compressions and methods of local SGD that keep their bits on the same number of workers, though they promise nothing
beyond it."""

FINETUNING_TASKS: dict[str, tuple[str, Any]] = {
    "chat": ("chat", "chat"),
    "kto": ("labels", {"kind": "preference", "loss": "kto"}),
    "distillation": ("chat", {"kind": "distillation", "teacher": "hf:teacher"}),
    "grpo": ("chat", {"kind": "grpo", "reward": "chat_rewards:letters", "group_size": 4, "max_new_tokens": 5}),
}


@dataclass(frozen=True)
class RecipeSample:
    """A recipe, its workers, all together, and where they are. `others`: on so many workers it may go on to the same
    bits, `world` among them."""

    recipe: Values
    world: int
    others: tuple[int, ...]
    nodes: int = 1
    queue: bool = False

    def __str__(self) -> str:
        recipe = self.recipe
        optim = recipe["optimizer"]
        words = [recipe["model"]["build"].partition(":")[2], optim["name"], recipe["precision"]]
        words += [f"determinism={recipe['determinism']}", method_of(recipe)]
        layout = recipe.get("parallelism", "auto")
        words.append(layout if layout == "auto" else ",".join(f"{name}={value}" for name, value in layout.items()))
        where = "queue" if self.queue else f"{self.nodes} nodes" if self.nodes > 1 else "here"
        return f"{' '.join(words)}; {'/'.join(map(str, self.others))} workers, {where}"


def method_of(recipe: Values) -> str:
    """How workers of a recipe agree: a method of local SGD, a compression or an algorithm."""
    if recipe.get("local_sgd"):
        return str(recipe["local_sgd"]["method"])
    grad_sync = recipe["grad_sync"]
    return str(grad_sync.get("compression", grad_sync.get("algorithm", "auto")))


def weighted(rng: random.Random, weights: dict[Any, float]) -> Any:
    """One of the keys."""
    return rng.choices(list(weights), list(weights.values()))[0]


def write_sources(folder: Path, words: Any) -> None:
    """The data of all recipes: a few short texts, and images of a few classes. `words`: text of a seed and a length."""
    for number in range(TEXTS):
        (folder / f"text-{number}.txt").write_text(words(number, 160))
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, IMAGES).astype(np.uint8)
    pixels = (rng.integers(0, 128, (IMAGES, SIDE, SIDE)) + 30 * labels[:, None, None]).astype(np.uint8)
    sizes = (IMAGES, SIDE, SIDE)
    (folder / "images.idx").write_bytes(b"\0\0\x08\x03" + np.array(sizes, ">u4").tobytes() + pixels.tobytes())
    (folder / "labels.idx").write_bytes(b"\0\0\x08\x01" + np.array(sizes[:1], ">u4").tobytes() + labels.tobytes())


def draw_recipe(rng: random.Random) -> RecipeSample:
    """A recipe that trains from random weights."""
    images = rng.random() < 0.15
    build = weighted(rng, IMAGE_MODELS if images else SEQUENCE_MODELS)
    determinism = weighted(rng, {"fixed-world": 5, "elastic": 4, "off": 3, "auto": 1})
    if determinism == "elastic" and build in CHANGED_BY_FORWARD and rng.random() < 0.9:  # which is refused
        determinism = "fixed-world"
    world = weighted(rng, {1: 3, 2: 10, 3: 1, 4: 1})
    steps = rng.randint(60, 200)
    recipe: Values = {
        "name": "soak",
        "model": _model(rng, build),
        "data": _image_data() if images else _text_data(rng),
        "evaluation": _evaluation(rng, images),
        "batch": {
            "global_size": 12,
            "micro_size": weighted(rng, {1: 3, "auto": 2} if world > 2 else {1: 3, 2: 2, 3: 1, "auto": 2}),
        },
        "steps": steps,
        "optimizer": _optimizer(rng),
        "precision": weighted(rng, {"fp32": 6, "bf16": 4, "fp16": 0.5, "auto": 1}),
        "compile": False,
        "num_threads": 1,
        "seed": rng.randrange(1000),
        "memory": {"activation_checkpointing": weighted(rng, {"auto": 2, "none": 2, "selective": 2, "full": 2})},
        "determinism": determinism,
        **_synchronisation(rng, determinism, world),
        "checkpoint": _checkpoint(rng),
        "fault_tolerance": {"max_restarts": 6},
    }
    if images:
        recipe["task"] = "classification"
    else:
        ours = build == "phalanx.models:transformer"  # whose output layer has no bias
        recipe["memory"]["chunked_loss"] = weighted(rng, {"auto": 2, False: 1, True: 1 if ours else 0})
        if build == "phalanx.models:transformer" and rng.random() < 0.15:
            recipe["adapter"] = {"rank": rng.choice([1, 4]), "dropout": rng.choice([0.0, 0.1])}
    offloaded = rng.random() < 0.2
    if offloaded and (recipe["optimizer"]["name"] in ("adamw", "sgd") or rng.random() < 0.1):  # others are refused
        recipe["optimizer"]["offload"] = True
    if build == "user_models:Stateful" and rng.random() < 0.9:  # it knows of no documents
        recipe["data"]["document_masking"] = False
    if world > 1 and rng.random() < 0.6:
        recipe["parallelism"] = _draw_parallelism(rng, build, world)
        if determinism == "elastic" and recipe["parallelism"].keys() - {"replicate", "shard"} and rng.random() < 0.9:
            recipe["parallelism"] = {"replicate": world}
        if "replicate" not in recipe["parallelism"] and rng.random() < 0.9:  # only replicas have other methods
            recipe["grad_sync"] = {"bucket_mib": recipe["grad_sync"].get("bucket_mib", "auto")}
            recipe.pop("local_sgd", None)
    elif determinism == "elastic":
        recipe["batch"]["micro_size"] = weighted(rng, {1: 3, "auto": 1})
        return RecipeSample(recipe, world, tuple(sorted({world, *rng.sample([1, 2, 3], 2)})))
    if recipe["checkpoint"]["every"] is not None and rng.random() < 0.2:
        if world == 2 and rng.random() < 0.6:
            return RecipeSample(recipe, world, (world,), nodes=2)
        return RecipeSample(recipe, world, (world,), queue=True)
    return RecipeSample(recipe, world, (world,))


def draw_matrix_recipe(rng: random.Random) -> RecipeSample:
    """A recipe of the parity matrix (its models, layouts, precisions, optimizers and data), with checkpoints."""
    case = draw_case(rng, max_workers=4)
    recipe: Values = {
        **case.changes,
        "name": "soak",
        "parallelism": case.layout.values,
        "grad_sync": {},
        "compile": False,
        "num_threads": 1,
        "seed": rng.randrange(1000),
        "determinism": weighted(rng, {"fixed-world": 3, "off": 1}),
        "steps": rng.randint(60, 120),
        "checkpoint": _checkpoint(rng),
        "fault_tolerance": {"max_restarts": 6},
    }
    recipe["evaluation"] = {**recipe["evaluation"], "every": rng.choice([5, 20]), "holdout_fraction": 0.05}
    return RecipeSample(recipe, case.layout.workers, (case.layout.workers,))


def draw_finetuning_recipe(rng: random.Random) -> RecipeSample:
    """A recipe that fine-tunes a tiny Llama on conversations, preferences, a teacher's or its own answers."""
    name = weighted(rng, {"chat": 4, "dpo": 2, "ipo": 1, "kto": 2, "orpo": 1, "simpo": 1, "distillation": 2, "grpo": 1})
    source, task = FINETUNING_TASKS.get(name, ("pairs", {"kind": "preference", "loss": name}))
    data: Values = {"source": {"jsonl": f"{source}.jsonl"}, "tokenizer": "base", "seq_len": 64}
    if name in ("chat", "distillation"):
        data |= {"chat": {}, "packing": rng.choice(["whole", "single"]), "document_masking": True}
    determinism = weighted(rng, {"fixed-world": 4, "elastic": 3, "off": 1})
    world = weighted(rng, {1: 3, 2: 5, 3: 1})
    recipe: Values = {
        "name": "soak",
        "model": {"build": "hf:base"},
        "task": task,
        "data": data,
        "evaluation": {"every": rng.choice([None, 5]), "holdout_fraction": 0.2},
        "batch": {"global_size": 12, "micro_size": rng.choice([1, 2])},
        "steps": rng.randint(20, 60),
        "optimizer": _optimizer(rng),
        "precision": weighted(rng, {"fp32": 3, "bf16": 2}),
        "compile": False,
        "num_threads": 1,
        "seed": rng.randrange(1000),
        "determinism": determinism,
        "grad_sync": {},
        "checkpoint": _checkpoint(rng),
        "fault_tolerance": {"max_restarts": 6},
    }
    if rng.random() < 0.4:
        kind = rng.choice(["lora", "rslora", "dora"])
        init = "pissa" if kind == "lora" and rng.random() < 0.5 else "default"
        recipe["adapter"] = {"kind": kind, "init": init, "rank": 2, "dropout": rng.choice([0.0, 0.1])}
    if determinism == "elastic":
        recipe["batch"]["micro_size"] = 1
        return RecipeSample(recipe, world, tuple(sorted({world, *rng.sample([1, 2, 3], 2)})))
    if world > 1:
        recipe["parallelism"] = {weighted(rng, {"replicate": 3, "shard": 2, "tensor": 1}): world}
    return RecipeSample(recipe, world, (world,))


def _model(rng: random.Random, build: str) -> Values:
    if build == "phalanx.models:resnet":
        return {"build": build, "args": {"base_channels": 8, "blocks": [1, 1], "in_channels": 1}}
    if build == "soak_models:normalised":
        return {"build": build, "args": {"in_channels": 1}}
    args: Values = {"layers": rng.choice([1, 2, 4]), "hidden_size": 32, "num_heads": 2}
    if build.endswith(("moe", "frozen_experts")):
        args |= {"num_experts": 4}
    if rng.random() < 0.3:
        args["dropout"] = 0.1
    return {"build": build, "args": args}


def _text_data(rng: random.Random) -> Values:
    return {
        "source": {"text": "text-*.txt"},
        "tokenizer": "bytes" if rng.random() < 0.8 else {"bpe": 300},
        "seq_len": 32,
        "document_masking": weighted(rng, {False: 2, True: 1}),
    }


def _image_data() -> Values:
    return {"source": {"idx": {"images": "images.idx", "labels": "labels.idx"}}}


def _checkpoint(rng: random.Random) -> Values:
    return {
        "every": weighted(rng, {rng.randint(4, 25): 8, None: 1}),
        "keep": rng.randint(1, 3),
        "in_memory_every": weighted(rng, {"1%": 3, "20%": 1, None: 3, rng.randint(1, 7): 3}),
    }


def _evaluation(rng: random.Random, images: bool) -> Values:
    found: Values = {
        "every": weighted(rng, {None: 1, 5: 1, 20: 3}),
        "holdout_fraction": 0.05,
        "max_samples": rng.choice([3, 6]),
    }
    if rng.random() < 0.15:
        del found["holdout_fraction"]
        found["source"] = _image_data()["source"] if images else {"text": "text-0.txt"}
    return found


def _optimizer(rng: random.Random) -> Values:
    found: Values = {
        "name": weighted(rng, {"adamw": 6, "sgd": 2, "muon": 2, "lars": 1, "lamb": 1}),
        "lr": 3e-3,
        "max_grad_norm": rng.choice([1.0, 1.0, None]),
        "schedule": {
            "warmup_steps": rng.choice([0, 5, 20]),
            "decay": rng.choice(["cosine", "linear", "poly", "step", "constant"]),
        },
    }
    if found["name"] == "adamw":
        found["state_dtype"] = weighted(rng, {"fp32": 3, "bf16": 2, "int8": 2})
    return found


def _synchronisation(rng: random.Random, determinism: str, world: int) -> Values:
    """`grad_sync`, and `local_sgd` for some."""
    if determinism == "elastic" or world == 1 or rng.random() < 0.5:
        fixed: Values = (
            {"algorithm": "all-reduce"} if determinism == "off" else {"bucket_mib": rng.choice(["auto", 0.01])}
        )
        return {"grad_sync": fixed}
    if determinism != "off":
        return {"grad_sync": {"algorithm": rng.choice(FIXED_ORDER), "bucket_mib": rng.choice(["auto", 0.01])}}
    method = rng.choice(ROUNDED)
    if method in ("average", "diloco"):
        found: Values = {
            "method": method,
            "sync_every": rng.choice([3, 8]),
            "warmup_steps": rng.choice([0, 5]),
            "sync_dtype": rng.choice(["fp32", "bf16", "int8"]),
        }
        if found["sync_every"] == 8:
            found |= {"num_fragments": rng.choice([1, 2]), "sync_delay": rng.choice([0, 0, 1])}
        return {"grad_sync": {}, "local_sgd": found}
    thin = {"powersgd_rank": rng.choice([1, 4]), "warmup_steps": rng.choice([0, 10])} if method == "powersgd" else {}
    return {"grad_sync": {"compression": method, **thin}}


def _draw_parallelism(rng: random.Random, build: str, world: int) -> Values:
    if world == 4:
        first, second = rng.choice([("replicate", "shard"), ("pipeline", "replicate"), ("tensor", "shard")])
        return {first: 2, second: 2}
    kinds = {"replicate": 3, "shard": 3, "tensor": 2, "pipeline": 2, "context": 1}
    if build in IMAGE_MODELS:
        kinds = {"replicate": 1, "shard": 1}
    kind = weighted(rng, kinds)
    found: Values = {kind: world}
    if kind == "shard" and "moe" in build and world == 2:
        found["expert"] = rng.choice([1, 2])
    if kind == "pipeline":
        found["pipeline_schedule"] = rng.choice(["gpipe", "1f1b", "interleaved", "zero-bubble"])
    return found
