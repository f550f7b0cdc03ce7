"""What a recipe may ask of each kind of device."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import RecipeError
from phalanx.recipe import Recipe
from phalanx.recipe.devices import DEVICE_KINDS, check_device, device_kind_of

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "devices.md"


@pytest.mark.parametrize(
    ("device", "name", "rocm", "values", "told"),
    [
        ("cuda", "MI300X", True, {"precision": "fp8"}, r"^precision: fp8 needs .*MI300X \(AMD's formats .*e4m3fnuz"),
        (
            "cpu",
            "EPYC",
            False,
            {"compile": "cuda-graphs"},
            "^compile: cuda-graphs need a GPU, and EPYC is none; true or",
        ),
    ],
)
def test_what_a_kind_of_device_cannot_do_is_refused_in_one_sentence(
    device: str, name: str, rocm: bool, values: dict[str, Any], told: str
) -> None:
    with pytest.raises(RecipeError, match=told):
        # ROCm says that a MI300X has the capability 9.4
        check_device(Recipe.model_validate(values), device, name, (9, 4) if rocm else None, rocm=rocm)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_recipe_that_leaves_all_to_us_goes_with_every_device(device: str) -> None:
    check_device(Recipe(), device, "Device X", None)


def test_amds_gpus_and_tensors_that_are_nowhere_have_rows_too() -> None:
    assert device_kind_of("cuda", rocm=True) is DEVICE_KINDS["rocm"]
    assert device_kind_of("meta") is DEVICE_KINDS["cpu"]


@pytest.mark.parametrize("name", DEVICE_KINDS)
def test_the_page_about_devices_has_the_table(name: str) -> None:
    kind = DEVICE_KINDS[name]
    assert f"| `{name}` | {', '.join(kind.precisions)} | {kind.dist_backend} |" in PAGE.read_text()
