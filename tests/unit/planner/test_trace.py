"""Models followed without memory: what a profile of them says, from 405 B parameters to a plain Sequential."""

import json
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from phalanx.autoconfig.model_profile import PROFILE_ADAPTER
from phalanx.models import moe, resnet, transformer
from phalanx.planner.model_profile import (
    Affine,
    AttentionOp,
    ExpertAllToAll,
    Gemm,
    MemoryOp,
    ModelProfile,
    ModelSegment,
    SavedActivations,
    TensorAllReduce,
)
from phalanx.planner.trace.trace_model import (
    build_on_meta,
    image_classification_forward,
    language_modeling_forward,
    profile_autocast,
    profile_model,
)

VOCAB, SEQUENCE, WIDTH, FFN, LAYERS = 1000, 64, 128, 256, 4
EXPERTS, TOP_K, EXPERT_FFN, WIDE = 8, 2, 192, 256


def of(model: nn.Module, vocab: int = VOCAB, sequence: int = SEQUENCE) -> ModelProfile:
    """The profile of a language model."""
    return profile_model(model, language_modeling_forward(vocab, sequence), sequence)


def decoder(**given: object) -> nn.Module:
    """A small decoder of four blocks."""
    sizes = {
        "layers": LAYERS,
        "hidden_size": WIDTH,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_hidden_size": FFN,
        "qk_norm": False,
        **given,
    }
    return build_on_meta(lambda: transformer(VOCAB, SEQUENCE, **sizes))  # type: ignore[arg-type]


@cache
def small() -> ModelProfile:
    return of(decoder())


@cache
def untied() -> ModelProfile:
    return of(decoder(tie_embeddings=False))


@cache
def large() -> ModelProfile:
    """Llama 3.1's largest."""
    sizes = {
        "layers": 126,
        "hidden_size": 16384,
        "num_heads": 128,
        "num_kv_heads": 8,
        "ffn_hidden_size": 53248,
        "tie_embeddings": False,
        "qk_norm": False,
    }
    return of(build_on_meta(lambda: transformer(128256, 8192, **sizes)), 128256, 8192)  # type: ignore[arg-type]


@cache
def mixture() -> ModelProfile:
    """Three blocks with experts after one without."""
    sizes = {
        "layers": 4,
        "hidden_size": WIDE,
        "num_heads": 4,
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "expert_hidden_size": EXPERT_FFN,
    }
    return of(build_on_meta(lambda: moe(VOCAB, SEQUENCE, dense_layers=1, **sizes)))  # type: ignore[arg-type]


def block(found: ModelProfile) -> ModelSegment:
    """Its first repeated block."""
    return next(each for each in found.segments if each.is_block)


def products(found: ModelSegment, phase: str = "forward") -> list[Gemm]:
    return [op for op in found.ops if isinstance(op, Gemm) and op.phase == phase]


def attention(found: ModelSegment, phase: str) -> AttentionOp:
    (one,) = [op for op in found.ops if isinstance(op, AttentionOp) and op.phase == phase]
    return one


# --- counts -----------------------------------------------------------------------------------------------------------


def test_a_model_of_405_billion_parameters_has_as_many_as_its_paper_says() -> None:
    assert large().num_parameters == pytest.approx(405.85e9, rel=1e-4)


def test_its_operations_are_6_for_each_parameter_and_token_and_those_of_causal_attention() -> None:
    attention_flops = 126 * 3.5 * 0.5 * 4 * 128 * 128 * 8192
    assert large().flops() / 8192 == pytest.approx(6 * 405.85e9 + attention_flops, rel=0.02)


def test_backward_computes_twice_what_forward_does_and_attention_once_more_in_part() -> None:
    forward, backward = (small().flops(phase) for phase in ("forward", "backward"))  # type: ignore[arg-type]
    of_attention = LAYERS * attention(block(small()), "forward").flops_per_sample
    assert backward == pytest.approx(2 * forward + 0.5 * of_attention)


class Blocks(nn.Module):
    """Six blocks of one shape: in a row, with something between them, or several times over."""

    def __init__(self, way: str):
        super().__init__()
        self.way = way
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, FFN), nn.GELU(), nn.Linear(FFN, WIDTH)) for _ in range(6)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(3 if self.way == "thrice" else 1):
            for block in self.blocks:
                x = x + block(x) if self.way == "residual" else block(x)
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("way", "times"), [("row", 6), ("residual", 6), ("thrice", 18)])
def test_weights_of_blocks_count_once_each_whatever_stands_between_them(way: str, times: int, frozen: bool) -> None:
    def make() -> nn.Module:
        model = Blocks(way)
        model.blocks.requires_grad_(not frozen)
        return model

    found = of(build_on_meta(make))
    assert found.num_parameters == sum(p.numel() for p in make().parameters())
    assert sum(it.repeats * it.weights.frozen_count for it in found.segments) == sum(
        p.numel() for p in make().parameters() if not p.requires_grad
    )
    assert found.num_blocks == times


def test_tied_weights_count_once_and_are_told() -> None:
    assert small().num_parameters == untied().num_parameters - VOCAB * WIDTH
    assert small().tied_elements == VOCAB * WIDTH
    assert untied().tied_elements == 0


def test_frozen_weights_are_counted_and_have_no_gradients() -> None:
    model = decoder(tie_embeddings=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("query" not in name)
    found = block(of(model))
    assert found.weights.frozen_count == WIDTH * WIDTH
    assert found.weights.count == block(untied()).weights.count
    assert len(products(found, "backward")) == len(products(block(untied()), "backward")) - 1


def test_a_model_of_which_only_blocks_are_trained_in_part_is_followed() -> None:
    model = decoder(tie_embeddings=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("query" in name)
    found = of(model)
    first, others = (each for each in found.segments if each.is_block)
    assert (first.repeats, others.repeats) == (1, LAYERS - 1)
    assert found.num_parameters == untied().num_parameters
    assert len(products(first, "backward")) < len(products(others, "backward"))  # nothing wants what enters the first
    assert others.input_bytes.per_sample == SEQUENCE * WIDTH * 2


def test_a_model_that_is_frozen_as_a_whole_has_no_backward() -> None:
    found = of(decoder().requires_grad_(False))
    assert found.flops("backward") == 0
    assert found.flops("forward") == small().flops("forward")


# --- segments ---------------------------------------------------------------------------------------------------------


def test_blocks_that_are_alike_are_one_segment_between_what_stands_around_them() -> None:
    assert [(each.is_block, each.repeats) for each in large().segments] == [(False, 1), (True, 126), (False, 1)]
    assert large().num_blocks == 126


def test_a_repeated_block_is_followed_once_for_each_size() -> None:
    followed = 0

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            nonlocal followed
            followed += 1
            return torch.relu(self.map(x))

    made = build_on_meta(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(8, 8), *(Counting() for _ in range(20)), nn.Linear(8, 3))
    )
    assert profile_model(made, image_classification_forward(2, 2, 2), 1).num_blocks == 20
    assert followed == 2


def test_a_block_like_no_other_stands_with_what_comes_before_the_blocks() -> None:
    assert [(each.is_block, each.repeats, each.num_experts) for each in mixture().segments] == [
        (False, 1, 0),
        (True, 3, EXPERTS),
        (False, 1, 0),
    ]


def test_a_plain_sequential_of_the_users_own_is_followed() -> None:
    made = build_on_meta(lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10)))
    found = profile_model(made, image_classification_forward(3, 8, 8), 1)
    assert found.num_parameters == 192 * 64 + 64 + 64 * 10 + 10
    assert found.flops("forward") == 2 * (192 * 64 + 64 * 10)
    assert found.units_per_sample == 1


def test_what_follows_a_model_leaves_it_as_it_was() -> None:
    model = decoder()
    of(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_whose_operations_depend_on_the_samples_is_refused() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(1)
            for _ in range(len(x)):
                x = torch.relu(self.map(x))
            return x

    with pytest.raises(ValueError, match="number of operations depends on the number of samples"):
        profile_model(build_on_meta(Loop), image_classification_forward(3, 2, 2), 1)


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_activations_grow_with_the_samples_and_weights_do_not() -> None:
    first = products(block(small()))[0]
    assert (first.m, first.n.per_sample, first.k.per_sample) == (Affine(0, SEQUENCE), 0, 0)
    weight_gradient = next(op for op in products(block(small()), "backward") if op.k.per_sample)
    assert weight_gradient.k == Affine(0, SEQUENCE)
    assert weight_gradient.m.per_sample == weight_gradient.n.per_sample == 0


def test_sizes_that_follow_from_two_micro_batches_hold_for_one_of_eight() -> None:
    model = decoder()
    with FlopCounterMode(display=False) as counted:
        model(torch.zeros(8, SEQUENCE, dtype=torch.int64, device="meta"))
    ours = 8 * sum(
        segment.repeats * op_flops
        for segment in small().segments
        for op in products(segment)
        if (op_flops := 2.0 * op.count.evaluate(1) * op.m.evaluate(1) * op.n.evaluate(1) * op.k.evaluate(1))
    )
    whole = 8 * LAYERS * 2 * attention(block(small()), "forward").flops_per_sample  # torch does not halve for causality
    assert counted.get_total_flops() == pytest.approx(ours + whole, rel=0.01)


# --- attention --------------------------------------------------------------------------------------------------------


def test_attention_is_caught_in_both_phases() -> None:
    for phase in ("forward", "backward"):
        found = attention(block(large()), phase)
        assert (found.num_heads, found.num_kv_heads, found.head_dim) == (128, 8, 128)
        assert (found.num_queries, found.num_keys, found.causal, found.tp_sharded) == (8192, 8192, True, True)
        assert found.samples == Affine(0, 1)


def test_dropout_keeps_a_byte_for_each_element() -> None:
    made = build_on_meta(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 10)))
    plain = build_on_meta(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Dropout(0.0), nn.Linear(64, 10)))
    kept = [
        profile_model(each, image_classification_forward(1, 8, 8), 1).segments[0].saved.bytes_on_rank(1, 1, False)
        for each in (made, plain)
    ]
    assert kept[0] - kept[1] == 64


# --- tensor parallelism -----------------------------------------------------------------------------------------------


def test_products_are_divided_by_columns_until_one_is_divided_by_rows() -> None:
    assert [op.tp_dim for op in products(block(small()))] == ["n", "n", "n", "k", "n", "n", "k"]


def test_a_product_divided_by_rows_is_followed_by_a_sum_over_ranks() -> None:
    operations = [op for op in block(small()).ops_of("forward") if isinstance(op, Gemm | TensorAllReduce)]
    after = [operations[at + 1] for at, op in enumerate(operations) if isinstance(op, Gemm) and op.tp_dim == "k"]
    assert [type(each) for each in after] == [TensorAllReduce, TensorAllReduce]
    assert sum(isinstance(op, TensorAllReduce) for op in operations) == 2


def test_backward_sums_once_for_each_sum_of_forward() -> None:
    sums = [op for op in block(small()).ops_of("backward") if isinstance(op, TensorAllReduce)]
    assert len(sums) == 2
    assert all(op.num_bytes == Affine(0, SEQUENCE * WIDTH * 2) for op in sums)


def test_norms_are_copied_and_matrices_divided() -> None:
    weights = block(small()).weights
    assert weights.replicated == 2 * WIDTH
    assert weights.tp_sharded == WIDTH * (2 * WIDTH + 2 * WIDTH // 2 + 3 * FFN)
    assert weights.largest_weight == WIDTH * FFN


def test_a_router_is_not_divided() -> None:
    found = block(mixture())
    router = next(op for op in products(found) if op.n.fixed == EXPERTS and not op.is_expert)
    assert router.tp_dim == ""


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_a_fused_llama_block_keeps_16_times_what_enters_it() -> None:
    # q, k, v, result and sums of attention, 2 x 3.25 of the feed-forward, what enters either half, and their norms
    kept = block(large()).saved_when_fused.bytes_on_rank(1, 1, False)
    assert kept / (8192 * 16384 * 2) == pytest.approx(15.9, abs=0.1)


def test_what_enters_a_block_is_all_that_full_recomputation_keeps() -> None:
    assert block(large()).input_bytes == Affine(0, 8192 * 16384 * 2)


def test_fusing_and_recomputing_keep_less() -> None:
    found = block(large())
    eager, fused, selective = (
        getattr(found, name).bytes_on_rank(1, 1, False)
        for name in ("saved", "saved_when_fused", "saved_when_selective")
    )
    assert found.input_bytes.evaluate(1) < selective < fused < eager


def test_tensor_ranks_divide_what_is_kept_and_sequence_parallelism_the_rest() -> None:
    kept = SavedActivations(tp_sharded=Affine(0, 80), replicated=Affine(0, 40))
    assert kept.bytes_on_rank(2, 4, False) == 2 * (20 + 40)
    assert kept.bytes_on_rank(2, 4, True) == 2 * (20 + 10)


@pytest.mark.parametrize("make", [small, mixture, large])
def test_fused_operations_never_move_more_than_single_ones(make: object) -> None:
    moves = [op for segment in make().segments for op in segment.ops if isinstance(op, MemoryOp)]  # type: ignore[operator]
    assert all(
        op.fused_bytes.evaluate(samples) <= op.unfused_bytes.evaluate(samples)
        for op in moves
        for samples in (0.25, 1, 64)
    )
    assert sum(op.fused_bytes.evaluate(1) for op in moves) < 0.7 * sum(op.unfused_bytes.evaluate(1) for op in moves)


# --- experts ----------------------------------------------------------------------------------------------------------


def test_the_products_of_all_experts_are_one_for_each_shape_with_the_rows_of_all() -> None:
    gate, up, down = [op for op in products(block(mixture())) if op.is_expert]
    assert gate == up
    assert (gate.count, gate.n, gate.k) == (Affine(EXPERTS), Affine(EXPERT_FFN), Affine(WIDE))
    assert (down.count, down.n, down.k) == (Affine(EXPERTS), Affine(WIDE), Affine(EXPERT_FFN))
    for op in (gate, down):
        assert op.is_grouped
        assert EXPERTS * op.m.evaluate(1) == pytest.approx(TOP_K * SEQUENCE, rel=0.05)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_tokens_travel_to_their_experts_and_back_in_either_phase(phase: str) -> None:
    operations = list(block(mixture()).ops_of(phase))  # type: ignore[arg-type]
    at = [index for index, op in enumerate(operations) if isinstance(op, ExpertAllToAll)]
    experts = [index for index, op in enumerate(operations) if isinstance(op, Gemm) and op.is_expert]
    assert len(at) == 2
    assert at[0] < min(experts)
    assert max(experts) < at[1]
    journey = operations[at[0]]
    assert isinstance(journey, ExpertAllToAll)
    assert journey.copies_per_token == pytest.approx(TOP_K, rel=0.05)
    assert journey.num_bytes.evaluate(1) == pytest.approx(TOP_K * SEQUENCE * WIDE * 2, rel=0.05)


def test_attention_is_no_expert_however_few_experts_there_are() -> None:
    sizes = {"layers": 2, "hidden_size": WIDE, "num_heads": 4, "num_experts": 2, "top_k": 1, "expert_hidden_size": WIDE}
    few = block(of(build_on_meta(lambda: moe(VOCAB, SEQUENCE, **sizes))))
    assert len([op for op in products(few) if op.is_expert]) == 3
    assert sum(op.count.fixed for op in products(few) if not op.is_expert) == 5  # q, k, v, the way out, the router


def test_weights_of_experts_are_told_apart() -> None:
    assert block(mixture()).weights.expert == EXPERTS * 3 * WIDE * EXPERT_FFN
    assert mixture().segments[0].weights.expert == 0


# --- convolutions -----------------------------------------------------------------------------------------------------


def test_convolutions_are_products_with_the_operations_that_torch_counts() -> None:
    found = profile_model(build_on_meta(lambda: resnet(10, 3)), image_classification_forward(3, 32, 32), 1)
    torch.manual_seed(0)
    model = resnet(10, 3)
    with FlopCounterMode(display=False) as counted:
        model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert found.flops() == pytest.approx(counted.get_total_flops() / 2, rel=0.01)
    assert found.num_parameters == sum(each.numel() for each in model.parameters())


# --- precision --------------------------------------------------------------------------------------------------------


def test_mixed_precision_multiplies_in_16_bits_and_normalises_in_32() -> None:
    def make() -> nn.Module:
        return transformer(VOCAB, SEQUENCE, layers=2, hidden_size=WIDTH, num_heads=4)

    found = profile_autocast(make, language_modeling_forward(VOCAB, SEQUENCE), SEQUENCE)
    assert {op.element_bytes for segment in found.segments for op in products(segment)} == {2}
    assert {op.element_bytes for op in block(found).ops if isinstance(op, MemoryOp) and op.name == "pow"} == {4}
    assert attention(block(found), "forward").element_bytes == 2
    half = of(build_on_meta(make))
    assert (found.num_parameters, found.flops()) == (half.num_parameters, half.flops())


# --- as JSON ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [small, mixture, large])
def test_a_profile_is_the_same_after_a_journey_through_json(make: object) -> None:
    found = make()  # type: ignore[operator]
    assert (
        PROFILE_ADAPTER.validate_python(json.loads(json.dumps(PROFILE_ADAPTER.dump_python(found, mode="json"))))
        == found
    )
