"""What is trained decides memory: the search leaves out nothing that the exact model of memory accepts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from phalanx.cluster import Cluster, load_cluster
from phalanx.planner.device_costs import device_costs_for_stack, stack_by_name
from phalanx.planner.memory import TrainingOptions, estimate_memory
from phalanx.planner.model_profile import (
    Affine,
    AttentionOp,
    Gemm,
    ModelProfile,
    ModelSegment,
    SavedActivations,
    SegmentWeights,
)
from phalanx.planner.scenario import Scenario, to_scenarios
from phalanx.planner.search import (
    SearchResult,
    SearchSpace,
    enumerate_candidates,
    estimate_candidates,
    search_parallelism,
)
from phalanx.planner.state_memory import optimizer_state_of
from phalanx.planner.step_time import predict_step_time
from phalanx.recipe.schema import Parallelism

GIB = 2.0**30
TOKENS = 2048
CLUSTER = load_cluster("h100:8")
STACK = stack_by_name("phalanx")
RATES = device_costs_for_stack(CLUSTER.node.accelerator, "bf16", STACK)


def decoder(
    width: int, blocks: int, frozen: float, experts: int = 0, bytes_each: float = 8.0, vocab: int = 32000
) -> ModelProfile:
    """A decoder by hand: blocks of which a share of the weights is frozen, and a head."""
    inner = 12 * width

    def operations(wide: int, divided: bool) -> tuple[Gemm | AttentionOp, ...]:
        found: list[Gemm | AttentionOp] = []
        for phase in ("forward", "backward"):
            sizes = (Affine(1), Affine(0, TOKENS), Affine(wide), Affine(width))
            found.append(Gemm(phase, *sizes, 2, "n", has_weight=True))
            if divided:
                found.append(AttentionOp(phase, Affine(0, 1), 8, 8, TOKENS, TOKENS, width // 8, True, 2, True))
        return tuple(found)

    def weights(dense: int, expert: int, largest: int) -> SegmentWeights:
        return SegmentWeights(
            tp_sharded=dense, expert=expert, frozen_count=int(frozen * (dense + expert)), largest_weight=largest
        )

    kept = SavedActivations(Affine(0, TOKENS * width * bytes_each), Affine(0, TOKENS * width * 4.0))
    some = SavedActivations(Affine(0, TOKENS * width * 2.0), Affine(0, TOKENS * width * 2.0))
    of_experts = width * inner // 2 * experts
    block = ModelSegment(
        "block",
        blocks,
        operations(inner, True),
        weights(width * inner, of_experts, 4 * width * width),
        kept,
        kept,
        some,
        Affine(0, TOKENS * width * 2.0),
        (kept,),
        (kept,),
        num_experts=experts,
    )
    logits = SavedActivations(Affine(0, TOKENS * vocab * 4.0))
    head = ModelSegment(
        "head",
        1,
        operations(vocab, False),
        weights(width * vocab, 0, width * vocab),
        logits,
        logits,
        logits,
        Affine(0, TOKENS * width * 2.0),
        (logits,),
        (logits,),
        is_block=False,
    )
    return ModelProfile((block, head), TOKENS)


def setup(of: ModelProfile, batch: int, cluster: Cluster = CLUSTER) -> Scenario:
    return Scenario(of, cluster, Parallelism(), 1, batch, "bf16", stack=STACK)


WAYS_TO_TRAIN = st.fixed_dictionaries(
    {
        "optimizer": st.sampled_from(["adamw", "sgd", "lamb", "lars", "muon"]),
        "state_dtype": st.sampled_from(["fp32", "bf16", "int8"]),
        "offload": st.booleans(),
        "momentum": st.sampled_from([0.0, 0.9]),
    }
)
PROFILES = st.builds(
    decoder,
    width=st.sampled_from([1024, 4096, 8192]),
    blocks=st.sampled_from([1, 4, 40, 80]),
    frozen=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    experts=st.sampled_from([0, 0, 8]),
    bytes_each=st.sampled_from([1.0, 8.0, 60.0]),
)


@seed(29)
@settings(max_examples=30, deadline=None)
@given(of=PROFILES, how=WAYS_TO_TRAIN, devices=st.sampled_from([1, 4, 8]), share=st.floats(0.02, 3.0))
def test_no_layout_that_fits_exactly_is_left_out(
    of: ModelProfile, how: dict[str, object], devices: int, share: float
) -> None:
    base, space = setup(of, 8), SearchSpace(devices, 8)
    rows = enumerate_candidates(of, space)
    exact = np.array(
        [
            estimate_memory(each, TrainingOptions(**how)).total
            for each in to_scenarios(base, rows, range(len(rows.micro_size)))
        ]  # type: ignore[arg-type]
    )
    kept = optimizer_state_of(how["optimizer"], how["state_dtype"], how["offload"], how["momentum"])  # type: ignore[arg-type]
    for bounds in (
        estimate_candidates(base, RATES, rows, kept),
        estimate_candidates(base, RATES, rows),
    ):
        assert (bounds.min_bytes <= exact * (1 + 1e-9)).all()
    room = share * float(np.median(exact))
    found = search_parallelism(
        base,
        RATES,
        space,
        lambda each: estimate_memory(each, TrainingOptions(**how)).total,  # type: ignore[arg-type]
        room,
        kept,
    )
    assert bool(found.candidates) == bool((exact <= room).any())
    if not found.candidates:
        assert found.closest is not None
        assert found.closest.peak_bytes == pytest.approx(exact.min())
        assert found.closest.peak_bytes > room


def found_for(of: ModelProfile, devices: int, batch: int = 8) -> SearchResult:
    return search_parallelism(
        setup(of, batch),
        RATES,
        SearchSpace(devices, batch),
        lambda each: estimate_memory(each).total,
        76 * GIB,
    )


def test_a_frozen_model_of_65_billion_parameters_fits_on_eight_devices() -> None:
    assert not found_for(decoder(8192, 80, 0.0), 8).candidates
    assert found_for(decoder(8192, 80, 1.0), 8).candidates


def test_sgd_without_momentum_keeps_nothing_and_lars_and_muon_always_do() -> None:
    base = setup(decoder(1024, 4, 0.0), 8)
    assert estimate_memory(base, TrainingOptions(optimizer="sgd", momentum=0.0)).optimizer_state == 0
    assert (
        estimate_memory(base, TrainingOptions(optimizer="sgd", momentum=0.9)).optimizer_state
        == 4 * base.profile.num_parameters
    )
    for name in ("lars", "muon"):
        assert (
            estimate_memory(base, TrainingOptions(optimizer=name, momentum=0.0)).optimizer_state
            == 4 * base.profile.num_parameters
        )


def test_frozen_weights_make_no_gradients_when_they_come_and_go() -> None:
    some, none = (estimate_memory(setup(decoder(8192, 4, frozen), 8)).temporaries for frozen in (0.0, 1.0))
    assert some - none >= 6 * 4 * 8192**2


# --- one model of time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [0.0, 0.9])
@pytest.mark.parametrize("experts", [0, 8])
def test_without_pipelines_estimate_and_simulation_are_one(experts: int, frozen: float) -> None:
    using = replace(STACK, expert_factor=1.3, launch_s=4e-3, latency_factor=1.5, fp8_gemm_factor=1.2)
    base = replace(setup(decoder(4096, 12, frozen, experts), 32), stack=using, optimizer="lamb")
    rows = enumerate_candidates(base.profile, SearchSpace(8, 32))
    here = rows.pipeline == 1
    picked = rows.take(here)
    assert (picked.shard * picked.context > 1).sum() > 20
    guess = estimate_candidates(base, RATES, picked)
    exact = [predict_step_time(each, RATES).total for each in to_scenarios(base, picked, range(len(picked.micro_size)))]
    assert guess.step_s == pytest.approx(exact, rel=1e-12)


def test_gradients_travel_between_copies_of_what_shards_and_context_divide() -> None:
    of = decoder(4096, 12, 0.0)
    layouts = [
        Parallelism(replicate=2, shard=4),
        Parallelism(replicate=2, shard=2, context=2),
        Parallelism(replicate=2, context=4),
    ]
    slow = replace(STACK, max_overlap=0.0)
    parts = [
        predict_step_time(
            replace(setup(of, 8), parallelism=layout, zero_level=3, micro_size=8 // (2 * layout.shard), stack=slow),
            RATES,
        )
        for layout in layouts
    ]
    assert [each.grad_sync for each in parts] == pytest.approx([parts[0].grad_sync] * 3, rel=0.01)
    assert [each.optimizer for each in parts] == pytest.approx([parts[0].optimizer] * 3)


def test_frozen_weights_neither_travel_nor_are_updated() -> None:
    layout, slow = Parallelism(replicate=8), replace(STACK, max_overlap=0.0)
    whole, frozen = (
        predict_step_time(
            replace(setup(decoder(4096, 12, share), 8), parallelism=layout, zero_level=0, stack=slow), RATES
        )
        for share in (0.0, 1.0)
    )
    assert whole.grad_sync > 0.01
    assert frozen.grad_sync < 0.01 * whole.grad_sync
    assert frozen.optimizer == 0
