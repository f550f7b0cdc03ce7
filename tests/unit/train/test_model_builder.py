"""The model of a recipe: arguments from the data, initial weights from the seed."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from phalanx.data import DataInfo
from phalanx.errors import RecipeError
from phalanx.recipe.imports import fill_arguments
from phalanx.recipe.schema import ModelConfig
from phalanx.train.model_builder import build_model, has_batch_norm, model_facts
from phalanx.train.ops.random_draws import derive_seed

TEXT = DataInfo("tokens", 256, None, 64, None)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("builder", "given", "expected"),
    [
        (lambda vocab_size, seq_len, layers=2: 0, {"layers": 3}, {"layers": 3, "vocab_size": 256, "seq_len": 64}),
        (lambda vocab_size, seq_len: 0, {"vocab_size": 1000}, {"vocab_size": 1000, "seq_len": 64}),
        (lambda vocab_size=5, num_classes=7: 0, {}, {"vocab_size": 256}),  # a default gives way to data, not to None
        (lambda **options: 0, {"depth": 3}, {"depth": 3}),
        (lambda *layers, **options: 0, {}, {}),
    ],
    ids=["what the data know", "what is given wins", "defaults", "any argument", "starred"],
)
def test_arguments_of_a_builder_are_filled_in(builder: Any, given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert fill_arguments(builder, given, model_facts(TEXT)) == expected


@pytest.mark.parametrize(
    ("builder", "given", "message"),
    [
        (
            lambda vocab_size, layers=2: 0,
            {"layer": 3},
            "args.layer: the builder takes no such .*; it takes vocab_size, l",
        ),
        (
            lambda num_classes, *, depth: 0,
            {"depth": 3},
            "args.num_classes: the builder needs it, and it does not follow",
        ),
    ],
)
def test_an_argument_that_does_not_fit_the_builder_is_named(builder: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=f"model.{message}"):
        fill_arguments(builder, given, model_facts(TEXT))


def build(source: str, folder: Path, seed: int = 0, **args: Any) -> nn.Module:
    """Build `make` of a module that stands in a file of its own."""
    name = f"own_model_{folder.name.replace('-', '_')}"
    (folder / f"{name}.py").write_text(f"import torch\nfrom torch import nn\n{source}\n")
    return build_model(ModelConfig(build=f"{name}:make", args=args), TEXT, folder, seed, CPU)


def test_initial_weights_depend_on_the_seed_only(tmp_path: Path) -> None:
    source = "def make(vocab_size): return nn.Linear(vocab_size, 2)"
    first = build(source, tmp_path).state_dict()
    torch.rand(17)
    again, other = build(source, tmp_path).state_dict(), build(source, tmp_path, seed=1).state_dict()
    assert first["weight"].equal(again["weight"])
    assert not first["weight"].equal(other["weight"])


@pytest.mark.parametrize("drawn", ["random.random()", "np.random.rand()", "float(np.random.permutation(1000)[0])"])
def test_weights_drawn_by_python_and_numpy_depend_on_the_seed_only(drawn: str, tmp_path: Path) -> None:
    source = f"import random\nimport numpy as np\ndef make(): return nn.ParameterList([torch.tensor({drawn})])"
    first, again, other = (next(build(source, tmp_path, seed=seed).parameters()) for seed in (0, 0, 1))
    assert first.equal(again)
    assert not first.equal(other)


def test_building_a_model_leaves_random_numbers_of_python_and_numpy_where_they_were(tmp_path: Path) -> None:
    random.seed(3)
    np.random.seed(3)
    expected = random.random(), np.random.rand()
    random.seed(3)
    np.random.seed(3)
    build("import random\ndef make(): return nn.Linear(1 + int(random.random()), 1)", tmp_path)
    assert (random.random(), np.random.rand()) == expected


SIZES = "import pydantic\nclass Sizes(pydantic.BaseModel):\n    width: int\n"


@pytest.mark.parametrize(
    ("source", "args", "message"),
    [
        (
            "def make(heads): raise ValueError('width must be a multiple')",
            {"heads": 3},
            "args: .* refuses them: width mu",
        ),
        (
            f"{SIZES}def make(width): Sizes(width=width)",
            {"width": "w"},
            "args: .* refuses them: width: found 'w': Input",
        ),
        ("def make(): return []", {}, "build: .*:make returned list, expected an nn.Module"),
    ],
)
def test_a_builder_that_fails_is_an_error_of_the_recipe_in_one_line(
    tmp_path: Path, source: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=f"model.{message}") as caught:
        build(source, tmp_path, **args)
    assert "\n" not in str(caught.value)


def test_seeds_stay_the_same_from_version_to_version() -> None:
    assert derive_seed(0, 1, 2) == 7448151232252714026
    assert derive_seed(0, "init") == 2843328265801480812


def test_seeds_of_different_places_differ() -> None:
    seeds = {derive_seed(seed, step, leaf) for seed in range(3) for step in range(30) for leaf in range(30)}
    assert len(seeds) == 3 * 30 * 30
    assert derive_seed(1, 23) != derive_seed(12, 3)


@pytest.mark.parametrize(
    ("module", "expected"),
    [(nn.BatchNorm2d(3), True), (nn.SyncBatchNorm(3), True), (nn.GroupNorm(1, 3), False), (nn.LayerNorm(3), False)],
)
def test_batch_norm_is_found_wherever_it_is(module: nn.Module, expected: bool) -> None:
    assert has_batch_norm(nn.Sequential(nn.ReLU(), nn.Sequential(module))) is expected


def test_embedding_noise_is_uniform_within_its_limit_and_in_training_only() -> None:
    spec = ModelConfig(args={"layers": 1, "hidden_size": 16, "num_heads": 2}, embedding_noise=5)
    model, tokens = build_model(spec, TEXT, None, 0, CPU), torch.arange(64).view(1, 64)
    embedding = model.get_submodule("embedding")
    torch.manual_seed(0)
    noise = (embedding(tokens) - nn.functional.embedding(tokens, embedding.weight)).detach()
    limit = 5 / (64 * 16) ** 0.5
    assert noise.abs().max() <= limit
    assert noise.std().item() == pytest.approx(limit / 3**0.5, rel=0.1)
    assert torch.equal(embedding.eval()(tokens), nn.functional.embedding(tokens, embedding.weight))


def test_embedding_noise_needs_an_embedding(tmp_path: Path) -> None:
    images = DataInfo("images", None, 10, None, (32, 32, 3))
    with pytest.raises(RecipeError, match=r"model.embedding_noise: is for models of text"):
        build_model(ModelConfig(build="phalanx.models:nin", embedding_noise=5), images, None, 0, CPU)
