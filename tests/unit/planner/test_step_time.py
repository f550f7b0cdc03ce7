"""Seconds of a step: parts that add up, and what more bandwidth, more ranks and other layouts must do to them."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from gpt_profile import gpt, profile_text_model
from phalanx.cluster import Cluster, load_cluster
from phalanx.models import moe, transformer
from phalanx.planner.device_costs import DeviceCosts, attention_seconds, device_costs, gemm_seconds
from phalanx.planner.model_profile import Affine, AttentionOp, Gemm, ModelProfile
from phalanx.planner.pipeline import balance_stages, split_into_stages
from phalanx.planner.scenario import TRANSPORT_BY_COMPRESSION, GradientTransport, Scenario, SoftwareStack, transport_of
from phalanx.planner.segment_costs import (
    CollectiveKind,
    ShardSpec,
    collective_seconds,
    group_links,
    op_cost_from,
    segment_work,
)
from phalanx.planner.step_time import StepBreakdown, predict_step_time
from phalanx.recipe import Recipe
from phalanx.recipe.schema import Parallelism

SEQUENCE = 2048


@cache
def decoder() -> ModelProfile:
    """Of 1.7 B parameters, in 16 blocks."""
    sizes = {"layers": 16, "hidden_size": 2048, "num_heads": 16, "tie_embeddings": False, "qk_norm": False}
    return profile_text_model(transformer, 32000, SEQUENCE, **sizes)


@cache
def mixture() -> ModelProfile:
    """Eight experts a block."""
    sizes = {"layers": 8, "hidden_size": 1024, "num_heads": 8, "num_experts": 8, "top_k": 2}
    return profile_text_model(moe, 32000, SEQUENCE, **sizes)


@cache
def named(name: str) -> Cluster:
    return load_cluster(name)


H100 = device_costs(load_cluster("h100:8").node.accelerator, "bf16")


def setup(
    layout: Parallelism | None = None, cluster: str = "h100:64", of: ModelProfile | None = None, **given: object
) -> Scenario:
    values = {"micro_size": 1, "global_batch": 64, "stack": SoftwareStack(), **given}
    return Scenario(of or decoder(), named(cluster), layout or Parallelism(), **values)  # type: ignore[arg-type]


def parts(layout: Parallelism | None = None, using: DeviceCosts = H100, **given: object) -> StepBreakdown:
    return predict_step_time(setup(layout, **given), using)  # type: ignore[arg-type]


LAYOUTS = {
    "one device": Parallelism(),
    "replicas": Parallelism(replicate=64),
    "shards": Parallelism(shard=64),
    "tensor": Parallelism(tensor=8, replicate=8),
    "pipeline": Parallelism(pipeline=4, replicate=16),
    "context": Parallelism(context=4, shard=16),
    "all": Parallelism(replicate=2, shard=4, tensor=2, pipeline=2, context=2),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def zero(layout: Parallelism) -> int:
    return 3 if layout.shard * layout.context > 1 else 0


@layouts
def test_the_parts_of_a_step_sum_to_it_and_none_is_negative(layout: Parallelism) -> None:
    found = parts(layout, zero_level=zero(layout))
    assert found.total == pytest.approx(sum(vars(found).values()))
    assert min(vars(found).values()) >= -1e-9
    assert found.gemm > 0
    assert (found.pipeline_bubble > 1e-6) == (layout.pipeline > 1)


def faster(cluster: Cluster, up: float, out: float) -> Cluster:
    """The cluster with networks that much faster."""
    node = cluster.node
    assert node.scale_up is not None
    assert node.scale_out is not None
    better = {
        "scale_up": node.scale_up.model_copy(update={"gbps": node.scale_up.gbps * up}),
        "scale_out": node.scale_out.model_copy(update={"gbps": node.scale_out.gbps * out}),
    }
    return cluster.model_copy(update={"node": node.model_copy(update=better)})


@layouts
@pytest.mark.parametrize(("up", "out"), [(2.0, 1.0), (1.0, 2.0)])
def test_faster_links_are_never_slower(layout: Parallelism, up: float, out: float) -> None:
    given = setup(layout, zero_level=zero(layout))
    better = predict_step_time(replace(given, cluster=faster(given.cluster, up, out)), H100)
    assert better.total <= predict_step_time(given, H100).total + 1e-9


SLOW = faster(named("h100:64"), 1, 0.05)
SLOW_REPLICAS = replace(setup(Parallelism(replicate=64), zero_level=0), cluster=SLOW)


def grad_sync(transport: GradientTransport, given: Scenario = SLOW_REPLICAS) -> float:
    """Seconds that replicas on a slow network wait for gradients."""
    return predict_step_time(replace(given, transport=transport), H100).grad_sync


def test_a_slow_network_shows_gradients_and_a_fast_one_hides_them() -> None:
    fast = replace(SLOW_REPLICAS, cluster=faster(SLOW, 1, 200.0))
    assert grad_sync(GradientTransport()) > 10 * grad_sync(GradientTransport(), fast)


def test_fewer_bytes_on_the_wire_show_less_between_replicas_and_nothing_elsewhere() -> None:
    int8 = TRANSPORT_BY_COMPRESSION["int8"]
    assert grad_sync(int8) <= 0.3 * grad_sync(GradientTransport())
    sharded = replace(setup(Parallelism(shard=64), zero_level=3), cluster=SLOW)
    assert predict_step_time(replace(sharded, transport=int8), H100) == predict_step_time(sharded, H100)


def sent(**values: Any) -> Recipe:
    """A recipe of which only what is sent counts."""
    return Recipe.model_validate({"determinism": "off", **values})


def test_powersgd_sends_what_the_shapes_of_a_model_make_of_its_rank() -> None:
    layers, width = 2, 64
    model = gpt(layers, width, 4, sequence=32)
    matrices = [(width, width)] * 4 + [(width, 4 * width)] * 2
    saved = layers * sum(n * k - 4 * (n + k) for n, k in matrices) + (64 * 8 - 4 * (64 + 8))
    wire = transport_of(sent(grad_sync={"compression": "powersgd"}), model)
    assert wire.wire_ratio == pytest.approx(1 - saved / model.num_parameters)
    assert transport_of(sent(grad_sync={"compression": "powersgd", "powersgd_rank": 64}), model).wire_ratio == 1
    assert transport_of(sent(grad_sync={"compression": "powersgd"})).wire_ratio == 1


def test_workers_that_train_apart_wait_for_what_they_send_but_send_it_seldom() -> None:
    every_step = transport_of(sent(local_sgd={"method": "average", "sync_every": 1}))
    usual = grad_sync(GradientTransport())
    assert grad_sync(every_step) > usual
    assert grad_sync(replace(every_step, wire_ratio=every_step.wire_ratio / 100)) < usual / 10


def test_workers_that_go_on_meanwhile_wait_for_less() -> None:
    waiting, delayed = (grad_sync(transport_of(sent(local_sgd={"sync_delay": delay}))) for delay in (0, 5))
    assert delayed < waiting


@pytest.mark.parametrize(
    ("values", "share", "memory"),
    [
        ({"method": "average"}, 1 / 25, 8.0),
        ({"method": "diloco", "sync_every": 50}, 1 / 50, 12.0),
        ({"outer_optimizer": {"momentum": 0.0}, "sync_dtype": "bf16"}, 1 / 50, 8.0 + 5.0),
        (
            {"method": "average", "sync_every": 100, "sync_dtype": "int8"},
            TRANSPORT_BY_COMPRESSION["int8"].wire_ratio / 100,
            8.0 + TRANSPORT_BY_COMPRESSION["int8"].extra_bytes_per_element,
        ),
    ],
)
def test_a_round_is_shared_among_its_steps(values: dict[str, Any], share: float, memory: float) -> None:
    wire = transport_of(sent(local_sgd=values))
    assert (wire.wire_ratio, wire.extra_bytes_per_element) == (pytest.approx(share), memory)


def test_whole_recomputation_is_about_one_more_forward_of_the_blocks_and_some_is_less() -> None:
    none, some, full = (parts(checkpointing=way) for way in ("none", "selective", "full"))
    assert none.recomputation == 0 < some.recomputation < full.recomputation
    assert none.total < some.total < full.total
    assert full.recomputation == pytest.approx((none.gemm + none.attention + none.memory_bound) / 3, rel=0.2)


def test_sharded_weights_wait_for_a_slow_network() -> None:
    layout = Parallelism(shard=64)
    slow, fast = (
        predict_step_time(replace(setup(layout, zero_level=3), cluster=faster(named("h100:64"), 1, out)), H100)
        for out in (0.1, 10.0)
    )
    assert slow.fsdp_exposed > 0.5 * slow.gemm
    assert fast.fsdp_exposed < 0.5 * fast.gemm  # weights outside of blocks travel in fp32


def test_tensor_ranks_divide_products_not_quite_evenly_and_sum() -> None:
    one, eight = parts(), parts(Parallelism(tensor=8))
    assert one.gemm / 8 < eight.gemm < one.gemm / 3
    assert one.tp_all_reduce == 0 < eight.tp_all_reduce


def test_sums_that_hide_behind_products_cost_less() -> None:
    shown, hidden = (
        parts(Parallelism(tensor=8), stack=SoftwareStack(max_tp_overlap=share)).tp_all_reduce for share in (0.0, 0.5)
    )
    assert hidden == pytest.approx(0.5 * shown)


def test_context_ranks_show_each_other_keys_and_values_where_attention_does_not_hide_them() -> None:
    given = setup(Parallelism(context=16), cluster="h100:64", zero_level=3)
    assert predict_step_time(replace(given, cluster=faster(given.cluster, 1, 0.01)), H100).cp_all_gather_kv > 0
    assert parts(Parallelism()).cp_all_gather_kv == 0


def test_experts_elsewhere_cost_the_journey() -> None:
    here = parts(Parallelism(shard=8), of=mixture(), zero_level=3)
    away = parts(Parallelism(shard=8, expert=8), of=mixture(), zero_level=3)
    assert here.ep_all_to_all == 0
    assert away.ep_all_to_all > 0


def test_zero_divides_the_optimizers_work() -> None:
    assert parts(Parallelism(replicate=8), zero_level=1).optimizer == pytest.approx(
        parts(Parallelism(replicate=8), zero_level=0).optimizer / 8
    )


@pytest.mark.parametrize("stack", [SoftwareStack(launches_per_expert_gemm=1000.0), SoftwareStack(routing_sync_s=1e-2)])
def test_a_host_that_sends_tokens_to_experts_one_by_one_holds_up_the_rest(stack: SoftwareStack) -> None:
    layout = Parallelism(shard=8, expert=8)
    quick, slow = (
        parts(layout, of=mixture(), zero_level=3, stack=each) for each in (SoftwareStack(launch_s=0.0), stack)
    )
    assert quick.kernel_launch == 0 < slow.kernel_launch
    assert parts(stack=replace(stack, launch_s=0.0)).kernel_launch == 0  # no experts
    assert parts(stack=SoftwareStack(launch_s=1e-3)).kernel_launch > 0


def test_fewer_experts_on_a_rank_are_fewer_launches() -> None:
    looping = SoftwareStack(launches_per_expert_gemm=1000.0)
    many = parts(Parallelism(shard=8), of=mixture(), zero_level=3, stack=looping)
    few = parts(Parallelism(shard=8, expert=8), of=mixture(), zero_level=3, stack=looping)
    assert few.kernel_launch < many.kernel_launch / 4


# --- stages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 7, 32, 126])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 16])
def test_blocks_are_spread_evenly_and_the_ends_have_no_more(blocks: int, stages: int) -> None:
    found = balance_stages(blocks, stages)
    assert sum(found) == blocks
    assert len(found) == stages
    assert max(found) - min(found) <= 1
    assert max(found[0], found[-1]) <= max(found[1:-1], default=blocks)


def test_every_block_is_in_one_stage_and_what_stands_around_at_the_ends() -> None:
    found = split_into_stages(setup(Parallelism(pipeline=4)))
    assert [sum(count for each, count in one.segments if each.is_block) for one in found] == [4, 4, 4, 4]
    assert [sum(not each.is_block for each, _ in one.segments) for one in found] == [1, 0, 0, 1]


def test_stages_that_are_given_are_kept() -> None:
    found = split_into_stages(setup(Parallelism(pipeline=2, layers_per_stage=[3, 13])))
    assert [sum(count for each, count in one.segments if each.is_block) for one in found] == [3, 13]


# --- links ------------------------------------------------------------------------------------------------------------


def test_a_group_within_a_node_uses_its_fast_network() -> None:
    found = group_links(named("h100:64"), 8)
    assert (found.ranks, found.nodes) == (8, 1)
    assert found.bus_bandwidth == found.intra_node_bandwidth == pytest.approx(0.80 * 450e9)


def test_a_group_across_nodes_uses_all_network_cards_of_its_nodes() -> None:
    found = group_links(named("h100:64"), 64)
    assert found.nodes == 8
    assert found.inter_node_bandwidth == pytest.approx(0.85 * 50e9)
    assert found.bus_bandwidth == pytest.approx(min(found.intra_node_bandwidth, 8 * found.inter_node_bandwidth))
    assert found.latency_s > group_links(named("h100:64"), 8).latency_s


def test_a_stride_leaves_fewer_ranks_of_a_group_in_a_node() -> None:
    whole, half, one = (group_links(named("h100:64"), 8, stride) for stride in (1, 2, 8))
    assert [each.nodes for each in (whole, half, one)] == [1, 2, 8]
    assert whole.bus_bandwidth > half.bus_bandwidth > one.bus_bandwidth == one.inter_node_bandwidth


def test_a_scale_up_domain_may_be_more_than_a_node() -> None:
    assert named("gb200:72").node.count == 4
    found = group_links(named("gb200:144"), 72)
    assert found.nodes == 1
    assert group_links(named("gb200:144"), 144).nodes == 2


def test_oversubscription_divides_what_leaves_a_leaf() -> None:
    cluster = named("h100:64")
    full = cluster.topology.model_copy(update={"oversubscription": 4.0, "nodes_a_leaf": 2})
    crowded = cluster.model_copy(update={"topology": full})
    assert group_links(crowded, 64).inter_node_bandwidth == pytest.approx(
        group_links(cluster, 64).inter_node_bandwidth / 4
    )
    assert (
        group_links(crowded, 16).inter_node_bandwidth == group_links(cluster, 16).inter_node_bandwidth
    )  # below one leaf


@pytest.mark.parametrize(("kind", "steps"), [("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)])
def test_large_buffers_take_the_rings_share_of_the_bus(kind: CollectiveKind, steps: int) -> None:
    for ranks in (2, 4, 8):
        over = group_links(named("h100:64"), ranks)
        size = 1e12
        assert collective_seconds(kind, size, over) == pytest.approx(
            steps * size * (ranks - 1) / ranks / over.bus_bandwidth, rel=0.01
        )


def test_copies_for_experts_of_one_node_travel_once_between_nodes() -> None:
    over = group_links(named("h100:64"), 64)
    one, eight = (float(collective_seconds("all_to_all", 1e9, over, 1.0, copies)) for copies in (1, 8))
    assert eight < one


# --- one device -------------------------------------------------------------------------------------------------------


def test_a_large_product_reaches_the_curves_share_of_the_peak_and_no_more() -> None:
    reached = 2 * 16384.0**3 / gemm_seconds(H100, 1, 16384, 16384, 16384, 2)
    assert (
        0.9 * H100.matmul_curve.efficiency * H100.peak_flops < reached < H100.matmul_curve.efficiency * H100.peak_flops
    )


def test_eight_bits_are_faster_for_weights_and_not_for_activations() -> None:
    eight = device_costs(named("h100:8").node.accelerator, "fp8")
    size = (1, 16384, 16384, 16384, 2)
    assert gemm_seconds(eight, *size) < 0.7 * gemm_seconds(H100, *size)
    assert gemm_seconds(eight, *size, has_weight=False) > gemm_seconds(eight, *size)


def op(phase: str, queries: int = 4096, causal: bool = True) -> AttentionOp:
    return AttentionOp(phase, Affine(0, 1), 16, 4, queries, queries, 128, causal, 2)  # type: ignore[arg-type]


def test_attention_takes_longer_backward_and_where_scores_are_stored() -> None:
    forward, backward = (attention_seconds(H100, op(phase), 1, 16) for phase in ("forward", "backward"))
    assert backward > 2.5 * forward
    assert attention_seconds(replace(H100, attention_efficiency=None), op("forward"), 1, 16) > forward


@pytest.mark.parametrize("precision", ["fp8", "fp4", "int4"])
def test_a_precision_that_the_device_does_not_have_is_named(precision: str) -> None:
    with pytest.raises(KeyError, match=precision):
        device_costs(named("a100:8").node.accelerator, precision)


def test_a_device_without_bf16_computes_in_fp16_instead() -> None:
    device = named("a100:8").node.accelerator.model_copy(update={"tflops": {"fp16": 125.0}, "curves": {}})
    assert device_costs(device, "bf16").peak_flops == 125e12


# --- a segment's work ---------------------------------------------------------------------------------------------


def test_fused_operations_are_fewer_launches_and_less_time() -> None:
    segment = decoder().segments[1]
    eager, fused = (
        segment_work(segment, "forward", ShardSpec(1, fuses_memory_ops=each), op_cost_from(H100))
        for each in (False, True)
    )
    assert fused.num_launches < eager.num_launches
    assert fused.compute.memory_bound < eager.compute.memory_bound
    assert fused.compute.gemm == eager.compute.gemm


def test_rows_of_experts_meet_where_their_expert_is() -> None:
    price = op_cost_from(H100)
    expert = next(one for one in mixture().segments[1].ops if isinstance(one, Gemm) and one.is_expert)
    here, away = (price(expert, ShardSpec(1, expert=ranks)).gemm for ranks in (1, 8))
    flops = 2 * expert.count.fixed * expert.m.evaluate(1) * expert.n.fixed * expert.k.fixed
    assert away <= here  # as many rows in fewer, taller products
    assert away > flops / H100.peak_flops
