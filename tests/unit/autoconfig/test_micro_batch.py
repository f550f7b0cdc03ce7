"""What a step needs of memory, and the recomputation, loss and micro-batch that follow, by rules over numbers."""

from typing import Any

import pytest

from phalanx.autoconfig.memory_choice import (
    MemoryProfile,
    WorkerMemory,
    activation_bytes,
    choose_memory,
    loss_modes_to_try,
    micro_batch_candidates,
    next_smaller_micro_size,
    state_bytes,
    state_bytes_per_parameter,
)
from phalanx.errors import RecipeError
from phalanx.recipe import Recipe

GB = 10**9
PLENTY = 10**15
STATE = 16 * 1000  # of the models here, under adamw


def recipe(**values: Any) -> Recipe:
    return Recipe.model_validate(values)


def replicas(batch: int, **values: Any) -> Recipe:
    return recipe(batch={"global_size": batch}, determinism="elastic", **values)


def needs(none: int = 1000, selective: int | None = None, full: int | None = None, logits: int = 0) -> MemoryProfile:
    """A small model whose samples take so much; recomputing saves nothing unless it is said."""
    ways = {"none": none, "selective": selective or none, "full": full or none}
    return MemoryProfile(1000, 0, {"whole": ways}, logits)


def chosen(
    of: Recipe, found: MemoryProfile | None = None, memory: int = PLENTY, world: int = 1, **more: Any
) -> dict[str, Any]:
    """The values chosen on a CPU, by the last part of their keys."""
    choices = choose_memory(of, found or needs(), WorkerMemory("cpu", memory, world), **more)
    return {choice.key.split(".")[1]: choice.value for choice in choices}


def reasons(of: Recipe, found: MemoryProfile, memory: int = PLENTY, world: int = 1, **more: Any) -> dict[str, str]:
    choices = choose_memory(of, found, WorkerMemory("cpu", memory, world), **more)
    return {choice.key.split(".")[1]: choice.reason for choice in choices}


@pytest.mark.parametrize(("world", "expected"), [(1, 24), (2, 12), (3, 8), (8, 3)])
def test_a_worker_takes_its_whole_share_at_once_where_it_fits(world: int, expected: int) -> None:
    assert chosen(recipe(batch={"global_size": 24}), world=world)["micro_size"] == expected


def test_a_step_may_take_half_of_a_cpus_memory() -> None:
    of = recipe(batch={"global_size": 16})
    assert chosen(of, needs(GB), 2 * (STATE + 4 * GB))["micro_size"] == 4
    assert chosen(of, needs(GB), 2 * (STATE + 4 * GB) - 2)["micro_size"] == 2
    assert chosen(recipe(batch={"global_size": 18}), needs(GB), 2 * (STATE + 8 * GB))["micro_size"] == 6


def test_a_step_may_take_more_of_a_gpus_memory() -> None:
    of = recipe(batch={"global_size": 16})
    choices = choose_memory(of, needs(GB), WorkerMemory("cuda", 10 * GB, 1))
    assert choices[2].value == 8
    assert "stay within 85% of the memory" in choices[2].reason


def model_of(parameters: int, **peaks: int) -> MemoryProfile:
    return MemoryProfile(parameters, 0, {"whole": peaks})


@pytest.mark.parametrize(
    ("values", "found", "memory", "told"),
    [
        (
            {"batch": {"global_size": 16}},
            model_of(0, none=GB, full=GB),
            GB,
            "not even one sample fits: it takes 1.00 GB in forward and backward, and 500 MB are left",
        ),
        ({}, model_of(10**9, none=GB), GB, "and 0 B are left after parameters and optimizer state"),
        (
            {"memory": {"activation_checkpointing": "none"}},
            needs(GB, full=1),
            GB,
            "use a smaller model or sequence, memory.activation_checkpointing=full, or give",
        ),
        (
            {"batch": {"global_size": 12, "micro_size": 12}},
            needs(GB),
            11 * GB,
            "12 samples at once need at least 12.0 GB, and .* 11.0 GB; batch.micro_size=4 wo",
        ),
        *(
            (
                {"batch": {"global_size": 16, "micro_size": 8}},
                model_of(10**9, none=peak),
                11 * GB,
                "not even one would fit: use a smaller model",
            )
            for peak in (0, GB)
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_what_would_help(
    values: dict[str, Any], found: MemoryProfile, memory: int, told: str
) -> None:
    with pytest.raises(RecipeError, match=told):
        chosen(recipe(**values), found, memory)


@pytest.mark.parametrize("batch", [6, 8, 12, 16, 24, 48, 60])
def test_under_replicas_the_choice_is_the_same_on_any_common_world(batch: int) -> None:
    worlds = [world for world in (1, 2, 3, 4, 6, 8) if batch % world == 0]
    assert len({chosen(replicas(batch), world=world)["micro_size"] for world in worlds}) == 1


@pytest.mark.parametrize(("batch", "world"), [(24, 6), (16, 8), (20, 5), (14, 7), (7, 7)])
def test_under_replicas_the_workers_share_the_micro_batches(batch: int, world: int) -> None:
    assert batch // chosen(replicas(batch), world=world)["micro_size"] % world == 0


@pytest.mark.parametrize("shard", [2, 16])
def test_under_replicas_that_are_sharded_the_choice_is_the_same_for_any_number_of_them(shard: int) -> None:
    layouts = [{"replicate": replicate, "shard": shard} for replicate in (1, 2, 4)]
    found = {chosen(replicas(64, parallelism=each), world=each["replicate"] * shard)["micro_size"] for each in layouts}
    assert len(found) == 1
    assert 64 // found.pop() % (4 * shard) == 0


def test_under_replicas_memory_may_make_micro_batches_smaller() -> None:
    assert chosen(replicas(24))["micro_size"] == 1
    assert chosen(replicas(64))["micro_size"] == 8
    assert chosen(replicas(64), needs(GB), 2 * (STATE + 5 * GB))["micro_size"] == 4


def test_a_given_micro_batch_may_fill_all_of_the_memory() -> None:
    of = recipe(batch={"global_size": 16, "micro_size": 8}, memory={"activation_checkpointing": "none"})
    assert chosen(of, needs(GB), 8 * GB + STATE)["micro_size"] == 8
    assert reasons(of, needs(GB), 8 * GB + STATE)["micro_size"] == "given"


@pytest.mark.parametrize(
    ("memory", "expected"), [(100, ("none", 4)), (40, ("none", 1)), (20, ("selective", 1)), (10, ("full", 2))]
)
def test_as_little_is_recomputed_as_lets_one_sample_fit(memory: int, expected: tuple[str, int]) -> None:
    found = chosen(recipe(batch={"global_size": 16}), needs(10 * GB, 6 * GB, 2 * GB), memory * GB)
    assert (found["activation_checkpointing"], found["micro_size"]) == expected


def test_a_way_that_the_model_does_not_go_with_is_not_taken() -> None:
    found = MemoryProfile(1000, 0, {"whole": {"none": 10 * GB, "selective": None, "full": 2 * GB}})
    assert chosen(recipe(), found, 10 * GB)["activation_checkpointing"] == "full"


def test_a_given_micro_batch_decides_how_much_is_recomputed() -> None:
    of = recipe(batch={"global_size": 16, "micro_size": 8})
    assert chosen(of, needs(10 * GB, 6 * GB, 2 * GB), 50 * GB)["activation_checkpointing"] == "selective"


def test_what_a_trial_did_not_survive_is_not_taken_again() -> None:
    of = recipe(batch={"global_size": 16})
    assert chosen(of, failed_trials=[("none", "whole", 16)])["micro_size"] == 8
    why = reasons(of, needs(), failed_trials=[("none", "whole", 16), ("none", "whole", 8)])
    assert why["micro_size"].endswith("; a trial of 8 ran out of memory")


def test_when_no_micro_batch_survives_its_trial_more_is_recomputed() -> None:
    of = recipe(batch={"global_size": 2})
    failed = [("none", "whole", 2), ("none", "whole", 1)]
    found = chosen(of, failed_trials=failed)
    assert (found["activation_checkpointing"], found["micro_size"]) == ("selective", 2)
    assert "a trial ran out of memory" in reasons(of, needs(), failed_trials=failed)["activation_checkpointing"]


@pytest.mark.parametrize(
    ("batch", "mode", "failed", "told"),
    [
        ({"global_size": 1}, "full", 1, "trials ran out of memory, the last with 1 samples at once; use a smaller"),
        (
            {"global_size": 16, "micro_size": 8},
            "none",
            8,
            "a trial of 8 samples at once ran out of memory; batch.micro_size=4 would fit",
        ),
    ],
)
def test_where_no_trial_survives_the_error_says_so(batch: Any, mode: str, failed: int, told: str) -> None:
    of = recipe(batch=batch, memory={"activation_checkpointing": mode})
    with pytest.raises(RecipeError, match=told):
        chosen(of, failed_trials=[(mode, "whole", failed)])


MB = 10**6
CHUNKS = {"whole": dict.fromkeys(["none", "selective", "full"], 40 * MB)} | {
    "chunked": dict.fromkeys(["none", "selective", "full"], 10 * MB)
}


def test_the_loss_is_in_chunks_where_all_logits_would_be_large() -> None:
    found = MemoryProfile(1000, 0, CHUNKS, 100 * MB)
    assert chosen(recipe(batch={"global_size": 4}), found)["chunked_loss"] is True
    assert reasons(recipe(batch={"global_size": 4}), found)["chunked_loss"].endswith(
        "take 400 MB in fp32, more than 256 MB"
    )
    assert chosen(recipe(batch={"global_size": 2}), found)["chunked_loss"] is False


def test_chunks_are_judged_by_the_micro_batch_that_they_allow() -> None:
    """Whole, only two samples would fit, whose logits are not large."""
    found = chosen(recipe(batch={"global_size": 8}), MemoryProfile(0, 0, CHUNKS, 100 * MB), 160 * MB + 2)
    assert (found["chunked_loss"], found["micro_size"]) == (True, 8)


def test_a_model_without_a_loss_in_chunks_says_so() -> None:
    why = reasons(recipe(batch={"global_size": 4}), needs(logits=100 * MB))
    assert why["chunked_loss"].endswith("but this model's output layer cannot be computed in chunks")


@pytest.mark.parametrize(
    ("values", "logits", "expected"),
    [
        ({}, MB, ["whole"]),
        ({}, 100 * MB, ["whole", "chunked"]),
        ({"memory": {"chunked_loss": True}}, MB, ["chunked"]),
        ({"memory": {"chunked_loss": False}}, 100 * MB, ["whole"]),
        ({"task": "classification"}, 100 * MB, ["whole"]),
        ({"parallelism": {"tensor": 2}}, MB, ["chunked"]),
    ],
)
def test_only_losses_that_may_be_chosen_are_tried(values: dict[str, Any], logits: int, expected: list[str]) -> None:
    assert loss_modes_to_try(recipe(**values), logits, WorkerMemory("cpu", 64 * 10**9, 1)) == expected


def test_a_gpu_holds_all_logits_up_to_a_sixteenth_of_its_memory() -> None:
    logits = 10**9  # of a sample, in fp32
    by_memory = {
        size: loss_modes_to_try(recipe(), logits, WorkerMemory("cuda", size * 10**9, 1)) for size in (80, 1000)
    }
    assert by_memory == {80: ["whole", "chunked"], 1000: ["whole"]}


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"name": "adamw"}, 16),
        ({"name": "adamw", "state_dtype": "bf16"}, 12),
        ({"name": "adamw", "state_dtype": "int8"}, 10),
        ({"name": "lamb"}, 16),
        ({"name": "muon"}, 16),
        ({"name": "sgd"}, 12),
        ({"name": "sgd", "momentum": 0.0}, 8),
        ({"name": "lars"}, 12),
        ({"name": "adamw", "offload": True}, 8),
    ],
)
def test_state_is_counted_by_the_optimizer(optimizer: dict[str, Any], expected: int) -> None:
    assert state_bytes_per_parameter(recipe(optimizer=optimizer, precision="fp32"), "cuda") == expected
    assert state_bytes_per_parameter(recipe(optimizer=optimizer), "cuda") == expected + 2  # copies of weights in bf16
    if "offload" in optimizer:  # saves nothing there
        assert state_bytes_per_parameter(recipe(optimizer=optimizer), "cpu") == 16


def test_what_is_frozen_has_only_its_weights() -> None:
    assert state_bytes(recipe(), 10, 1000, "cpu") == 160 + 4000


def test_what_an_exchange_of_fewer_bytes_keeps_counts_where_there_are_replicas() -> None:
    sync: dict[str, Any] = {"determinism": "off", "grad_sync": {"compression": "int8"}}
    assert state_bytes_per_parameter(recipe(**sync, parallelism={"replicate": 2}), "cpu") == 16 + 7
    assert state_bytes_per_parameter(recipe(**sync, parallelism={"replicate": 1}), "cpu") == 16


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_a_round_keeps_counts_on_one_worker_too(replicas: int) -> None:
    sync: dict[str, Any] = {"determinism": "off", "local_sgd": {"method": "diloco"}}
    assert state_bytes_per_parameter(recipe(**sync, parallelism={"replicate": replicas}), "cpu") == 16 + 12


@pytest.mark.parametrize("layout", [{"shard": 4}, {"tensor": 2, "pipeline": 2}, {"context": 2, "shard": 2}])
def test_state_is_divided_among_the_ranks_that_share_the_parameters(layout: dict[str, int]) -> None:
    assert state_bytes(recipe(parallelism={**layout, "replicate": 3}), 1000, 0, "cpu") == 4000


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"shard": 2}, 4000),
        ({"context": 2}, 2000),
        ({"tensor": 2}, 2000),
        ({"tensor": 2, "context": 2}, 1000),
        ({"pipeline": 2}, 4000),  # half of the layers, of two micro-batches
        ({"pipeline": 2, "pipeline_schedule": "gpipe"}, 8000),  # of all four
    ],
)
def test_activations_are_divided_by_the_layout(layout: dict[str, Any], expected: int) -> None:
    batch = {"global_size": 32 if layout.get("shard") else 16}
    assert activation_bytes(recipe(parallelism=layout, batch=batch), 1000, 4, 1) == expected


def test_an_odd_sequence_is_not_divided_among_tensor_ranks() -> None:
    assert activation_bytes(recipe(parallelism={"tensor": 2}, data={"seq_len": 255}), 1000, 4, 2) == 4000


@pytest.mark.parametrize(
    ("layout", "batch", "expected"),
    [
        ({"pipeline": 2}, 16, 4),  # four micro-batches for two stages
        ({"pipeline": 2}, 2, 1),  # no more than stages
        ({"pipeline": 4}, 8, 1),
        ({"pipeline": 2, "pipeline_schedule": "interleaved"}, 16, 2),  # four stages
        ({"pipeline": 2, "pipeline_schedule": "gpipe"}, 3, 1),
        ({"pipeline": 2, "pipeline_schedule": "gpipe"}, 1, 1),
        ({"pipeline": 4, "pipeline_schedule": "interleaved"}, 48, 3),
        ({"pipeline": 2, "pipeline_schedule": "zero-bubble", "layers_per_stage": [1, 1, 1, 1]}, 16, 2),
        ({"pipeline": 2, "replicate": 2}, 16, 2),
    ],
)
def test_a_pipeline_has_micro_batches_enough(layout: dict[str, Any], batch: int, expected: int) -> None:
    assert micro_batch_candidates(recipe(parallelism=layout, batch={"global_size": batch}), 1)[0] == expected


def test_too_few_samples_for_a_pipeline_are_told() -> None:
    with pytest.raises(
        RecipeError, match=r"^batch.micro_size: no micro-batch lets 1f1b run 4 stages .* batch.global_size, to 4 or"
    ):
        micro_batch_candidates(recipe(parallelism={"pipeline": 4}, batch={"global_size": 3}), 4)


@pytest.mark.parametrize(("micro", "expected"), [(8, 4), (4, 2), (1, None), (5, 4)])
def test_a_run_that_was_short_of_memory_goes_on_with_the_next_smaller(micro: int, expected: int | None) -> None:
    assert (
        next_smaller_micro_size(recipe(batch={"global_size": 16, "micro_size": micro}, parallelism={"replicate": 2}))
        == expected
    )


def test_selective_recomputation_is_not_chosen_where_a_backward_comes_in_two_parts() -> None:
    layout = {"pipeline": 2, "pipeline_schedule": "zero-bubble"}
    tight = needs(100 * PLENTY, PLENTY // 100, PLENTY // 200)
    assert chosen(recipe(parallelism=layout), tight, world=2)["activation_checkpointing"] == "full"
    assert chosen(recipe(parallelism={"pipeline": 2}), tight, world=2)["activation_checkpointing"] == "selective"
