"""The search for a layout: what is valid, what the estimate is worth, and which of the best comes first."""

from functools import cache

import numpy as np
import pytest

from phalanx.cluster import Cluster, load_cluster
from phalanx.models import moe, transformer
from phalanx.models.convnets import resnet
from phalanx.plan.footprint import footprint
from phalanx.plan.profile import Profile
from phalanx.plan.search import COLUMNS, SCHEDULES, WAYS, Columns, Found, Space, candidates, estimate, search, setups
from phalanx.plan.setup import Setup
from phalanx.plan.stacks import rates_of, stack
from phalanx.plan.step import Parts, step
from phalanx.plan.tracing import build, image_loss, language_loss, profile
from phalanx.plan.work import priced_by
from phalanx.recipe.schema import Parallelism

SEQUENCE = 4096
GIB = 2.0**30


@cache
def decoder() -> Profile:
    """Of 13 B parameters, in 40 blocks with 8 heads of keys."""
    sizes = {
        "layers": 40,
        "hidden_size": 5120,
        "num_heads": 40,
        "num_kv_heads": 8,
        "tie_embeddings": False,
        "qk_norm": False,
    }
    return profile(
        build(lambda: transformer(32000, SEQUENCE, **sizes)),  # type: ignore[arg-type]
        language_loss(32000, SEQUENCE),
        SEQUENCE,
    )


@cache
def mixture() -> Profile:
    sizes = {"layers": 8, "hidden_size": 1024, "num_heads": 8, "num_experts": 12, "top_k": 2}
    return profile(
        build(lambda: moe(32000, 1024, **sizes)),  # type: ignore[arg-type]
        language_loss(32000, 1024),
        1024,
    )


@cache
def pictures() -> Profile:
    return profile(build(lambda: resnet(10, 3)), image_loss(3, 32, 32), 1)


@cache
def cluster(devices: int = 64) -> Cluster:
    return load_cluster(f"h100:{devices}")


STACK = stack("phalanx")
RATES = rates_of(load_cluster("h100:8").node.accelerator, "bf16", STACK)


def base(of: Profile, batch: int = 256, devices: int = 64) -> Setup:
    return Setup(of, cluster(devices), Parallelism(), 1, batch, "bf16", stack=STACK)


def simulated(setup: Setup) -> Parts:
    return step(setup, RATES)


def found(of: Profile, space: Space, room: float = 76 * GIB) -> Found:
    return search(
        base(of, space.batch, space.devices),
        RATES,
        priced_by(RATES),
        space,
        simulated,
        lambda each: footprint(each).total,
        room,
    )


@cache
def best() -> Found:
    return found(decoder(), Space(64, 256))


def world(rows: Columns) -> np.ndarray:
    sizes = [rows[name] for name in ("replicate", "shard", "tensor", "pipeline", "context")]
    return np.prod(np.array(sizes), axis=0)


# --- candidates -------------------------------------------------------------------------------------------------------


def test_every_candidate_uses_all_devices() -> None:
    rows = candidates(decoder(), Space(64, 256))
    assert set(rows) == set(COLUMNS)
    assert len(rows["micro"]) > 1000
    assert set(world(rows)) == {64}


def test_every_candidate_divides_batch_heads_and_sequence_evenly() -> None:
    rows = candidates(decoder(), Space(48, 192))
    parts = rows["replicate"] * rows["shard"]
    assert not (192 % (parts * rows["micro"])).any()
    assert set(rows["tensor"]) == {1, 2, 4, 8}  # 8 heads of keys, so not 3 or 6
    assert not (SEQUENCE % (2 * rows["context"] * rows["tensor"]))[rows["context"] > 1].any()


def test_no_pipeline_is_deeper_than_the_model_or_has_fewer_micro_batches_than_stages() -> None:
    rows = candidates(decoder(), Space(64, 64))
    micros = 64 // (rows["replicate"] * rows["shard"] * rows["micro"])
    assert (rows["pipeline"] * rows["chunks"] <= 40).all()
    assert (micros >= rows["pipeline"])[rows["pipeline"] > 1].all()


def test_interleaving_comes_with_whole_groups_of_micro_batches() -> None:
    rows = candidates(decoder(), Space(64, 256))
    here = rows["chunks"] > 1
    micros = 256 // (rows["replicate"] * rows["shard"] * rows["micro"])
    assert here.any()
    assert {SCHEDULES[each] for each in rows["schedule"][here]} == {"interleaved"}
    assert not (micros[here] % rows["pipeline"][here]).any()


def test_no_candidate_comes_twice() -> None:
    rows = candidates(decoder(), Space(64, 256))
    table = np.stack([rows[name] for name in COLUMNS])
    assert np.unique(table, axis=1).shape == table.shape


def test_tensor_ranks_stay_where_the_fast_network_reaches() -> None:
    assert max(candidates(decoder(), Space(64, 256, domain=4))["tensor"]) == 4


def test_experts_are_divided_evenly_over_shard_and_context() -> None:
    rows = candidates(mixture(), Space(24, 96))
    assert set(rows["expert"]) == {1, 2, 3, 4, 6, 12}
    assert not ((rows["shard"] * rows["context"]) % rows["expert"]).any()


def test_a_model_without_experts_has_none_to_divide() -> None:
    assert set(candidates(decoder(), Space(64, 256))["expert"]) == {1}


def test_pictures_are_not_cut() -> None:
    rows = candidates(pictures(), Space(16, 64, sequences=False))
    assert set(rows["tensor"]) == set(rows["context"]) == {1}


def test_a_layout_that_is_given_is_the_only_one() -> None:
    given = Parallelism(replicate=2, shard=4, tensor=8, pipeline_schedule="gpipe")
    rows = candidates(decoder(), Space(64, 256, layout=given))
    for name in ("replicate", "shard", "tensor", "pipeline", "context", "expert"):
        assert set(rows[name]) == {getattr(given, name)}
    assert set(rows["micro"]) == {1, 2, 4, 8, 16, 32}


def test_a_micro_batch_and_ways_that_are_given_are_the_only_ones() -> None:
    rows = candidates(decoder(), Space(64, 256, micro=2, ways=("full",)))
    assert set(rows["micro"]) == {2}
    assert set(rows["way"]) == {WAYS.index("full")}


def test_exactness_over_replicas_leaves_whole_replicas() -> None:
    rows = candidates(decoder(), Space(64, 256, replicas_only=True))
    assert set(rows["replicate"]) == {64}


@pytest.mark.parametrize("space", [Space(64, 63, replicas_only=True), Space(7, 64, micro=5)])
def test_where_nothing_comes_out_even_there_is_no_candidate(space: Space) -> None:
    assert len(candidates(pictures(), space)["micro"]) == 0
    nothing = found(pictures(), space)
    assert (nothing.options, nothing.valid, nothing.least) == ((), 0, None)


# --- the estimate -----------------------------------------------------------------------------------------------------


def test_ten_thousand_configurations_are_estimated_at_once() -> None:
    rows = candidates(decoder(), Space(1024, 4096))
    guess = estimate(base(decoder(), 4096, 1024), RATES, priced_by(RATES), rows)
    assert len(guess.seconds) == len(rows["micro"]) >= 10_000
    assert np.isfinite(guess.seconds).all()
    assert np.isfinite(guess.memory).all()
    assert (guess.seconds > 0).all()
    assert (guess.memory > 0).all()


def test_without_a_pipeline_the_estimate_is_close_to_the_simulation() -> None:
    rows = candidates(decoder(), Space(64, 256))
    guess = estimate(base(decoder()), RATES, priced_by(RATES), rows)
    plain = np.flatnonzero(rows["pipeline"] == 1)
    picked = np.random.RandomState(0).permutation(plain)[:80]
    exact = np.array([simulated(each).total for each in setups(base(decoder()), rows, list(picked))])
    assert np.median(guess.seconds[picked] / exact) == pytest.approx(1.0, abs=0.1)


def test_estimates_of_one_are_those_among_many() -> None:
    rows = candidates(decoder(), Space(64, 256))
    whole = estimate(base(decoder()), RATES, priced_by(RATES), rows)
    at = len(rows["micro"]) // 2
    alone = estimate(base(decoder()), RATES, priced_by(RATES), {name: rows[name][at : at + 1] for name in COLUMNS})
    assert alone.seconds[0] == pytest.approx(whole.seconds[at])
    assert alone.memory[0] == pytest.approx(whole.memory[at])


def test_rows_become_setups() -> None:
    rows = candidates(decoder(), Space(64, 256))
    at = int(np.flatnonzero((rows["chunks"] == 2) & (rows["shard"] > 1))[0])
    (made,) = setups(base(decoder()), rows, [at])
    assert made.layout.world == 64
    assert (made.chunks, made.layout.pipeline_schedule, made.zero) == (2, "interleaved", 3)
    assert (made.micro, made.recompute) == (rows["micro"][at], WAYS[rows["way"][at]])


# --- the search -------------------------------------------------------------------------------------------------------


def test_the_best_is_no_slower_than_any_that_was_simulated() -> None:
    times = [option.seconds for option in best().options]
    assert len(times) > 10
    assert times[0] <= min(times) * 1.005


def test_everything_that_is_offered_fits_and_says_what_it_takes() -> None:
    for option in best().options[:5]:
        assert option.memory <= 76 * GIB
        assert option.memory == footprint(option.setup).total
        assert option.seconds == simulated(option.setup).total


def test_the_best_is_better_than_whole_shards_of_the_plainest_kind() -> None:
    plain = setups(base(decoder()), candidates(decoder(), Space(64, 256, Parallelism(shard=64), 1, ("full",))), [0])[0]
    assert best().options[0].seconds < simulated(plain).total


def test_less_room_is_never_faster() -> None:
    tight = found(decoder(), Space(64, 256), 40 * GIB)
    assert tight.options[0].seconds >= 0.99 * best().options[0].seconds
    assert tight.options[0].memory <= 40 * GIB


def test_where_nothing_fits_the_closest_is_told() -> None:
    none = found(decoder(), Space(8, 64, ways=("full",)), 8 * GIB)
    assert none.options == ()
    assert none.valid > 0
    assert none.least is not None
    assert none.least.memory > 8 * GIB


def test_of_layouts_that_are_as_fast_the_simpler_comes_first() -> None:
    one = found(pictures(), Space(8, 512, micro=64, ways=("none",), sequences=False))
    first = one.options[0].setup.layout
    divided = [
        sum(size > 1 for size in (it.replicate, it.shard, it.tensor, it.pipeline, it.context))
        for it in (option.setup.layout for option in one.options)
        if it is not None
    ]
    assert sum(size > 1 for size in (first.replicate, first.shard)) == 1 == min(divided)


def test_a_layout_that_is_given_keeps_its_stages() -> None:
    given = Parallelism(pipeline=2, replicate=4, layers_per_stage=[18, 22])
    made = Setup(decoder(), cluster(8), given, 1, 64, "bf16", stack=STACK)
    one = search(
        made,
        RATES,
        priced_by(RATES),
        Space(8, 64, given, 1, ("full",)),
        simulated,
        lambda each: footprint(each).total,
        200 * GIB,
    )
    assert one.options[0].setup.layout.layers_per_stage == [18, 22]


def test_no_zero_bubble_pipeline_recomputes_selectively() -> None:
    found = candidates(decoder(), Space(64, 256))
    ways = {WAYS[way] for way, schedule in zip(found["way"], found["schedule"], strict=True) if schedule == 3}
    assert SCHEDULES[3] == "zero-bubble"
    assert ways == {"none", "full"}
