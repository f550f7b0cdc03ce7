"""Every `auto` of a recipe becomes a value, by rules over numbers."""

from typing import Any

import pytest

from phalanx.errors import RecipeError
from phalanx.plan import Choice, check_memory, choose_micro, choose_precision, choose_threads, go_on, plan_of, resolve
from phalanx.recipe import Recipe

GB = 10**9
PLENTY = 10**15


def recipe(**values: Any) -> Recipe:
    return Recipe.model_validate(values)


def micro(of: Recipe, *, saved: int = 1000, memory: int = PLENTY, world: int = 1, parameters: int = 1000) -> int:
    value: int = choose_micro(of, parameters, saved, memory, world).value
    return value


def replicas(batch: int, **values: Any) -> Recipe:
    return recipe(batch={"global": batch}, exchange={"exact": "replicas"}, **values)


CHOSEN = [Choice("threads", 2, "2 cores"), Choice("batch.micro", 8, "fits"), Choice("precision", "bf16", "faster")]


@pytest.mark.parametrize(("world", "expected"), [(1, 24), (2, 12), (3, 8), (8, 3)])
def test_a_worker_takes_its_whole_share_at_once_where_it_fits(world: int, expected: int) -> None:
    assert micro(recipe(batch={"global": 24}), world=world) == expected


def test_activations_may_take_half_of_the_memory_beside_the_training_state() -> None:
    of = recipe(batch={"global": 16})
    assert micro(of, saved=GB, memory=2 * (16 * 1000 + 4 * GB)) == 4
    assert micro(of, saved=GB, memory=2 * (16 * 1000 + 4 * GB) - 2) == 2


def test_a_micro_batch_that_fits_divides_the_share() -> None:
    assert micro(recipe(batch={"global": 18}), saved=GB, memory=2 * (16 * 1000 + 8 * GB)) == 6


def test_a_model_of_which_not_even_one_sample_fits_is_refused() -> None:
    with pytest.raises(
        RecipeError, match=r"not even one sample fits: it saves 1000 MB for backward, and 500 MB are left"
    ):
        micro(recipe(batch={"global": 16}), saved=GB, memory=GB, parameters=0)


def test_a_model_that_does_not_fit_itself_leaves_nothing() -> None:
    with pytest.raises(RecipeError, match="0 MB are left beside parameters and optimizer state"):
        micro(recipe(), saved=GB, memory=GB, parameters=10**9)


def test_a_model_that_saves_nothing_fits_whatever_the_memory() -> None:
    assert micro(recipe(batch={"global": 16}), saved=0, memory=0) == 16


@pytest.mark.parametrize("batch", [6, 8, 12, 16, 24, 48, 60])
def test_under_replicas_the_choice_is_the_same_on_any_common_world(batch: int) -> None:
    worlds = [world for world in (1, 2, 3, 4, 6, 8) if batch % world == 0]
    assert len({micro(replicas(batch), world=world) for world in worlds}) == 1


@pytest.mark.parametrize(("batch", "world"), [(24, 6), (16, 8), (20, 5), (14, 7), (7, 7)])
def test_under_replicas_the_workers_share_the_micro_batches(batch: int, world: int) -> None:
    assert batch // micro(replicas(batch), world=world) % world == 0


def test_under_replicas_memory_may_make_micro_batches_smaller() -> None:
    assert micro(replicas(24), memory=PLENTY) == 1
    assert micro(replicas(64), memory=PLENTY) == 8
    assert micro(replicas(64), saved=GB, memory=2 * (16 * 1000 + 5 * GB)) == 4


def test_a_given_micro_batch_is_taken() -> None:
    choice = choose_micro(recipe(batch={"global": 16, "micro": 2}), 1000, GB, 0, 1)
    assert (choice.value, choice.why) == (2, "given")


def test_a_given_micro_batch_may_fill_all_of_the_memory() -> None:
    check_memory(8, 1000, GB, 8 * GB + 16 * 1000)


def test_a_micro_batch_beyond_all_of_the_memory_is_refused_with_one_that_fits() -> None:
    with pytest.raises(
        RecipeError, match=r"12 samples at once need at least 12.0 GB, and .* 11.0 GB; batch.micro=4 wo"
    ):
        check_memory(12, 1000, GB, 11 * GB)


@pytest.mark.parametrize("saved", [0, GB])
def test_a_model_too_large_for_any_micro_batch_is_told_so(saved: int) -> None:
    with pytest.raises(RecipeError, match="not even one would fit: use a smaller model"):
        check_memory(8, 10**9, saved, 11 * GB)


@pytest.mark.parametrize(("cores", "world", "expected"), [(8, 1, 8), (8, 2, 4), (8, 3, 2), (2, 4, 1)])
def test_cores_are_divided_among_workers(cores: int, world: int, expected: int) -> None:
    assert choose_threads(recipe(), cores, world).value == expected


def test_under_replicas_a_worker_has_one_thread_on_any_world() -> None:
    assert {choose_threads(replicas(16), cores, world).value for cores in (1, 8) for world in (1, 2, 4)} == {1}


def test_given_threads_are_taken() -> None:
    assert choose_threads(replicas(16, threads=3), 8, 2) == Choice("threads", 3, "given")


@pytest.mark.parametrize(("bf16", "expected"), [(0.50, "bf16"), (0.8, "bf16"), (0.9, "fp32"), (2.0, "fp32")])
def test_bf16_is_taken_when_it_is_measured_to_be_clearly_faster(bf16: float, expected: str) -> None:
    choice = choose_precision(recipe(), {"fp32": 1.0, "bf16": bf16})
    assert choice.value == expected
    assert f"{1 / bf16:.2f} x" in choice.why


def test_a_given_precision_needs_no_measurement() -> None:
    assert choose_precision(recipe(precision="fp16"), {}) == Choice("precision", "fp16", "given")


def test_a_resolved_recipe_has_no_auto_left() -> None:
    resolved = resolve(recipe(), CHOSEN, 2)
    assert "auto" not in resolved.model_dump_json()
    assert (resolved.threads, resolved.batch.micro, resolved.precision) == (2, 8, "bf16")
    assert not isinstance(resolved.layout, str)
    assert (resolved.layout.replicate, resolved.layout.world) == (2, 2)


def test_resolving_leaves_everything_else_as_given() -> None:
    given = recipe(name="mine", steps=77, optim={"name": "muon", "lr": 0.3}, exchange={"exact": "replicas"}, seed=5)
    resolved = resolve(given, CHOSEN, 1)
    assert (resolved.name, resolved.steps, resolved.optim, resolved.seed) == ("mine", 77, given.optim, 5)
    assert resolved.exchange.exact == "replicas"


@pytest.mark.parametrize(("given", "expected"), [("auto", False), (False, False), (True, True)])
def test_a_model_is_compiled_only_when_asked(given: Any, expected: bool) -> None:
    assert resolve(recipe(compile=given), CHOSEN, 1).compile is expected


def test_going_on_keeps_what_was_resolved() -> None:
    resolved = resolve(recipe(batch={"global": 32}), CHOSEN, 2)
    going = go_on(resolved, recipe(batch={"global": 32}), 2)
    assert going == resolved


def test_going_on_takes_what_is_free_to_change() -> None:
    resolved = resolve(recipe(), CHOSEN, 2)
    new = recipe(
        name="again",
        steps=900,
        checkpoint={"every": 7, "keep": 1},
        recovery={"attempts": 9},
        callbacks=["my:Callback"],
        evaluate={"every": 11, "samples": 13},
    )
    going = go_on(resolved, new, 3)
    assert (going.name, going.steps, going.checkpoint, going.recovery) == ("again", 900, new.checkpoint, new.recovery)
    assert (going.callbacks, going.evaluate.every, going.evaluate.samples) == (["my:Callback"], 11, 13)
    assert not isinstance(going.layout, str)
    assert going.layout.replicate == 3
    assert (going.threads, going.batch.micro, going.precision) == (2, 8, "bf16")


@pytest.mark.parametrize(
    ("given", "exact", "world", "expected"),
    [
        ("auto", "world", 2, 6),
        ("auto", "world", 3, 8),
        ("auto", "world", 4, 6),
        ("auto", "world", 12, 2),
        ("auto", "world", 5, 8),  # cannot be: `check` says what can
        ("auto", "replicas", 4, 8),
        (8, "world", 4, 8),
    ],
)
def test_a_micro_batch_that_nobody_gave_shrinks_when_more_workers_have_to_share(
    given: Any, exact: str, world: int, expected: int
) -> None:
    values = {"batch": {"global": 24, "micro": given}, "exchange": {"exact": exact}}
    assert go_on(resolve(recipe(**values), CHOSEN, 1), recipe(**values), world).batch.micro == expected


def test_going_on_takes_the_places_of_prepared_data_as_they_are_now() -> None:
    resolved = resolve(recipe(data={"source": {"prepared": "/old"}}), CHOSEN, 1)
    new = recipe(data={"source": {"prepared": "/new"}}, evaluate={"source": {"prepared": "/held"}})
    going = go_on(resolved, new, 1)
    assert (going.data.source, going.evaluate.source) == (new.data.source, new.evaluate.source)


def test_the_plan_predicts_a_step_by_its_micro_batches_and_update() -> None:
    resolved = resolve(recipe(batch={"global": 64}), CHOSEN, 2)
    profile = {"parameters": 5, "flops_per_sample": 7.0}
    plan = plan_of(profile, CHOSEN, {"fp32": 3.0, "bf16": 1.0, "update": 0.5}, resolved)
    assert plan["predicted_step_seconds"] == 4 * 1.0 + 0.5
    assert (plan["parameters"], plan["flops_per_sample"]) == (5, 7.0)
    assert plan["chosen"][1] == {"key": "batch.micro", "value": 8, "why": "fits"}
