"""Candidates, their order, and verdicts over made-up measurements."""

from dataclasses import replace
from typing import Any

import pytest

from phalanx.autoconfig.tuning_candidates import (
    TUNABLE_KEYS,
    TuningFacts,
    apply_changes,
    break_even_steps,
    is_hopeless,
    propose_candidates,
    summarize_rounds,
)
from phalanx.recipe import Recipe
from phalanx.recipe.diff import diff_recipes
from resolved_recipes import resolved_recipe

CPU = TuningFacts(
    device="cpu",
    physical_cores=2,
    memory_bytes=16 * 10**9,
    tflops={"fp32": 0.1, "bf16": 0.3},
    trainable_parameters=3_000_000,
    flops_per_sample=1e9,
    activation_bytes_per_sample=8e6,
    step_s=0.4,
    allowed_precisions=("fp32", "bf16"),
    vocab_size=256,
    seq_len=256,
)
GPU = replace(CPU, device="cuda", physical_cores=16, tflops={"fp32": 50.0, "bf16": 700.0})


def resolved(**changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "batch": {"global_size": 16, "micro_size": 16},
        "precision": "fp32",
        "parallelism": {"replicate": 1},
        "memory": {"activation_checkpointing": "none", "chunked_loss": False},
        "compile": False,
        "num_threads": 2,
    }
    return resolved_recipe(**{**values, **changes})


def labels(recipe: Recipe, facts: TuningFacts) -> list[str]:
    return [candidate.label for candidate in propose_candidates(recipe, facts)]


def test_candidates_come_in_the_order_of_predicted_gain() -> None:
    found = propose_candidates(resolved(), CPU)
    assert [one.predicted_speedup for one in found] == sorted((one.predicted_speedup for one in found), reverse=True)
    assert {one.label for one in found} >= {"precision=bf16", "compile=true", "2 processes x 1 thread"}


@pytest.mark.parametrize("facts", [CPU, GPU])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_no_candidate_changes_the_mathematics(facts: TuningFacts, recompute: str) -> None:
    recipe = resolved(memory={"activation_checkpointing": recompute, "chunked_loss": False})
    for candidate in propose_candidates(recipe, facts):
        for difference in diff_recipes(recipe, apply_changes(recipe, candidate.changes)):
            assert any(difference.key == key or difference.key.startswith(f"{key}.") for key in TUNABLE_KEYS)


def test_a_key_of_the_mathematics_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must not change optimizer.lr"):
        apply_changes(resolved(), {"optimizer.lr": 1.0})


def test_a_precision_that_may_not_change_is_no_candidate() -> None:
    fixed = replace(CPU, allowed_precisions=())
    assert not any(label.startswith("precision") for label in labels(resolved(), fixed))


def test_a_precision_that_is_slower_here_is_not_tried() -> None:
    slow = replace(CPU, tflops={"fp32": 0.1, "bf16": 0.01})
    assert "precision=bf16" not in labels(resolved(), slow)


def test_processes_share_cores_and_batch() -> None:
    (candidate,) = (one for one in propose_candidates(resolved(), CPU) if "processes" in one.label)
    assert candidate.changes == {"parallelism": {"replicate": 2}, "batch.micro_size": 8, "num_threads": 1}


@pytest.mark.parametrize("facts", [replace(CPU, may_change_processes=False), GPU, replace(CPU, memory_bytes=10**8)])
def test_processes_are_not_tried_where_given_on_gpus_or_without_memory(facts: TuningFacts) -> None:
    assert not any("processes" in label for label in labels(resolved(), facts))


def test_under_replicas_threads_stay_and_every_promised_world_can_share_the_batch() -> None:
    recipe = resolved(determinism="elastic", num_threads=1, batch={"global_size": 24, "micro_size": 1})
    found = propose_candidates(recipe, CPU)
    assert not any("num_threads" in one.changes or "shard" in str(one.changes) for one in found)
    assert all(one.changes.get("batch.micro_size", 1) == 1 for one in found)


def test_what_is_recomputed_need_not_be_where_memory_suffices() -> None:
    recipe = resolved(memory={"activation_checkpointing": "full", "chunked_loss": False})
    assert "memory.activation_checkpointing=none" in labels(recipe, CPU)
    assert "memory.activation_checkpointing=none" not in labels(recipe, replace(CPU, memory_bytes=10**8))


def test_graphs_are_tried_after_compile_on_a_gpu_only() -> None:
    assert "compile=cuda-graphs" in labels(resolved(compile=True), GPU)
    assert not any("compile" in label for label in labels(resolved(compile=True), CPU))


def test_a_gain_beyond_noise_is_told_from_one_within() -> None:
    clear = summarize_rounds([([1.0, 1.1], [0.8, 0.8]), ([1.0, 1.0], [0.7, 0.8]), ([1.2, 1.0], [0.8, 0.9])])
    assert clear.is_faster
    assert clear.speedup == pytest.approx(1.0 / 0.8)
    assert not summarize_rounds([([1.0], [0.99]), ([1.0], [0.985]), ([1.0], [0.99])]).is_faster  # below the margin
    assert not summarize_rounds(
        [([1.0], [0.5]), ([1.0], [1.2]), ([1.0], [1.1]), ([1.0], [0.6])]
    ).is_faster  # quartiles below 1


def test_one_slow_round_does_not_decide() -> None:
    rounds = [([1.0], [0.8]), ([1.0], [0.8]), ([1.0], [2.0]), ([1.0], [0.8]), ([1.0], [0.8])]
    assert summarize_rounds(rounds).is_faster


def test_trying_stops_when_two_rounds_were_clearly_slower() -> None:
    assert not is_hopeless([([1.0], [2.0])])
    assert is_hopeless([([1.0], [2.0]), ([1.0], [1.5])])
    assert not is_hopeless([([1.0], [2.0]), ([1.0], [1.05])])


def test_a_longer_start_is_paid_back_by_steps() -> None:
    assert break_even_steps(summarize_rounds([([1.0], [0.75])]), 10.0) == 40
    assert break_even_steps(summarize_rounds([([1.0], [0.75])]), -1.0) == 0
