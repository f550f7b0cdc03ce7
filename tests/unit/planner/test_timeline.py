"""A step laid out in time: it ends when the step does, and every view of it tells all of it."""

import json
import re
from functools import cache
from itertools import pairwise

import pytest

from phalanx.cluster import load_cluster
from phalanx.models import transformer
from phalanx.planner.device_costs import device_costs
from phalanx.planner.model_profile import ModelProfile
from phalanx.planner.scenario import Scenario
from phalanx.planner.step_time import StepBreakdown, predict_step_time
from phalanx.planner.timeline import (
    BREAKDOWN_LABELS,
    COMM_STREAM,
    COMPUTE_STREAM,
    MAX_SHOWN_MICRO_BATCHES,
    TimelineEvent,
    build_timeline,
    chrome_trace,
    draw_timeline,
    format_breakdown,
)
from phalanx.planner.trace import build_on_meta, language_modeling_forward, profile_model
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
def test_events_end_when_the_step_does(given: Scenario) -> None:
    events = build_timeline(given, RATES)
    assert max(event.end_s for event in events) == pytest.approx(predict_step_time(given, RATES).total, rel=0.01)
    assert min(event.start_s for event in events) == 0
    assert all(event.start_s <= event.end_s for event in events)


@setups
def test_a_rank_computes_one_thing_at_a_time(given: Scenario) -> None:
    events = [event for event in build_timeline(given, RATES) if event.stream == COMPUTE_STREAM]
    for rank in range(given.parallelism.pipeline):
        mine = sorted((event.start_s, event.end_s) for event in events if event.rank == rank)
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(mine))


def test_each_rank_of_a_pipeline_computes_each_micro_batch() -> None:
    events = build_timeline(SETUPS["pipeline"], RATES)
    for rank in range(4):
        names = [event.name for event in events if event.rank == rank]
        for micro in range(16):
            assert names.count(f"forward, micro-batch {micro}") == 1
            assert names.count(f"backward, micro-batch {micro}") == 1


def test_zero_bubble_tells_gradients_of_weights_apart() -> None:
    names = {event.name.split(",")[0] for event in build_timeline(SETUPS["zero bubble"], RATES)}
    assert {"forward", "backward", "gradients of weights"} <= names


def test_many_micro_batches_are_drawn_as_one() -> None:
    names = [event.name for event in build_timeline(SETUPS["many micro-batches"], RATES)]
    assert f"{200 - MAX_SHOWN_MICRO_BATCHES} further micro-batches" in names


def test_sharded_weights_travel_on_a_stream_of_their_own() -> None:
    travelling = [event for event in build_timeline(SETUPS["shards"], RATES) if event.stream == COMM_STREAM]
    assert any(event.name.startswith("weights of blocks.0") for event in travelling)


@setups
def test_a_chrome_trace_has_an_event_for_each(given: Scenario) -> None:
    events = build_timeline(given, RATES)
    traced = json.loads(chrome_trace(events))["traceEvents"]
    whole = [each for each in traced if each["ph"] == "X"]
    assert len(whole) == len(events)
    assert {each["pid"] for each in whole} == set(range(given.parallelism.pipeline))
    last = max(each["ts"] + each["dur"] for each in whole)
    assert last == pytest.approx(predict_step_time(given, RATES).total * 1e6, rel=0.01)
    assert {each["name"] for each in traced if each["ph"] == "M"} == {"process_name", "thread_name"}


@setups
@pytest.mark.parametrize("width", [40, 96])
def test_a_drawing_has_a_line_for_each_rank_and_stream_of_the_given_width(given: Scenario, width: int) -> None:
    events = build_timeline(given, RATES)
    lines = draw_timeline(events, width).splitlines()
    assert len(lines) == len({(event.rank, event.stream) for event in events}) + 1
    assert {len(line) for line in lines} == {len("  rank 0  communicating  ") + width}


def test_a_drawing_shows_what_is_done_when() -> None:
    events = [
        TimelineEvent(0, COMPUTE_STREAM, "forward, micro-batch 0", 0.0, 0.25),
        TimelineEvent(0, COMPUTE_STREAM, "exposed FSDP communication", 0.25, 0.5),
        TimelineEvent(0, COMPUTE_STREAM, "backward, micro-batch 0", 0.5, 0.75),
        TimelineEvent(0, COMPUTE_STREAM, "optimizer", 0.75, 1.0),
        TimelineEvent(0, COMM_STREAM, "weights", 0.0, 0.5),
    ]
    first, second, axis = draw_timeline(events, 8).splitlines()
    assert first.endswith("FF~~BBoo")
    assert second.endswith("====....")
    assert axis.endswith("1.000 s")


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
