"""A batch that grows with the workers, and a learning rate that follows it."""

from pathlib import Path

import pytest

from phalanx.errors import RecipeError
from phalanx.recipe import Recipe, check_recipe, load_recipe, scale_batch_with_workers
from phalanx.recipe.work_division import describe_batch_scaling, describe_kept_batch

PER_WORKER = ("batch.global_size=64", "batch.scale_with_workers=true")


def recipe(*overrides: str) -> Recipe:
    return load_recipe(None, overrides).recipe


@pytest.mark.parametrize(
    ("overrides", "global_size", "base_batch_size"),
    [
        (PER_WORKER, 256, None),
        (("batch.global_size=64",), 64, None),
        ((*PER_WORKER, "optimizer.lr_scaling.rule=sqrt"), 256, 64),
        ((*PER_WORKER, "optimizer.lr_scaling.base_batch_size=32"), 256, 32),
    ],
)
def test_a_batch_for_each_worker_is_that_times_the_workers_once(
    overrides: tuple[str, ...], global_size: int, base_batch_size: int | None
) -> None:
    found = scale_batch_with_workers(recipe(*overrides), 4)
    assert (found.batch.global_size, found.batch.scale_with_workers) == (global_size, False)
    scaling = found.optimizer.lr_scaling
    assert (None if scaling is None else scaling.base_batch_size) == base_batch_size
    assert scale_batch_with_workers(found, 8) == found


def test_scaling_without_a_batch_to_scale_from_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("optimizer:\n  lr: 0.01\n  lr_scaling: {rule: linear}\n")
    loaded = load_recipe(tmp_path / "recipe.yaml")
    with pytest.raises(
        RecipeError,
        match=r"recipe\.yaml:3: optimizer.lr_scaling: base_batch_size is missing: .*batch.scale_with_workers: true",
    ):
        check_recipe(loaded.recipe, tmp_path, 1, loaded.location_of)


def test_micro_batches_must_divide_the_batch_that_has_grown(tmp_path: Path) -> None:
    check_recipe(recipe("batch.global_size=6", "batch.scale_with_workers=true", "batch.micro_size=3"), tmp_path, 4)
    with pytest.raises(RecipeError, match=r"does not divide batch.global_size = 24"):
        check_recipe(recipe("batch.global_size=6", "batch.scale_with_workers=true", "batch.micro_size=4"), tmp_path, 4)


def test_a_batch_for_each_worker_can_always_be_divided_among_them(tmp_path: Path) -> None:
    check_recipe(recipe("batch.global_size=1", "batch.scale_with_workers=true"), tmp_path, 7)


def test_what_grew_is_told_with_its_numbers() -> None:
    given = recipe(*PER_WORKER, "optimizer.lr=0.01", "optimizer.lr_scaling.warmup_steps=50", "steps=100")
    assert describe_batch_scaling(given, scale_batch_with_workers(given, 4), 0.04) == [
        "batch.global_size 64 for each of 4 workers: 256",
        "optimizer.lr_scaling: linear: learning rate 0.01 for 64 samples, 0.04 at step 50 for 256",
    ]


def test_a_warm_up_that_is_longer_than_the_run_is_told() -> None:
    given = recipe(*PER_WORKER, "optimizer.lr_scaling.warmup_steps=500", "steps=100")
    assert (
        "ends after 100 of its 500 steps"
        in describe_batch_scaling(given, scale_batch_with_workers(given, 4), 0.004)[-1]
    )


def test_nothing_is_told_where_nothing_grows() -> None:
    assert describe_batch_scaling(recipe(), recipe(), recipe().optimizer.lr) == []
    alone = recipe(*PER_WORKER, "optimizer.lr_scaling.rule=linear")
    assert describe_batch_scaling(alone, scale_batch_with_workers(alone, 1), alone.optimizer.lr) == []


def test_a_run_that_goes_on_with_other_workers_is_told_to_keep_its_batch() -> None:
    given = recipe(*PER_WORKER)
    (told,) = describe_kept_batch(given, scale_batch_with_workers(given, 4), 8)
    assert told.startswith("batch.global_size stays 256, as the run began on 4 workers")
    assert describe_kept_batch(given, scale_batch_with_workers(given, 4), 4) == []
    assert describe_kept_batch(recipe(), recipe(), 8) == []
