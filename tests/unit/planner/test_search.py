"""The search for a layout: what is valid, what the estimate is worth, and which of the best comes first."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from gpt_profile import profile_text_model
from phalanx.cluster import Cluster, load_cluster
from phalanx.models import moe, transformer
from phalanx.models.convnets import resnet
from phalanx.planner.device_costs import device_costs_for_stack, stack_by_name
from phalanx.planner.memory import estimate_memory
from phalanx.planner.model_profile import ModelProfile
from phalanx.planner.scenario import CHECKPOINTING_MODES, PIPELINE_SCHEDULES, Layouts, Scenario, to_scenarios
from phalanx.planner.search import (
    SearchResult,
    SearchSpace,
    enumerate_candidates,
    estimate_candidates,
    search_parallelism,
)
from phalanx.planner.step_time import StepBreakdown, predict_step_time
from phalanx.planner.trace.trace_model import (
    build_on_meta,
    image_classification_forward,
    profile_model,
)
from phalanx.recipe.schema import Parallelism

SEQUENCE = 4096
GIB = 2.0**30


@cache
def decoder() -> ModelProfile:
    """Of 13 B parameters, in 40 blocks with 8 heads of keys."""
    sizes = {
        "layers": 40,
        "hidden_size": 5120,
        "num_heads": 40,
        "num_kv_heads": 8,
        "tie_embeddings": False,
        "qk_norm": False,
    }
    return profile_text_model(transformer, 32000, SEQUENCE, **sizes)


@cache
def mixture() -> ModelProfile:
    sizes = {"layers": 8, "hidden_size": 1024, "num_heads": 8, "num_experts": 12, "top_k": 2}
    return profile_text_model(moe, 32000, 1024, **sizes)


@cache
def pictures() -> ModelProfile:
    return profile_model(build_on_meta(lambda: resnet(10, 3)), image_classification_forward(3, 32, 32), 1)


@cache
def cluster(devices: int = 64) -> Cluster:
    return load_cluster(f"h100:{devices}")


STACK = stack_by_name("phalanx")
RATES = device_costs_for_stack(load_cluster("h100:8").node.accelerator, "bf16", STACK)


def base(of: ModelProfile, batch: int = 256, devices: int = 64) -> Scenario:
    return Scenario(of, cluster(devices), Parallelism(), 1, batch, "bf16", stack=STACK)


def simulated(setup: Scenario) -> StepBreakdown:
    return predict_step_time(setup, RATES)


def found(of: ModelProfile, space: SearchSpace, room: float = 76 * GIB) -> SearchResult:
    return search_parallelism(
        base(of, space.global_batch, space.devices),
        RATES,
        space,
        lambda each: estimate_memory(each).total,
        room,
    )


@cache
def best() -> SearchResult:
    return found(decoder(), SearchSpace(64, 256))


def world(rows: Layouts) -> np.ndarray:
    sizes = [getattr(rows, name) for name in ("replicate", "shard", "tensor", "pipeline", "context")]
    return np.prod(np.array(sizes), axis=0)


# --- candidates -------------------------------------------------------------------------------------------------------


def test_every_candidate_uses_all_devices() -> None:
    rows = enumerate_candidates(decoder(), SearchSpace(64, 256))
    assert len(rows.micro_size) > 1000
    assert set(world(rows)) == {64}


def test_every_candidate_divides_batch_heads_and_sequence_evenly() -> None:
    rows = enumerate_candidates(decoder(), SearchSpace(48, 192))
    parts = rows.replicate * rows.shard
    assert not (192 % (parts * rows.micro_size)).any()
    assert set(rows.tensor) == {1, 2, 4, 8}  # 8 heads of keys, so not 3 or 6
    assert not (SEQUENCE % (2 * rows.context * rows.tensor))[rows.context > 1].any()


def test_no_pipeline_is_deeper_than_the_model_or_has_fewer_micro_batches_than_stages() -> None:
    rows = enumerate_candidates(decoder(), SearchSpace(64, 64))
    micros = 64 // (rows.replicate * rows.shard * rows.micro_size)
    assert (rows.pipeline * rows.virtual_stages <= 40).all()
    assert (micros >= rows.pipeline)[rows.pipeline > 1].all()


def test_interleaving_comes_with_whole_groups_of_micro_batches() -> None:
    rows = enumerate_candidates(decoder(), SearchSpace(64, 256))
    here = rows.virtual_stages > 1
    micros = 256 // (rows.replicate * rows.shard * rows.micro_size)
    assert here.any()
    assert {PIPELINE_SCHEDULES[each] for each in rows.schedule[here]} == {"interleaved"}
    assert not (micros[here] % rows.pipeline[here]).any()


def test_tensor_ranks_stay_where_the_fast_network_reaches() -> None:
    assert max(enumerate_candidates(decoder(), SearchSpace(64, 256, domain_size=4)).tensor) == 4


def test_experts_are_divided_evenly_over_shard_and_context() -> None:
    rows = enumerate_candidates(mixture(), SearchSpace(24, 96))
    assert set(rows.expert) == {1, 2, 3, 4, 6, 12}
    assert not ((rows.shard * rows.context) % rows.expert).any()


def test_pictures_are_not_cut() -> None:
    rows = enumerate_candidates(pictures(), SearchSpace(16, 64, has_sequences=False))
    assert set(rows.tensor) == set(rows.context) == {1}


def test_a_layout_that_is_given_is_the_only_one() -> None:
    given = Parallelism(replicate=2, shard=4, tensor=8, pipeline_schedule="gpipe")
    rows = enumerate_candidates(decoder(), SearchSpace(64, 256, parallelism=given))
    for name in ("replicate", "shard", "tensor", "pipeline", "context", "expert"):
        assert set(getattr(rows, name)) == {getattr(given, name)}
    assert set(rows.micro_size) == {1, 2, 4, 8, 16, 32}


def test_a_micro_batch_and_ways_that_are_given_are_the_only_ones() -> None:
    rows = enumerate_candidates(decoder(), SearchSpace(64, 256, micro_size=2, checkpointing_modes=("full",)))
    assert set(rows.micro_size) == {2}
    assert set(rows.checkpointing) == {CHECKPOINTING_MODES.index("full")}


def test_exactness_over_replicas_leaves_whole_replicas() -> None:
    rows = enumerate_candidates(decoder(), SearchSpace(64, 256, replicas_only=True))
    assert set(rows.replicate) == {64}


def test_frozen_int8_weights_are_whole_on_every_device() -> None:
    segments = tuple(replace(each, weights=replace(each.weights, int8_count=1)) for each in decoder().segments)
    found = enumerate_candidates(replace(decoder(), segments=segments), SearchSpace(64, 256))
    assert set(found.replicate) == {64}


@pytest.mark.parametrize("space", [SearchSpace(64, 63, replicas_only=True), SearchSpace(7, 64, micro_size=5)])
def test_where_nothing_comes_out_even_there_is_no_candidate(space: SearchSpace) -> None:
    assert len(enumerate_candidates(pictures(), space)) == 0
    nothing = found(pictures(), space)
    assert (nothing.candidates, nothing.num_valid, nothing.closest) == ((), 0, None)


# --- the estimate -----------------------------------------------------------------------------------------------------


def test_with_a_pipeline_the_estimate_is_close_to_the_simulation() -> None:
    rows = enumerate_candidates(decoder(), SearchSpace(64, 256))
    guess = estimate_candidates(base(decoder()), RATES, rows)
    picked = np.random.RandomState(0).permutation(np.flatnonzero(rows.pipeline > 1))[:80]
    exact = np.array([simulated(each).total for each in to_scenarios(base(decoder()), rows, list(picked))])
    assert np.median(guess.step_s[picked] / exact) == pytest.approx(1.0, abs=0.05)
    assert np.quantile(np.abs(guess.step_s[picked] / exact - 1), 0.9) < 0.2


# --- the search -------------------------------------------------------------------------------------------------------


def test_the_best_is_no_slower_than_any_that_was_simulated() -> None:
    times = [option.step_s for option in best().candidates]
    assert len(times) > 10
    assert times[0] <= min(times) * 1.005


def test_everything_that_is_offered_fits_and_says_what_it_takes() -> None:
    for option in best().candidates[:5]:
        assert option.peak_bytes <= 76 * GIB
        assert option.peak_bytes == estimate_memory(option.scenario).total
        assert option.step_s == simulated(option.scenario).total


def test_less_room_is_never_faster() -> None:
    tight = found(decoder(), SearchSpace(64, 256), 40 * GIB)
    assert tight.candidates[0].step_s >= 0.99 * best().candidates[0].step_s
    assert tight.candidates[0].peak_bytes <= 40 * GIB


def test_where_nothing_fits_the_closest_is_told() -> None:
    none = found(decoder(), SearchSpace(8, 64, checkpointing_modes=("full",)), 8 * GIB)
    assert none.candidates == ()
    assert none.num_valid > 0
    assert none.closest is not None
    assert none.closest.peak_bytes > 8 * GIB


def test_of_layouts_that_are_as_fast_the_simpler_comes_first() -> None:
    one = found(pictures(), SearchSpace(8, 512, micro_size=64, checkpointing_modes=("none",), has_sequences=False))
    first = one.candidates[0].scenario.parallelism
    divided = [
        sum(size > 1 for size in (it.replicate, it.shard, it.tensor, it.pipeline, it.context))
        for it in (option.scenario.parallelism for option in one.candidates)
        if it is not None
    ]
    assert sum(size > 1 for size in (first.replicate, first.shard)) == 1 == min(divided)


def test_a_layout_that_is_given_keeps_its_stages() -> None:
    given = Parallelism(pipeline=2, replicate=4, layers_per_stage=[18, 22])
    made = Scenario(decoder(), cluster(8), given, 1, 64, "bf16", stack=STACK)
    one = search_parallelism(
        made,
        RATES,
        SearchSpace(8, 64, given, 1, ("full",)),
        lambda each: estimate_memory(each).total,
        200 * GIB,
    )
    assert one.candidates[0].scenario.parallelism.layers_per_stage == [18, 22]


def test_no_zero_bubble_pipeline_recomputes_selectively() -> None:
    found = enumerate_candidates(decoder(), SearchSpace(64, 256))
    ways = {
        CHECKPOINTING_MODES[way]
        for way, schedule in zip(found.checkpointing, found.schedule, strict=True)
        if schedule == 3
    }
    assert PIPELINE_SCHEDULES[3] == "zero-bubble"
    assert ways == {"none", "full"}
