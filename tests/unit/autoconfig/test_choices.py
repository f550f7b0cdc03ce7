"""Every `auto` of a recipe becomes a value, by rules over numbers."""

from typing import Any

import pytest

from phalanx.autoconfig.choices import (
    CORES_REASON,
    AutoChoice,
    build_plan_json,
    choose_bucket_mib,
    choose_compile,
    choose_determinism,
    choose_num_threads,
    choose_precision,
    choose_warmup_steps,
    choose_without_trials,
    divide_parallelism,
    precisions_to_time,
    resolve_recipe,
    resume_parallelism,
    resume_recipe,
)
from phalanx.errors import RecipeError
from phalanx.recipe import Recipe
from phalanx.recipe.devices import has_bf16
from phalanx.recipe.grad_sync_defaults import DETERMINISTIC_SLOWDOWN_KEY, NONDETERMINISTIC_OP_KEY, given_start
from phalanx.recipe.schema import Parallelism


def recipe(**values: Any) -> Recipe:
    return Recipe.model_validate({"device": "cpu", **values})


def replicas(batch: int, **values: Any) -> Recipe:
    return recipe(batch={"global_size": batch}, determinism="elastic", **values)


CHOSEN = [
    AutoChoice("num_threads", 2, "2 cores"),
    AutoChoice("memory.activation_checkpointing", "selective", "fits"),
    AutoChoice("memory.chunked_loss", True, "large"),
    AutoChoice("batch.micro_size", 8, "fits"),
    AutoChoice("precision", "bf16", "faster"),
]


@pytest.mark.parametrize(("cores", "world", "expected"), [(8, 1, 8), (8, 2, 4), (8, 3, 2), (2, 4, 1)])
def test_cores_are_divided_among_workers(cores: int, world: int, expected: int) -> None:
    assert choose_num_threads(recipe(), cores, world).value == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "2,1"}, 2),
        ({"MKL_NUM_THREADS": "5"}, 5),
        ({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "5"}, 1),
        ({"OMP_NUM_THREADS": "many"}, 8),
    ],
)
def test_variables_of_openmp_and_mkl_choose_the_threads(environ: dict[str, str], expected: int) -> None:
    choice = choose_num_threads(recipe(), 8, 1, environ)
    assert choice.value == expected
    assert (CORES_REASON in choice.reason) is (expected == 8)


def test_a_recipe_with_threads_does_not_look_at_variables() -> None:
    assert choose_num_threads(recipe(num_threads=4), 8, 1, {"OMP_NUM_THREADS": "1"}).value == 4


def test_under_replicas_a_worker_has_one_thread_on_any_world() -> None:
    assert {choose_num_threads(replicas(16), cores, world).value for cores in (1, 8) for world in (1, 2, 4)} == {1}


@pytest.mark.parametrize(
    ("parameters", "expected"), [(100_000, 1.0), (3_300_000, 1.0), (25_000_000, 7.9), (1_000_000_000, 25.0)]
)
def test_between_nodes_a_bucket_is_a_part_of_the_gradients(parameters: int, expected: float) -> None:
    (choice,) = choose_bucket_mib(recipe(), parameters, world_size=4, num_nodes=2)
    assert (choice.key, choice.value) == ("grad_sync.bucket_mib", expected)
    assert "2 nodes" in choice.reason
    assert resolve_recipe(recipe(), [*CHOSEN, choice], 4).grad_sync.bucket_mib == expected


@pytest.mark.parametrize(("strategy", "least"), [("int8", 1.0), ("powersgd", 2.0)])
def test_thin_matrices_travel_in_larger_ones(strategy: str, least: float) -> None:
    lossy = recipe(determinism="off", grad_sync={"compression": strategy})
    (small, large) = (choose_bucket_mib(lossy, parameters, 4, num_nodes=2)[0] for parameters in (100_000, 25_000_000))
    assert (small.value, large.value) == (least, 7.9)


def test_a_replica_that_tensor_ranks_divide_has_less_of_them() -> None:
    (whole,) = choose_bucket_mib(recipe(parallelism={"replicate": 4}), 25_000_000, 4, num_nodes=2)
    (divided,) = choose_bucket_mib(recipe(parallelism={"replicate": 2, "tensor": 2}), 25_000_000, 4, num_nodes=2)
    assert divided.value == pytest.approx(whole.value / 2, abs=0.1)


def test_sharded_replicas_send_the_shards_of_their_gradients_beside_backward_on_cpus_only() -> None:
    (whole,) = choose_bucket_mib(recipe(parallelism={"replicate": 4}), 25_000_000, 4, num_nodes=2)
    sharded = recipe(parallelism={"replicate": 2, "shard": 2}, determinism="elastic")
    (half,) = choose_bucket_mib(sharded, 25_000_000, 4, num_nodes=2)
    assert half.value == pytest.approx(whole.value / 2, abs=0.1)
    assert choose_bucket_mib(sharded, 25_000_000, 4, 2, "cuda") == []


@pytest.mark.parametrize(
    ("values", "nodes"),
    [
        ({}, 1),
        ({"grad_sync": {"bucket_mib": 3}}, 2),
        ({"determinism": "off", "local_sgd": {"method": "diloco"}}, 2),
        ({"parallelism": {"shard": 4}}, 2),
        ({"parallelism": {"replicate": 2, "shard": 2}}, 2),
        ({"parallelism": {"replicate": 2, "pipeline": 2}}, 2),
        ({"parallelism": {"tensor": 4}}, 2),
    ],
    ids=["one node", "given", "rounds", "shards", "replicas that FSDP sums", "pipeline", "one replica"],
)
def test_where_nothing_travels_beside_backward_between_nodes_nothing_is_said_of_buckets(
    values: dict[str, Any], nodes: int
) -> None:
    assert choose_bucket_mib(recipe(**values), 1_000_000, 4, nodes) == []


@pytest.mark.parametrize(("bf16", "expected"), [(0.50, "bf16"), (0.8, "bf16"), (0.9, "fp32"), (2.0, "fp32")])
def test_bf16_is_taken_when_it_is_measured_to_be_clearly_faster(bf16: float, expected: str) -> None:
    choice = choose_precision(recipe(), {"fp32": 1.0, "bf16": bf16})
    assert choice.value == expected
    assert f"{1 / bf16:.2f} x" in choice.reason


@pytest.mark.parametrize(
    ("seconds", "device", "bf16", "expected", "reason"),
    [
        ({"bf16": 1.0}, "cpu", True, "bf16", "the other ran out of memory"),
        ({"fp32": 1.0}, "cpu", True, "fp32", "the other ran out of memory"),
        ({}, "cpu", True, "fp32", "could not be timed"),
        ({}, "cuda", True, "bf16", "could not be timed"),
        ({"bf16": 1.0}, "cuda", True, "bf16", "the rule on cuda"),
        ({"fp32": 1.0}, "cpu", False, "fp32", "no instructions for bf16"),
        ({"fp32": 1.0}, "cuda", False, "fp32", "none for bf16"),
    ],
)
def test_where_only_one_precision_was_timed_or_none_a_rule_decides(
    seconds: dict[str, float], device: str, bf16: bool, expected: str, reason: str
) -> None:
    choice = choose_precision(recipe(), seconds, device, bf16)
    assert choice.value == expected
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("device", "bf16", "expected"),
    [("cuda", True, ["bf16"]), ("cpu", True, ["fp32", "bf16"]), ("cuda", False, ["fp32"]), ("cpu", False, ["fp32"])],
)
def test_precisions_are_timed_where_the_device_has_both(device: str, bf16: bool, expected: list[str]) -> None:
    assert precisions_to_time(recipe(), device, bf16) == expected


def test_a_precision_that_is_given_is_taken_on_any_device() -> None:
    assert [has_bf16(each) for each in ((7, 5), (8, 0), None)] == [False, True, True]
    assert choose_precision(recipe(precision="bf16"), {}, "cuda", bf16=False).value == "bf16"
    assert resolve_recipe(recipe(), choose_without_trials(recipe(), 4, 2, "cuda", bf16=False), 2).precision == "fp32"


def test_a_resolved_recipe_has_no_auto_left() -> None:
    resolved = resolve_recipe(recipe(device="cpu"), CHOSEN, 2)
    assert "auto" not in resolved.model_dump_json()
    assert (resolved.num_threads, resolved.batch.micro_size, resolved.precision) == (2, 8, "bf16")
    assert (resolved.memory.activation_checkpointing, resolved.memory.chunked_loss) == ("selective", True)
    assert not isinstance(resolved.parallelism, str)
    assert (resolved.parallelism.replicate, resolved.parallelism.world) == (2, 2)


def test_going_on_takes_what_is_free_to_change() -> None:
    resolved = resolve_recipe(recipe(data={"source": {"prepared": "/old"}}), CHOSEN, 2)
    new = recipe(
        name="again",
        steps=900,
        checkpoint={"every": 7, "keep": 1},
        fault_tolerance={"max_restarts": 9},
        callbacks=["my:Callback"],
        evaluation={"every": 11, "max_samples": 13, "source": {"prepared": "/held"}},
        data={"source": {"prepared": "/new"}},
        device="cuda",
    )
    going = resume_recipe(resolved, new, 3)
    for key in ("name", "steps", "checkpoint", "fault_tolerance", "callbacks", "device", "evaluation"):
        assert getattr(going, key) == getattr(new, key)
    assert going.data.source == new.data.source
    assert going.parallelism == Parallelism(replicate=3)
    layout = recipe(batch={"global_size": 24}, parallelism={"tensor": 2})
    assert resume_recipe(laid_out(shard=2), layout, 2).parallelism == Parallelism(tensor=2)
    assert (going.num_threads, going.batch.micro_size, going.precision) == (2, 8, "bf16")


ROUNDS: dict[str, Any] = {"determinism": "off", "local_sgd": {"method": "diloco"}}


def test_workers_part_after_a_third_of_the_steps_and_it_is_told() -> None:
    (choice,) = choose_warmup_steps(recipe(steps=900, **ROUNDS))
    assert (choice.key, choice.value, choice.reason) == ("local_sgd.warmup_steps", 300, "a third of 900 steps together")
    local_sgd = resolve_recipe(recipe(steps=900, **ROUNDS), CHOSEN, 2).local_sgd
    assert local_sgd is not None
    assert local_sgd.warmup_steps == 300


@pytest.mark.parametrize(
    ("sync", "expected"),
    [
        ({}, 100),
        ({**ROUNDS, "local_sgd": {"warmup_steps": 5}}, 5),
        ({"determinism": "off", "grad_sync": {"compression": "int8"}}, 100),
        ({"determinism": "off", "grad_sync": {"compression": "powersgd", "warmup_steps": 7}}, 7),
    ],
)
def test_nothing_is_chosen_where_the_first_steps_are_given_or_like_all_others(sync: Any, expected: int) -> None:
    assert choose_warmup_steps(recipe(**sync)) == []
    assert given_start(resolve_recipe(recipe(**sync), CHOSEN, 2)) == expected


@pytest.mark.parametrize(("start", "expected"), [("auto", 100), (5000, 5000)])
def test_a_run_that_ends_before_workers_part_is_told(start: Any, expected: int) -> None:
    (choice,) = choose_warmup_steps(recipe(steps=60, **ROUNDS | {"local_sgd": {"warmup_steps": start}}))
    assert (choice.value, choice.reason) == (expected, "the run ends before that, after 60 steps")


def test_a_run_that_goes_on_for_longer_parts_where_it_would_have() -> None:
    resolved = resolve_recipe(recipe(steps=900, **ROUNDS), CHOSEN, 2)
    going = resume_recipe(resolved, recipe(steps=3000, **ROUNDS), 2)
    assert (going.steps, given_start(going)) == (3000, 300)


@pytest.mark.parametrize(
    ("given", "exact", "world", "expected"),
    [
        ("auto", "fixed-world", 2, 6),
        ("auto", "fixed-world", 3, 8),
        ("auto", "fixed-world", 4, 6),
        ("auto", "fixed-world", 12, 2),
        ("auto", "fixed-world", 5, 8),  # cannot be: `check` says what can
        ("auto", "elastic", 4, 8),
        (8, "fixed-world", 4, 8),
    ],
)
def test_a_micro_batch_that_nobody_gave_shrinks_when_more_workers_have_to_share(
    given: Any, exact: str, world: int, expected: int
) -> None:
    values = {"batch": {"global_size": 24, "micro_size": given}, "determinism": exact}
    assert (
        resume_recipe(resolve_recipe(recipe(**values), CHOSEN, 1), recipe(**values), world).batch.micro_size == expected
    )


@pytest.mark.parametrize(
    ("layout", "world", "seconds", "step_s"),
    [
        ("auto", 2, {"fp32": 3.0, "bf16": 1.0, "update": 0.5}, 4 * 1.0 + 0.5),
        ({"shard": 2, "tensor": 2}, 4, {"fp32": 3.0, "bf16": 1.0, "update": 0.5}, 4 * 1.0 + 0.5),  # two groups
        ("auto", 2, {}, None),
    ],
)
def test_the_plan_predicts_a_step_by_its_micro_batches_and_update(
    layout: Any, world: int, seconds: dict[str, float], step_s: float | None
) -> None:
    resolved = resolve_recipe(recipe(batch={"global_size": 64}, parallelism=layout), CHOSEN, world)
    plan = build_plan_json({"parameters": 5, "flops_per_sample": 7.0}, CHOSEN, seconds, resolved)
    assert plan["predicted_step_s"] == step_s
    assert (plan["parameters"], plan["flops_per_sample"]) == (5, 7.0)
    assert plan["auto_choices"][3] == {"key": "batch.micro_size", "value": 8, "reason": "fits"}


@pytest.mark.parametrize(("mode", "selective"), [("chunked", 6), ("whole", 7)])
def test_the_plan_tells_what_a_sample_takes_as_it_was_chosen(mode: str, selective: int) -> None:
    """A model without a loss in chunks has the peaks of whole logits alone."""
    peaks = {"whole": {"none": 9, "selective": 7, "full": 5}}
    if mode == "chunked":
        peaks[mode] = {"none": 8, "selective": 6, "full": 4}
    plan = build_plan_json({"peaks": peaks}, CHOSEN, {"bf16": 1.0, "update": 0.5}, resolve_recipe(recipe(), CHOSEN, 1))
    assert (plan["peak_bytes_per_sample"], plan["activation_bytes_per_sample"]) == (peaks[mode], selective)
    assert "peaks" not in plan


def test_a_loop_of_the_users_own_has_all_of_its_autos_chosen_by_rules() -> None:
    resolved = resolve_recipe(recipe(device="cpu"), choose_without_trials(recipe(), 4, 2, "cpu"), 2)
    assert "auto" not in resolved.model_dump_json()
    assert (resolved.memory.activation_checkpointing, resolved.memory.chunked_loss, resolved.batch.micro_size) == (
        "none",
        False,
        8,
    )


def laid_out(**layout: int) -> Recipe:
    """A recipe that was resolved under this layout."""
    world = Parallelism(**layout).world
    return resolve_recipe(recipe(batch={"global_size": 24}, parallelism=layout), CHOSEN, world)


@pytest.mark.parametrize(("world", "replicate"), [(4, 1), (8, 2), (12, 3)])
def test_a_run_goes_on_with_as_many_of_its_replicas_as_the_workers_make(world: int, replicate: int) -> None:
    going = resume_recipe(laid_out(replicate=2, shard=2, tensor=2), recipe(batch={"global_size": 24}), world)
    assert going.parallelism == Parallelism(replicate=replicate, shard=2, tensor=2)


def test_workers_that_make_no_whole_number_of_replicas_are_told() -> None:
    with pytest.raises(
        RecipeError,
        match=r"^parallelism: tensor x pipeline x context takes 4 workers, and 6 workers are not a multiple",
    ):
        resume_parallelism(laid_out(pipeline=2, tensor=2), recipe(), 6)


@pytest.mark.parametrize(
    ("before", "world", "after"),
    [
        ({"replicate": 4}, 3, {"replicate": 3}),
        ({"shard": 4}, 3, {"shard": 3}),
        ({"replicate": 2, "shard": 2}, 3, {"shard": 3}),
        ({"replicate": 2, "shard": 4}, 4, {"shard": 4}),
        ({"replicate": 2, "shard": 2}, 6, {"replicate": 3, "shard": 2}),
        ({"shard": 3}, 4, {"shard": 4}),
        ({"shard": 4, "tensor": 2}, 4, {"shard": 2, "tensor": 2}),
    ],
)
def test_a_rank_holds_no_more_parameters_on_fewer_workers_if_that_is_possible(
    before: dict[str, int], world: int, after: dict[str, int]
) -> None:
    assert divide_parallelism(Parallelism(**before), world) == Parallelism(**after)


def test_a_micro_batch_shrinks_for_the_groups_that_share_the_batch_not_for_all_workers() -> None:
    resolved = laid_out(tensor=2)
    assert resume_recipe(resolved, recipe(batch={"global_size": 24}), 2).batch.micro_size == 8
    assert resume_recipe(resolved, recipe(batch={"global_size": 24}), 8).batch.micro_size == 6


@pytest.mark.parametrize(
    ("values", "device", "blocks", "compiler", "expected"),
    [
        ({}, "cuda", 12, True, True),
        ({}, "cuda", 0, True, False),
        ({"steps": 20}, "cuda", 12, True, False),
        ({}, "cpu", 12, True, False),
        ({}, "cuda", 12, False, False),
        ({"compile": True}, "cuda", 12, False, True),
        ({"compile": "cuda-graphs"}, "cpu", 0, True, "cuda-graphs"),
        ({"parallelism": {"pipeline_schedule": "zero-bubble"}}, "cuda", 12, True, True),
        ({"parallelism": {"pipeline": 2, "pipeline_schedule": "zero-bubble"}}, "cuda", 12, True, False),
    ],
)
def test_repeated_blocks_are_compiled_on_a_gpu_in_runs_that_earn_it_back(
    values: dict[str, Any], device: str, blocks: int, compiler: bool, expected: Any
) -> None:
    choice = choose_compile(recipe(**values), device, blocks, compiler)
    assert choice.value == expected
    assert resolve_recipe(recipe(**values), [*CHOSEN, choice], 1).compile == expected


@pytest.mark.parametrize(
    ("trial", "expected"),
    [
        ({DETERMINISTIC_SLOWDOWN_KEY: 0.01}, "fixed-world"),
        ({DETERMINISTIC_SLOWDOWN_KEY: 0.05}, "off"),
        ({}, "off"),
        ({NONDETERMINISTIC_OP_KEY: "x"}, "off"),
    ],
)
def test_bits_are_promised_on_a_gpu_where_deterministic_kernels_cost_little(
    trial: dict[str, Any], expected: str
) -> None:
    [choice] = choose_determinism(recipe(), trial, "cuda")
    resolved = resolve_recipe(recipe(), [*CHOSEN, choice], 2)
    assert resolved.determinism == expected
    assert resolved.grad_sync.method == "all-reduce"  # that bits cost too much is no reason to round what is sent


def test_bits_are_promised_on_a_cpu() -> None:
    assert choose_determinism(recipe(), {}, "cpu") == []
    assert resolve_recipe(recipe(), CHOSEN, 2).determinism == "fixed-world"


@pytest.mark.parametrize("exact", ["fixed-world", "elastic"])
def test_bits_that_an_operation_cannot_keep_are_refused_by_its_name(exact: str) -> None:
    with pytest.raises(RecipeError, match="adaptive_avg_pool2d_backward has no deterministic kernel"):
        choose_determinism(recipe(determinism=exact), {NONDETERMINISTIC_OP_KEY: "adaptive_avg_pool2d_backward"}, "cuda")
