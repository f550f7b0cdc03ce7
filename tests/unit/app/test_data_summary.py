"""What is said of the samples of a run before it starts."""

from pathlib import Path

import pytest

from phalanx.app.prepare_run import describe_data, describe_short_sources
from phalanx.recipe import Recipe
from small_data import dataset, numbered, opened


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [dataset(tmp_path / str(size), [numbered(size)], vocab=2**32, documents=size // 20) for size in (4000, 60)]


def recipe_of(folders: list[Path], **data: object) -> Recipe:
    sources = [{"prepared": str(folder)} for folder in folders]
    return Recipe.model_validate({"data": {"source": sources, **data}, "batch": {"global_size": 32}})


@pytest.mark.parametrize(
    ("packing", "expected"),
    [
        (
            None,
            "500 samples an epoch, epochs in 300 steps: 9.72 of source 0, 800 of source 1; "
            "validation on 6 samples (5 + 1 by source), cut from documents",
        ),
        (
            "whole",
            "200 samples an epoch, epochs in 300 steps: 24.2 of source 0, 2400 of source 1, 17% of their positions "
            "padding; validation on 3 samples (2 + 1 by source)",
        ),
    ],
)
def test_samples_padding_and_validation_are_counted(folders: list[Path], packing: str | None, expected: str) -> None:
    data = opened(*folders, sequence=8 if packing is None else 24, share=0.01, packing=packing)
    assert describe_data(data, recipe_of(folders, packing=packing)).startswith(expected)


def test_a_source_that_is_smaller_than_its_share_of_a_step_is_named(folders: list[Path]) -> None:
    notes = describe_short_sources(opened(*folders, share=0.01), recipe_of(folders))
    assert notes == [
        "data.source.1: has 6 training samples, and a step takes about 16 of it: they repeat within each step"
    ]


def test_documents_that_are_longer_than_a_sample_are_counted(folders: list[Path]) -> None:
    data = opened(*folders, sequence=10, packing="whole")
    assert ", 203 documents cut; validation" in describe_data(data, recipe_of(folders, packing="whole"))
