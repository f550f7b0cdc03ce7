"""Memory of a device by part: closed forms, what must never grow, a real step on this machine, and measured runs."""

import statistics
from dataclasses import fields, replace
from functools import cache, partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt_profile import gpt, profile_text_model
from memory_rows import VALIDATION, Compared, memory_rows
from peak_memory import PeakMemoryMode
from phalanx.cluster import load_cluster
from phalanx.formatting import BYTES_PER_GIB
from phalanx.models import moe, transformer
from phalanx.models.convnets import resnet
from phalanx.planner.device_costs import stack_by_name
from phalanx.planner.memory import (
    MemoryEstimate,
    TrainingOptions,
    _schedule_of_rank,
    combine_changes,
    estimate_memory,
    estimate_memory_by_rank,
    find_sufficient_changes,
    suggest_memory_changes,
)
from phalanx.planner.model_profile import ModelProfile
from phalanx.planner.scenario import Scenario, SoftwareStack
from phalanx.planner.trace.trace_model import (
    build_on_meta,
    image_classification_forward,
    profile_model,
)
from phalanx.recipe.schema import Parallelism
from phalanx.train.distributed.activation_checkpoint import apply_activation_checkpointing

SIZES = {"layers": 8, "hidden_size": 512, "num_heads": 8}
PARTS = [field.name for field in fields(MemoryEstimate) if field.name != "rank"]


@cache
def llama(dtype: torch.dtype = torch.bfloat16, tie: bool = False) -> ModelProfile:
    """A decoder of eight layers."""
    return profile_text_model(transformer, 32000, 1024, dtype, **SIZES, tie_embeddings=tie)


@cache
def mixture() -> ModelProfile:
    """The same with eight experts a layer."""
    return profile_text_model(moe, 32000, 1024, **SIZES, num_experts=8, top_k=2)


def setup(layout: Parallelism | None = None, of: ModelProfile | None = None, **values: object) -> Scenario:
    """A run of the small decoder; `values` as in Setup."""
    given = {
        "micro_size": 4,
        "global_batch": 1024,
        "zero_level": 3 if layout is not None and layout.shard > 1 else 0,
        **values,
    }
    return Scenario(of or llama(), load_cluster("h100:8"), layout or Parallelism(), **given)  # type: ignore[arg-type]


# --- what must hold ---------------------------------------------------------------------------------------------------


def test_parts_add_up() -> None:
    found = estimate_memory(setup(Parallelism(shard=4, tensor=2)))
    assert found.total == pytest.approx(sum(getattr(found, name) for name in PARTS))
    assert 0 < found.allocated < found.reserved < found.total
    low, high = found.interval()
    assert low < found.total < high


def test_a_cpu_has_the_checkpoint_in_its_memory_while_it_is_written_and_replicas_share_it_out() -> None:
    cluster = load_cluster("h100:8")
    host = cluster.node.accelerator.model_copy(update={"generation": "cpu"})
    cluster = cluster.model_copy(update={"node": cluster.node.model_copy(update={"accelerator": host})})
    alone = estimate_memory(replace(setup(), cluster=cluster))
    assert alone.comm_buffers == alone.parameters + alone.optimizer_state > 0
    shared = estimate_memory(replace(setup(Parallelism(replicate=4)), cluster=cluster))
    assert shared.comm_buffers == pytest.approx((shared.parameters + shared.optimizer_state) / 4)


@pytest.mark.parametrize("dimension", ["shard", "tensor", "pipeline", "context"])
def test_more_ranks_never_take_more(dimension: str) -> None:
    sizes = [
        estimate_memory(setup(Parallelism(**{dimension: ranks}), micro_size=1)).allocated for ranks in (2, 4, 8, 16)
    ]
    assert sizes == sorted(sizes, reverse=True)


def test_each_level_of_zero_takes_less() -> None:
    states = []
    for zero in range(4):
        layout = Parallelism(shard=8) if zero == 3 else Parallelism(replicate=8)
        states.append(estimate_memory(setup(layout, zero_level=zero, stack=SoftwareStack("megatron"))).persistent_state)
    assert states == sorted(states, reverse=True)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("of", [llama, mixture])
def test_recomputing_more_never_takes_more(of: object, fused: bool) -> None:
    for layout in (Parallelism(), Parallelism(shard=8), Parallelism(pipeline=4), Parallelism(tensor=4)):
        sizes = [
            estimate_memory(
                setup(layout, of(), checkpointing=way, stack=SoftwareStack(fuses_memory_ops=fused))
            ).allocated  # type: ignore[operator]
            for way in ("none", "selective", "full")
        ]
        assert sizes == sorted(sizes, reverse=True), layout


def test_a_larger_micro_batch_takes_more() -> None:
    sizes = [estimate_memory(setup(micro_size=micro)).allocated for micro in (1, 2, 4, 8)]
    assert sizes == sorted(sizes)


def test_weights_outside_of_blocks_are_gathered_in_fp32() -> None:
    outside = 2 * 32000 * 512  # embedding and output layer, which autocast copies
    ours, torchtitan = (
        estimate_memory(setup(Parallelism(shard=8), stack=stack_by_name(name)), TrainingOptions(loss_mode="chunked"))
        for name in ("phalanx", "torch")
    )
    assert ours.temporaries - torchtitan.temporaries >= 2 * outside + 2 * outside / 2


def test_a_chunked_loss_spares_the_logits() -> None:
    run = setup(stack=stack_by_name("torch"))
    whole, fused, chunked = (
        estimate_memory(run, TrainingOptions(loss_mode=loss)) for loss in ("whole", "fused", "chunked")
    )
    logits = 4 * 1024 * 32000
    # Three copies in fp32; then in 16 bits, with their gradient; then the weight's gradient in fp32.
    assert whole.allocated - fused.allocated == pytest.approx(8 * logits, rel=0.05)
    assert chunked.allocated < fused.allocated
    assert estimate_memory(setup()) == estimate_memory(
        setup(), TrainingOptions(loss_mode="fused")
    )  # our own kernel on a GPU


def test_tensor_ranks_that_divide_the_vocabulary_never_have_all_logits() -> None:
    divided = setup(Parallelism(tensor=2))
    assert estimate_memory(divided) == estimate_memory(divided, TrainingOptions(loss_mode="chunked"))


# --- the training state -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "zero", "bytes_each"),
    [
        ("bf16", 0, 18.0),
        ("bf16", 1, 6 + 12 / 8),
        ("fp16", 0, 20.0),
        ("fp16", 1, 4 + 16 / 8),
        ("fp32", 0, 16.0),
        ("bf16", 2, 2 + 16 / 8),
    ],
)
def test_megatron_holds_what_its_documentation_says(precision: str, zero: int, bytes_each: float) -> None:
    found = estimate_memory(
        setup(Parallelism(replicate=8), precision=precision, zero_level=zero, stack=SoftwareStack("megatron"))
    )
    assert found.persistent_state == pytest.approx(bytes_each * llama().num_parameters)


def test_sharded_weights_take_sixteen_bytes_for_each_parameter_over_the_shards() -> None:
    found = estimate_memory(setup(Parallelism(replicate=2, shard=4, context=2)))
    assert found.persistent_state == pytest.approx(16 * llama().num_parameters / 8)


@pytest.mark.parametrize(
    ("keywords", "bytes_each"),
    [
        ({"optimizer": "sgd"}, 4.0),
        ({"state_dtype": "bf16"}, 4.0),
        ({"state_dtype": "int8"}, 2.06),
        ({"offload": True}, 0.0),
        ({"optimizer": "lamb"}, 8.0),
        ({"has_ema": True}, 12.0),
        ({"offload": True, "has_ema": True}, 4.0),
    ],
)
def test_optimizers_differ_in_what_they_keep(keywords: dict[str, object], bytes_each: float) -> None:
    found = estimate_memory(setup(), TrainingOptions(**keywords))  # type: ignore[arg-type]
    assert found.optimizer_state == pytest.approx(bytes_each * llama().num_parameters)


def test_frozen_weights_have_neither_gradient_nor_state() -> None:
    def headed(*sizes: int) -> nn.Module:
        model = transformer(*sizes, **SIZES, tie_embeddings=False).requires_grad_(False)
        model.head.requires_grad_(True)
        return model

    found = estimate_memory(setup(of=profile_text_model(headed, 32000, 1024)))
    assert found.parameters == pytest.approx(4 * llama().num_parameters)
    assert found.gradients == pytest.approx(4 * 512 * 32000, rel=1e-3)


class EightBitLinear(torch.autograd.Function):
    """A product with a frozen int8 weight, which is in 16 bits only while it is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor) -> Tensor:
        ctx.save_for_backward(codes)
        return F.linear(x, codes.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (codes,) = ctx.saved_tensors
        return gradient @ codes.to(gradient.dtype), None


def frozen_decoder(*sizes: int, int8: bool) -> nn.Module:
    """The small decoder with a trained head; the linear layers of its blocks may have int8 weights."""
    model = transformer(*sizes, **SIZES, tie_embeddings=False).requires_grad_(False)
    model.head.requires_grad_(True)
    for layer in (each for each in model.blocks.modules() if isinstance(each, nn.Linear) and int8):
        layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
        layer.forward = partial(lambda layer, x: EightBitLinear.apply(x, layer.weight), layer)
    return model


def test_frozen_int8_weights_take_a_byte_and_have_no_copy_in_16_bits() -> None:
    plain, quantized = (
        setup(of=profile_text_model(partial(frozen_decoder, int8=int8), 32000, 1024)) for int8 in (False, True)
    )
    num_int8 = sum(segment.repeats * segment.weights.int8_count for segment in quantized.profile.segments)
    assert num_int8 == pytest.approx(llama().num_parameters - 2 * 512 * 32000, rel=1e-3)  # but norms
    saved_bytes = estimate_memory(plain).parameters - estimate_memory(quantized).parameters
    assert saved_bytes == pytest.approx(3 * num_int8)
    assert estimate_memory(plain).temporaries - estimate_memory(quantized).temporaries > num_int8
    needed = [replace(it, parallelism=Parallelism(replicate=8)) for it in (plain, quantized)]
    advice = [suggest_memory_changes(it, TrainingOptions(), 0.97 * estimate_memory(it).total) for it in needed]
    assert ["shard" in text for text in advice] == [True, False]  # whole on each worker


def test_a_checkpointed_block_keeps_no_16_bit_copies_of_frozen_weights() -> None:
    profile = profile_text_model(partial(frozen_decoder, int8=False), 32000, 1024)
    (block,) = (segment for segment in profile.segments if segment.is_block)
    kept, dropped = (estimate_memory(setup(of=profile, micro_size=1, checkpointing=it)) for it in ("none", "selective"))
    assert kept.temporaries - dropped.temporaries > 2 * 6 * block.weights.count


def test_a_tied_weight_stands_at_both_ends_of_a_pipeline() -> None:
    first, *_, last = estimate_memory_by_rank(setup(Parallelism(pipeline=4), llama(tie=True)))
    assert last.parameters == pytest.approx(first.parameters, rel=1e-3)


def test_experts_are_divided_over_their_ranks_and_sharded_over_the_rest() -> None:
    weights = mixture()
    of_experts = sum(each.repeats * each.weights.expert for each in weights.segments)
    found = estimate_memory(setup(Parallelism(replicate=8, expert=4), weights, zero_level=0))
    assert found.parameters == pytest.approx(4 * (weights.num_parameters - of_experts * 3 / 4))
    sharded = estimate_memory(setup(Parallelism(shard=8, expert=4), weights))
    assert sharded.parameters == pytest.approx(4 * weights.num_parameters / 8)


def test_fp32_activations_are_twice_as_large() -> None:
    low, high = (estimate_memory(setup(precision=precision)) for precision in ("bf16", "fp32"))
    assert high.activations == pytest.approx(2 * low.activations)


# --- pipelines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "chunks", "micros", "held"),
    [
        ("gpipe", 1, 16, [16, 16, 16, 16]),
        ("1f1b", 1, 16, [4, 3, 2, 1]),
        ("1f1b", 1, 2, [2, 2, 2, 1]),
        ("interleaved", 2, 16, [11, 9, 7, 5]),  # 2 (p - r - 1) + (v - 1) p + 1
        ("interleaved", 2, 4, [8, 8, 7, 5]),
        ("zero-bubble", 1, 16, [4, 4, 4, 4]),
    ],
)
def test_a_rank_holds_as_many_micro_batches_as_its_schedule_starts_ahead(
    schedule: str, chunks: int, micros: int, held: list[int]
) -> None:
    layout = Parallelism(pipeline=4, pipeline_schedule=schedule)  # type: ignore[arg-type]
    run = setup(layout, micro_size=1, global_batch=micros, virtual_stages=chunks)
    most = []
    for rank in range(4):
        in_flight = list(accumulate((kind == "F") - ends for kind, _, ends in _schedule_of_rank(run, rank)))
        most.append(max(in_flight))
    assert most == held


def test_the_first_rank_of_a_pipeline_holds_most_activations() -> None:
    run = setup(Parallelism(pipeline=4), gpt(8, 512, 8), micro_size=1)
    first, second, third, _ = estimate_memory_by_rank(run)
    assert first.activations > second.activations > third.activations
    assert estimate_memory(run) == first


# --- closed forms (Korthikanti et al. 2022, tables 2 and 3; sequence 2048, 8 tensor ranks) ----------------------------

MODELS = {  # width, layers, heads, micro-batch, pipeline ranks, stages of each
    "22B": (6144, 48, 64, 4, 1, 1),
    "175B": (12288, 96, 96, 1, 8, 3),
    "530B": (20480, 105, 128, 1, 35, 3),
    "1T": (25600, 128, 160, 1, 64, 1),
}


@cache
def closed(model: str, recompute: str, sequence_parallel: bool) -> MemoryEstimate:
    """The first pipeline rank's."""
    width, layers, heads, micro, pipeline, stages = MODELS[model]
    using = SoftwareStack("megatron", fuses_memory_ops=False, attention_speed=0.0, sequence_parallel=sequence_parallel)
    layout = Parallelism(tensor=8, pipeline=pipeline)
    of, batch = gpt(layers, width, heads), 4 * micro * pipeline
    run = Scenario(of, load_cluster("a100:8"), layout, micro, batch, "bf16", recompute, 0, stages, using)
    return estimate_memory_by_rank(run)[0]


@pytest.mark.parametrize(
    ("model", "state", "plain", "selective"),
    [
        ("22B", 45.56, 59.25, 9.56),
        ("175B", 45.56, 66.84, 12.35),
        ("530B", 31.64, 114.02, 23.08),
        ("1T", 32.96, 131.25, 26.56),
    ],
)
def test_large_models_take_what_the_closed_forms_say(model: str, state: float, plain: float, selective: float) -> None:
    assert closed(model, "none", False).persistent_state / BYTES_PER_GIB == pytest.approx(state, rel=1e-3)
    assert closed(model, "none", False).activations / BYTES_PER_GIB == pytest.approx(plain, rel=1e-3)
    assert closed(model, "attention", True).activations / BYTES_PER_GIB == pytest.approx(selective, rel=2e-3)


@pytest.mark.parametrize(
    ("model", "shares"),
    [
        ("22B", (66.77, 49.37, 16.14, 7.59)),
        ("175B", (61.96, 56.52, 18.48, 8.70)),
        ("530B", (58.33, 61.90, 20.24, 9.52)),
        ("1T", (58.33, 61.90, 20.24, 9.52)),
    ],
)
def test_what_recomputing_and_sequence_parallelism_leave(model: str, shares: tuple[float, ...]) -> None:
    ways = (("none", True), ("attention", False), ("attention", True), ("full", False))
    plain = closed(model, "none", False).activations
    found = [100 * closed(model, *way).activations / plain for way in ways]
    assert found == pytest.approx(shares, abs=0.02)


# --- a real step, on this machine's CPU -------------------------------------------------------------------------------


def allocated_by(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> int:
    """Bytes of tensors that a forward and backward makes at a time, beside weights and their gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with PeakMemoryMode() as counted:
        scores = model(inputs)
        F.cross_entropy(scores.flatten(0, -2), targets.flatten()).backward()
    most: int = counted.most
    return most


def predicted(of: ModelProfile, micro: int, recompute: str = "none") -> float:
    """The same as `footprint` has it, operation by operation in fp32."""
    run = Scenario(
        of,
        load_cluster("laptop"),
        Parallelism(),
        micro,
        micro,
        "fp32",
        recompute,
        0,
        stack=SoftwareStack(fuses_memory_ops=False),
    )
    found = estimate_memory(run)
    return found.activations + found.temporaries


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", [transformer, moe])
def test_a_real_step_of_a_decoder_takes_what_is_predicted(kind: type, recompute: str) -> None:
    sizes = {"layers": 3, "hidden_size": 128, "num_heads": 4}
    model, tokens = kind(256, 128, **sizes), torch.randint(0, 256, (8, 128))
    if recompute != "none":
        apply_activation_checkpointing(model, [f"blocks.{layer}" for layer in range(3)], recompute)
    of = profile_text_model(kind, 256, 128, torch.float32, **sizes)
    # Checkpointed blocks hold more than is counted: here 4 of 34 times what enters one.
    assert predicted(of, 8, recompute) == pytest.approx(allocated_by(model, tokens, tokens), rel=0.15)


def test_a_real_step_of_a_convolutional_network_takes_what_is_predicted() -> None:
    of = profile_model(
        build_on_meta(lambda: resnet(base_channels=16), torch.float32), image_classification_forward(3, 32, 32), 1
    )
    real = allocated_by(resnet(base_channels=16), torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,)))
    assert predicted(of, 8) == pytest.approx(real, rel=0.1)


# --- measured runs ----------------------------------------------------------------------------------------------------


@cache
def measured() -> list[Compared]:
    return memory_rows()


@pytest.mark.skipif(not VALIDATION.exists(), reason="shared/validation is not part of a user's checkout")
@pytest.mark.parametrize(
    ("source", "median"),
    [
        ("SimuMax", 0.01),
        ("Megatron-LM tests, 7B", 0.06),
        ("Megatron-LM tests, tiny", 0.06),
        ("ml-engineering", 0.08),
        ("BigScience", 0.06),
        ("torchtitan benchmarks", 0.08),
    ],
)
def test_measured_runs_take_what_is_predicted(source: str, median: float) -> None:
    errors = [abs(row.error) for row in measured() if row.source.startswith(source)]
    assert statistics.median(errors) <= median


@pytest.mark.skipif(not VALIDATION.exists(), reason="shared/validation is not part of a user's checkout")
def test_nineteen_of_twenty_measured_runs_are_where_they_are_said_to_be() -> None:
    assert statistics.mean(row.inside for row in measured()) >= 0.95


# --- what would fit ---------------------------------------------------------------------------------------------------


def test_every_change_that_is_offered_makes_the_run_fit() -> None:
    run = setup(Parallelism(replicate=8), micro_size=8)
    room = 0.9 * estimate_memory(run).total
    changes = find_sufficient_changes(run, TrainingOptions(), room)
    assert all(change.memory.total <= room for change in changes)
    names = [change.overrides.split("=")[0] for change in changes]
    assert {"batch.micro_size", "memory.activation_checkpointing"} <= set(names)
    description = suggest_memory_changes(run, TrainingOptions(), room)
    assert all(change.overrides in description for change in changes)


def test_changes_are_as_mild_as_they_can_be() -> None:
    run = setup(micro_size=8)
    smaller = estimate_memory(replace(run, micro_size=4)).total
    changes = find_sufficient_changes(run, TrainingOptions(), smaller)
    assert [each.overrides for each in changes if "micro" in each.overrides] == ["batch.micro_size=4"]


def test_what_no_single_change_can_do_is_offered_together() -> None:
    run, room = setup(micro_size=8, global_batch=8), 1.9 * BYTES_PER_GIB
    assert not find_sufficient_changes(run, TrainingOptions(), room)
    change = combine_changes(run, TrainingOptions(), room)
    assert change.memory.total <= room
    assert f"together would fit: {change.overrides}" in suggest_memory_changes(run, TrainingOptions(), room)


def test_more_devices_are_offered_where_they_would_do() -> None:
    run = setup(Parallelism(shard=2), micro_size=1, global_batch=64)
    room = estimate_memory(setup(Parallelism(shard=8), micro_size=1, global_batch=64)).total
    changes = find_sufficient_changes(run, TrainingOptions(), room)
    assert any(change.overrides.startswith("8 devices with parallelism.shard=8") for change in changes)
