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


def test_what_the_data_know_is_filled_in_where_the_builder_takes_it() -> None:
    def builder(vocab_size: int, seq_len: int, layers: int = 2) -> None: ...

    assert fill_arguments(builder, {"layers": 3}, model_facts(TEXT)) == {"layers": 3, "vocab_size": 256, "seq_len": 64}


def test_what_is_given_wins_over_the_data() -> None:
    def builder(vocab_size: int, seq_len: int) -> None: ...

    assert fill_arguments(builder, {"vocab_size": 1000}, model_facts(TEXT)) == {"vocab_size": 1000, "seq_len": 64}


def test_a_default_of_the_builder_gives_way_to_the_data_but_not_to_nothing() -> None:
    def builder(vocab_size: int = 5, num_classes: int = 7) -> None: ...

    assert fill_arguments(builder, {}, model_facts(TEXT)) == {"vocab_size": 256}


def test_a_builder_that_takes_anything_is_given_what_was_written() -> None:
    def builder(**options: Any) -> None: ...

    assert fill_arguments(builder, {"depth": 3}, model_facts(TEXT)) == {"depth": 3}


def test_an_argument_that_the_builder_does_not_take_is_named() -> None:
    def builder(vocab_size: int, layers: int = 2) -> None: ...

    with pytest.raises(
        RecipeError,
        match=r"model.args.layer: the builder takes no such argument; it takes "
        r"vocab_size, lay",
    ):
        fill_arguments(builder, {"layer": 3}, model_facts(TEXT))


def test_an_argument_that_nobody_tells_is_named() -> None:
    def builder(num_classes: int, *, depth: int) -> None: ...

    with pytest.raises(
        RecipeError, match=r"model.args.num_classes: the builder needs it, and it does not follow from the data"
    ):
        fill_arguments(builder, {"depth": 3}, model_facts(TEXT))


def test_starred_parameters_of_a_builder_are_not_missing() -> None:
    def builder(*layers: int, **options: int) -> None: ...

    assert fill_arguments(builder, {}, model_facts(TEXT)) == {}


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


def test_arguments_that_the_builder_refuses_are_an_error_of_the_recipe(tmp_path: Path) -> None:
    source = "def make(vocab_size, heads):\n    raise ValueError('width must be a multiple of heads')"
    with pytest.raises(RecipeError, match=r"model.args: own_model_.*:make refuses them: width must be a multiple"):
        build(source, tmp_path, heads=3)


def test_what_pydantic_refuses_in_a_builder_is_one_line_with_key_and_value(tmp_path: Path) -> None:
    source = "import pydantic\nclass Sizes(pydantic.BaseModel):\n    width: int\ndef make(width): Sizes(width=width)"
    with pytest.raises(
        RecipeError, match=r":make refuses them: width: found 'wide': Input should be a valid integer"
    ) as e:
        build(source, tmp_path, width="wide")
    assert "\n" not in str(e.value)


def test_a_builder_must_return_a_module(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"model.build: .*:make returned list, expected an nn.Module"):
        build("def make(): return []", tmp_path)


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
