"""Recipes and cluster files with other values in them: read to finite figures, or refused in sentences that name the
file."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mutations import SEED, attempt, hand, mutated, strange
from phalanx.cluster import load_cluster, save_cluster
from phalanx.recipe import Recipe, load_recipe
from phalanx.recipe.yaml_loader import parse_yaml, to_yaml

TRIED = 150
RECIPES: list[Any] = [
    Recipe().model_dump(mode="json"),
    {
        "model": {"build": "phalanx.models:moe", "args": {"num_experts": 4, "layers": 2}},
        "data": {"source": [{"text": ["a/*.txt", "b.txt"], "weight": 2}, {"prepared": "x"}], "tokenizer": {"bpe": 300}},
        "adapter": {"rank": 4, "target_modules": ["a", "b.*"]},
        "optimizer": {"lr_scaling": {"rule": "sqrt", "base_batch_size": 8}, "betas": [0.9, 0.99]},
        "parallelism": {"pipeline": 2, "layers_per_stage": [1, 1]},
        "determinism": "off",
        "local_sgd": {"method": "diloco", "outer_optimizer": {"lr": 0.5}},
        "checkpoint": {"in_memory_every": "2%"},
    },
]
CLUSTERS: list[Any] = [
    {"nodes": 16, "node": "dgx-h100"},
    {"nodes": 2, "node": {"like": "dgx-h100", "cores": 64, "accelerator": {"power_w": 500, "tflops": {"bf16": 900}}}},
    {
        "nodes": 4,
        "node": {"accelerator": "H100 SXM", "count": 8, "scale_up": "NVLink 4", "scale_out": {"link": "100GbE"}},
        "topology": {"kind": "rail", "oversubscription": 2},
        "storage": {"read_gbps": 100, "node_read_gbps": 10},
        "prices": {"device_hour": 2.5, "kwh": 0.2},
        "reliability": {"failures_per_1000_node_days": 5, "restart_s": 60},
        "notes": {"disks": [{"path": "/data"}]},
    },
]


def floats(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    for below in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from floats(below)


def texts(values: list[Any], name: str) -> Iterator[bytes]:
    """Mutations of YAML files; half of them are valid YAML of other values."""
    rng = hand(name)
    for turn in range(TRIED):
        value = rng.choice(values)
        for _ in range(rng.randrange(1, 3)):
            value = strange(value, rng)
        try:
            content = to_yaml(value).encode()
        except UnicodeEncodeError:  # half a character
            continue
        yield content if turn % 2 else mutated(content, rng)


@pytest.mark.timeout(60)
def test_a_cluster_file_is_a_cluster_or_refused_with_its_name(tmp_path: Path) -> None:
    read = 0
    for content in texts(CLUSTERS, "clusters"):
        (tmp_path / "room.yaml").write_bytes(content)
        cluster, refused = attempt(lambda: load_cluster("room.yaml", tmp_path))
        if cluster is None:
            assert refused.startswith(str(tmp_path / "room.yaml")), (content, refused)
            continue
        read += 1
        described = cluster.model_dump(exclude={"notes"})
        assert all(map(math.isfinite, floats(described))), content
        save_cluster(cluster, tmp_path / "saved.yaml")
        assert repr(load_cluster("saved.yaml", tmp_path)) == repr(cluster), content  # a note may be no number
    assert read > 0 or SEED


@pytest.mark.timeout(60)
def test_a_recipe_file_is_a_recipe_or_refused_with_its_name(tmp_path: Path) -> None:
    read = 0
    for content in texts(RECIPES, "recipes"):
        (tmp_path / "recipe.yaml").write_bytes(content)
        recipe, refused = attempt(lambda: load_recipe(tmp_path / "recipe.yaml").recipe)
        if recipe is None:
            assert refused.startswith(str(tmp_path / "recipe.yaml")), (content, refused)
            continue
        read += 1
        values = recipe.model_dump(mode="json")
        assert Recipe.model_validate(parse_yaml(to_yaml(values), "again")[0]) == recipe, content
    assert read > 0 or SEED
