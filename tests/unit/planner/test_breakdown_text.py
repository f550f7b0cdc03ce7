"""The parts of a step as text: they sum to the step."""

import re
from functools import cache

import pytest

from phalanx.cluster import load_cluster
from phalanx.models import transformer
from phalanx.planner.device_costs import device_costs
from phalanx.planner.model_profile import ModelProfile
from phalanx.planner.scenario import Scenario
from phalanx.planner.step_time import BREAKDOWN_LABELS, StepBreakdown, format_breakdown, predict_step_time
from phalanx.planner.trace.trace_model import build_on_meta, language_modeling_forward, profile_model
from phalanx.recipe.schema import Parallelism

CLUSTER = load_cluster("h100:64")
RATES = device_costs(CLUSTER.node.accelerator, "bf16")


@cache
def decoder() -> ModelProfile:
    sizes = {"layers": 16, "hidden_size": 2048, "num_heads": 16, "tie_embeddings": False, "qk_norm": False}
    return profile_model(
        build_on_meta(lambda: transformer(32000, 1024, **sizes)),  # type: ignore[arg-type]
        language_modeling_forward(32000, 1024),
        1024,
    )


def setup(layout: Parallelism, batch: int = 256, zero: int = 0, chunks: int = 1) -> Scenario:
    return Scenario(decoder(), CLUSTER, layout, 1, batch, zero_level=zero, virtual_stages=chunks)


SETUPS = {
    "one device": setup(Parallelism(), batch=8),
    "replicas": setup(Parallelism(replicate=64)),
    "shards": setup(Parallelism(shard=64), zero=3),
    "many micro-batches": setup(Parallelism(replicate=2), batch=400),
    "pipeline": setup(Parallelism(pipeline=4, replicate=16)),
    "gpipe": setup(Parallelism(pipeline=4, replicate=16, pipeline_schedule="gpipe")),
    "zero bubble": setup(Parallelism(pipeline=4, replicate=16, pipeline_schedule="zero-bubble")),
    "interleaved": setup(Parallelism(pipeline=4, replicate=16), chunks=2),
}
setups = pytest.mark.parametrize("given", SETUPS.values(), ids=SETUPS)


@setups
def test_a_breakdown_sums_to_the_whole(given: Scenario) -> None:
    lines = format_breakdown(predict_step_time(given, RATES)).splitlines()
    shares = [float(found[1]) for line in lines if (found := re.search(r"([0-9.]+)%", line))]
    assert shares[-1] == 100.0
    assert sum(shares[:-1]) == pytest.approx(100.0, abs=0.5)


def test_a_breakdown_leaves_out_what_takes_nothing() -> None:
    text = format_breakdown(StepBreakdown(gemm=3.0, optimizer=1.0), width=20)
    assert len(text.splitlines()) == 3
    assert "75.0%  " + "#" * 15 in text


def test_every_part_has_words() -> None:
    assert set(BREAKDOWN_LABELS) == set(vars(StepBreakdown()))
