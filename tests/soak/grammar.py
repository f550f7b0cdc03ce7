"""What a soak trains: a recipe as a pure function of a random generator, with the workers that it may run on. Most are
valid; some combine what Phalanx refuses, which must then be said before any step."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Values = dict[str, Any]

TEXTS, IMAGES, SIDE, CLASSES = 6, 240, 16, 4
SEQUENCE_MODELS = {
    "phalanx.models:transformer": 5,
    "phalanx.models:moe": 2,
    "lab_models:Stateful": 2,
    "lab_models:frozen": 1,
    "lab_models:frozen_experts": 1,
}
IMAGE_MODELS = {"phalanx.models:resnet": 1, "soak_models:normalised": 1}
CHANGED_BY_FORWARD = ("lab_models:Stateful", "soak_models:normalised")
FIXED_ORDER = ("ring", "tree", "halving", "server", "sharded-server", "hierarchical", "allreduce")
ROUNDED = ("bf16", "int8", "powersgd", "local", "diloco")
"""Strategies that keep their bits on the same number of workers, though they promise nothing beyond it."""


@dataclass(frozen=True)
class Drawn:
    """A recipe, its workers, all together, and where they are. `others`: on so many workers it may go on to the same
    bits, `world` among them."""

    recipe: Values
    world: int
    others: tuple[int, ...]
    nodes: int = 1
    queue: bool = False

    def __str__(self) -> str:
        recipe = self.recipe
        exchange, optim = recipe["exchange"], recipe["optim"]
        words = [recipe["model"]["build"].partition(":")[2], optim["name"], recipe["precision"]]
        words += [f"exact={exchange['exact']}", exchange.get("strategy", "auto")]
        layout = recipe.get("layout", "auto")
        words.append(layout if layout == "auto" else ",".join(f"{name}={value}" for name, value in layout.items()))
        where = "queue" if self.queue else f"{self.nodes} nodes" if self.nodes > 1 else "here"
        return f"{' '.join(words)}; {'/'.join(map(str, self.others))} workers, {where}"


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


def drawn(rng: random.Random) -> Drawn:
    """The next recipe."""
    images = rng.random() < 0.15
    build = weighted(rng, IMAGE_MODELS if images else SEQUENCE_MODELS)
    exact = weighted(rng, {"world": 5, "replicas": 4, "no": 3, "auto": 1})
    if exact == "replicas" and build in CHANGED_BY_FORWARD and rng.random() < 0.9:  # which is refused
        exact = "world"
    world = weighted(rng, {1: 3, 2: 10, 3: 1, 4: 1})
    steps = rng.randint(60, 200)
    recipe: Values = {
        "name": "soak",
        "model": _model(rng, build),
        "data": _image_data() if images else _text_data(rng),
        "evaluate": _evaluation(rng, images),
        "batch": {
            "global": 12,
            "micro": weighted(rng, {1: 3, "auto": 2} if world > 2 else {1: 3, 2: 2, 3: 1, "auto": 2}),
        },
        "steps": steps,
        "optim": _optimizer(rng),
        "precision": weighted(rng, {"fp32": 6, "bf16": 4, "fp16": 0.5, "auto": 1}),
        "compile": False,
        "threads": 1,
        "seed": rng.randrange(1000),
        "memory": {"recompute": weighted(rng, {"auto": 2, "none": 2, "selective": 2, "full": 2})},
        "exchange": {"exact": exact, **_exchange(rng, exact, world)},
        "checkpoint": {"every": weighted(rng, {rng.randint(4, 25): 8, None: 1}), "keep": rng.randint(1, 3)},
        "recovery": {"attempts": 6, "hot": weighted(rng, {"1%": 3, "20%": 1, None: 3, rng.randint(1, 7): 3})},
    }
    if images:
        recipe["task"] = "classification"
    else:
        ours = build == "phalanx.models:transformer"  # whose output layer has no bias
        recipe["memory"]["loss"] = weighted(rng, {"auto": 2, "whole": 1, "chunked": 1 if ours else 0})
        if build == "phalanx.models:transformer" and rng.random() < 0.15:
            recipe["adapter"] = {"rank": rng.choice([1, 4]), "dropout": rng.choice([0.0, 0.1])}
    offloaded = rng.random() < 0.2
    if offloaded and (recipe["optim"]["name"] in ("adamw", "sgd") or rng.random() < 0.1):  # others are refused
        recipe["memory"]["offload"] = "optimizer"
    if build == "lab_models:Stateful" and rng.random() < 0.9:  # it knows of no documents
        recipe["data"]["documents"] = "join"
    if world > 1 and rng.random() < 0.6:
        recipe["layout"] = _layout(rng, build, world)
        if exact == "replicas" and recipe["layout"].keys() - {"replicate", "shard"} and rng.random() < 0.9:
            recipe["layout"] = {"replicate": world}
        if "replicate" not in recipe["layout"] and rng.random() < 0.9:  # only replicas have other strategies
            recipe["exchange"].pop("strategy", None)
    elif exact == "replicas":
        recipe["batch"]["micro"] = weighted(rng, {1: 3, "auto": 1})
        return Drawn(recipe, world, tuple(sorted({world, *rng.sample([1, 2, 3], 2)})))
    if recipe["checkpoint"]["every"] is not None and rng.random() < 0.2:
        if world == 2 and rng.random() < 0.6:
            return Drawn(recipe, world, (world,), nodes=2)
        return Drawn(recipe, world, (world,), queue=True)
    return Drawn(recipe, world, (world,))


def _model(rng: random.Random, build: str) -> Values:
    if build == "phalanx.models:resnet":
        return {"build": build, "args": {"width": 8, "blocks": [1, 1], "channels": 1}}
    if build == "soak_models:normalised":
        return {"build": build, "args": {"channels": 1}}
    args: Values = {"layers": rng.choice([1, 2, 4]), "width": 32, "heads": 2}
    if build.endswith(("moe", "frozen_experts")):
        args |= {"experts": 4}
    if rng.random() < 0.3:
        args["dropout"] = 0.1
    return {"build": build, "args": args}


def _text_data(rng: random.Random) -> Values:
    return {
        "source": {"text": "text-*.txt"},
        "tokenizer": "bytes" if rng.random() < 0.8 else {"bpe": 300},
        "sequence": 32,
        "documents": weighted(rng, {"join": 2, "separate": 1}),
    }


def _image_data() -> Values:
    return {"source": {"idx": {"images": "images.idx", "labels": "labels.idx"}}}


def _evaluation(rng: random.Random, images: bool) -> Values:
    found: Values = {"every": weighted(rng, {None: 1, 5: 1, 20: 3}), "share": 0.05, "samples": rng.choice([3, 6])}
    if rng.random() < 0.15:
        del found["share"]
        found["source"] = _image_data()["source"] if images else {"text": "text-0.txt"}
    return found


def _optimizer(rng: random.Random) -> Values:
    found: Values = {
        "name": weighted(rng, {"adamw": 6, "sgd": 2, "muon": 2, "lars": 1, "lamb": 1}),
        "lr": 3e-3,
        "clip": rng.choice([1.0, 1.0, None]),
        "schedule": {
            "warmup": rng.choice([0, 5, 20]),
            "decay": rng.choice(["cosine", "linear", "poly", "step", "constant"]),
        },
    }
    if found["name"] == "adamw":
        found["state"] = weighted(rng, {"fp32": 3, "bf16": 2, "8bit": 2})
    return found


def _exchange(rng: random.Random, exact: str, world: int) -> Values:
    if exact == "replicas" or world == 1 or rng.random() < 0.5:
        return {"bucket": rng.choice(["auto", 0.01])} if exact != "no" else {"strategy": "allreduce"}
    if exact != "no":
        return {"strategy": rng.choice(FIXED_ORDER), "bucket": rng.choice(["auto", 0.01])}
    strategy = rng.choice(ROUNDED)
    found: Values = {"strategy": strategy}
    if strategy in ("local", "diloco"):
        found |= {
            "every": rng.choice([3, 8]),
            "start": rng.choice([0, 5]),
            "wire": rng.choice(["fp32", "bf16", "int8"]),
        }
        found |= {"fragments": rng.choice([1, 2]), "delay": rng.choice([0, 0, 1])} if found["every"] == 8 else {}
    elif strategy == "powersgd":
        found |= {"low_rank": rng.choice([1, 4]), "start": rng.choice([0, 10])}
    return found


def _layout(rng: random.Random, build: str, world: int) -> Values:
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
        found["schedule"] = rng.choice(["gpipe", "1f1b", "interleaved", "zero-bubble"])
    return found
