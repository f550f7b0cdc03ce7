"""What is trained decides memory: the search leaves out nothing that the exact model of memory accepts."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from phalanx.cluster import Cluster, load_cluster
from phalanx.plan.footprint import footprint
from phalanx.plan.holdings import keeping
from phalanx.plan.profile import Attention, Kept, Product, Profile, Segment, Size, Weights
from phalanx.plan.search import COLUMNS, Found, Space, candidates, estimate, search, setups
from phalanx.plan.setup import Setup
from phalanx.plan.stacks import rates_of, stack
from phalanx.plan.step import step
from phalanx.plan.work import priced_by
from phalanx.recipe.schema import Parallelism

GIB = 2.0**30
TOKENS = 2048
CLUSTER = load_cluster("h100:8")
STACK = stack("phalanx")
RATES = rates_of(CLUSTER.node.accelerator, "bf16", STACK)


def decoder(
    width: int, blocks: int, frozen: float, experts: int = 0, bytes_each: float = 8.0, vocab: int = 32000
) -> Profile:
    """A decoder by hand: blocks of which a share of the weights is frozen, and a head."""
    inner = 12 * width

    def operations(wide: int, divided: bool) -> tuple[Product | Attention, ...]:
        found: list[Product | Attention] = []
        for phase in ("forward", "backward"):
            sizes = (Size(1), Size(0, TOKENS), Size(wide), Size(width))
            found.append(Product(phase, *sizes, 2, "n", weight=True))
            if divided:
                found.append(Attention(phase, Size(0, 1), 8, 8, TOKENS, TOKENS, width // 8, True, 2, True))
        return tuple(found)

    def weights(dense: int, expert: int, largest: int) -> Weights:
        return Weights(divided=dense, expert=expert, frozen=int(frozen * (dense + expert)), largest=largest)

    kept = Kept(Size(0, TOKENS * width * bytes_each), Size(0, TOKENS * width * 4.0))
    some = Kept(Size(0, TOKENS * width * 2.0), Size(0, TOKENS * width * 2.0))
    of_experts = width * inner // 2 * experts
    block = Segment(
        "block",
        blocks,
        operations(inner, True),
        weights(width * inner, of_experts, 4 * width * width),
        kept,
        kept,
        some,
        Size(0, TOKENS * width * 2.0),
        (kept,),
        (kept,),
        experts=experts,
    )
    logits = Kept(Size(0, TOKENS * vocab * 4.0))
    head = Segment(
        "head",
        1,
        operations(vocab, False),
        weights(width * vocab, 0, width * vocab),
        logits,
        logits,
        logits,
        Size(0, TOKENS * width * 2.0),
        (logits,),
        (logits,),
        is_block=False,
    )
    return Profile((block, head), TOKENS)


def setup(of: Profile, batch: int, cluster: Cluster = CLUSTER) -> Setup:
    return Setup(of, cluster, Parallelism(), 1, batch, "bf16", stack=STACK)


WAYS_TO_TRAIN = st.fixed_dictionaries(
    {
        "optimizer": st.sampled_from(["adamw", "sgd", "lamb", "lars", "muon"]),
        "state": st.sampled_from(["fp32", "bf16", "int8"]),
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
    of: Profile, how: dict[str, object], devices: int, share: float
) -> None:
    base, space = setup(of, 8), Space(devices, 8)
    rows = candidates(of, space)
    exact = np.array(
        [footprint(each, **how).total for each in setups(base, rows, range(len(rows["micro"])))]  # type: ignore[arg-type]
    )
    kept = keeping(how["optimizer"], how["state"], how["offload"], how["momentum"])  # type: ignore[arg-type]
    for bounds in (estimate(base, RATES, priced_by(RATES), rows, kept), estimate(base, RATES, priced_by(RATES), rows)):
        assert (bounds.memory <= exact * (1 + 1e-9)).all()
    room = share * float(np.median(exact))
    found = search(
        base,
        RATES,
        priced_by(RATES),
        space,
        partial(step, rates=RATES),
        lambda each: footprint(each, **how).total,  # type: ignore[arg-type]
        room,
        kept,
    )
    assert bool(found.options) == bool((exact <= room).any())
    if not found.options:
        assert found.least is not None
        assert found.least.memory == pytest.approx(exact.min())
        assert found.least.memory > room


def found_for(of: Profile, devices: int, batch: int = 8) -> Found:
    return search(
        setup(of, batch),
        RATES,
        priced_by(RATES),
        Space(devices, batch),
        partial(step, rates=RATES),
        lambda each: footprint(each).total,
        76 * GIB,
    )


def test_a_frozen_model_of_65_billion_parameters_fits_on_eight_devices() -> None:
    assert not found_for(decoder(8192, 80, 0.0), 8).options
    assert found_for(decoder(8192, 80, 1.0), 8).options


def test_sgd_without_momentum_keeps_nothing_and_lars_and_muon_always_do() -> None:
    base = setup(decoder(1024, 4, 0.0), 8)
    assert footprint(base, optimizer="sgd", momentum=0.0).optimizer == 0
    assert footprint(base, optimizer="sgd", momentum=0.9).optimizer == 4 * base.profile.parameters
    for name in ("lars", "muon"):
        assert footprint(base, optimizer=name, momentum=0.0).optimizer == 4 * base.profile.parameters


def test_frozen_weights_make_no_gradients_when_they_come_and_go() -> None:
    some, none = (footprint(setup(decoder(8192, 4, frozen), 8)).temporaries for frozen in (0.0, 1.0))
    assert some - none >= 6 * 4 * 8192**2


# --- one model of time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [0.0, 0.9])
@pytest.mark.parametrize("experts", [0, 8])
def test_without_shards_and_pipelines_estimate_and_simulation_are_one(experts: int, frozen: float) -> None:
    using = replace(STACK, experts=1.3, launch=4e-3, latency=1.5, eight=1.2)
    base = replace(setup(decoder(4096, 12, frozen, experts), 32), stack=using, optimizer="lamb")
    rows = candidates(base.profile, Space(8, 32))
    here = (rows["pipeline"] == 1) & (rows["shard"] * rows["context"] == 1)
    picked = {name: rows[name][here] for name in COLUMNS}
    assert len(picked["micro"]) > 20
    guess = estimate(base, RATES, priced_by(RATES), picked)
    exact = [step(each, RATES).total for each in setups(base, picked, range(len(picked["micro"])))]
    assert guess.seconds == pytest.approx(exact, rel=1e-6)


def test_gradients_travel_between_copies_of_what_shards_and_context_divide() -> None:
    of = decoder(4096, 12, 0.0)
    layouts = [
        Parallelism(replicate=2, shard=4),
        Parallelism(replicate=2, shard=2, context=2),
        Parallelism(replicate=2, context=4),
    ]
    slow = replace(STACK, hidden=0.0)
    parts = [
        step(replace(setup(of, 8), layout=layout, zero=3, micro=8 // (2 * layout.shard), stack=slow), RATES)
        for layout in layouts
    ]
    assert [each.gradients for each in parts] == pytest.approx([parts[0].gradients] * 3, rel=0.01)
    assert [each.optimizer for each in parts] == pytest.approx([parts[0].optimizer] * 3)


def test_frozen_weights_neither_travel_nor_are_updated() -> None:
    layout, slow = Parallelism(replicate=8), replace(STACK, hidden=0.0)
    whole, frozen = (
        step(replace(setup(decoder(4096, 12, share), 8), layout=layout, zero=0, stack=slow), RATES)
        for share in (0.0, 1.0)
    )
    assert whole.gradients > 0.01
    assert frozen.gradients < 0.01 * whole.gradients
    assert frozen.optimizer == 0
