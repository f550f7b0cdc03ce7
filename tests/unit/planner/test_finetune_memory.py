"""Memory of fine-tuning from sizes alone: counts and bytes that are known, and what each choice saves."""

from dataclasses import replace

import pytest

from phalanx.formatting import BYTES_PER_GIB
from phalanx.planner.finetune_memory import (
    ALL_LINEAR,
    BaseDtype,
    DecoderSizes,
    FineTuning,
    FineTuningStack,
    estimate_finetune_memory,
    find_longest_sequence,
    with_preference_pairs,
)

LLAMA_2_7B = DecoderSizes(32, 4096, 32, 32, 128, 11008, 32000)
LLAMA_2_70B = DecoderSizes(80, 8192, 64, 8, 128, 28672, 32000)
QLORA = FineTuning(LLAMA_2_7B, seq_len=2048, base_dtype="nf4-double", adapter_rank=16)


def allocated_gib(run: FineTuning) -> float:
    return estimate_finetune_memory(run).allocated / BYTES_PER_GIB


def test_parameters_are_those_of_the_models() -> None:
    norms = 65 * 4096, 161 * 8192
    assert LLAMA_2_7B.num_parameters + norms[0] == 6_738_415_616
    assert LLAMA_2_70B.num_parameters + norms[1] == 68_976_648_192


@pytest.mark.parametrize(
    ("rank", "targets", "trained"), [(8, frozenset("qv"), 4_194_304), (16, ALL_LINEAR, 39_976_960)]
)
def test_adapters_have_as_many_weights_as_peft_prints(rank: int, targets: frozenset[str], trained: int) -> None:
    assert replace(QLORA, adapter_rank=rank, adapter_targets=targets).num_trained == trained


@pytest.mark.parametrize(("dtype", "gib"), [("bf16", 128.48), ("int8", 68.71), ("nf4", 36.84), ("nf4-double", 33.86)])
def test_a_frozen_70b_model_takes_the_bytes_of_its_format(dtype: BaseDtype, gib: float) -> None:
    run = FineTuning(LLAMA_2_70B, 1, base_dtype=dtype, adapter_rank=1, trained_bytes=0, stack=FineTuningStack())
    assert estimate_finetune_memory(run).parameters / BYTES_PER_GIB == pytest.approx(gib, abs=0.01)


def test_all_weights_in_16_bits_with_foreach_adamw_peak_at_ten_bytes_each() -> None:
    # weights, gradients, two moments, and a copy of one
    stack = FineTuningStack(copies_moments=True)
    run = FineTuning(LLAMA_2_7B, 128, trained_bytes=2.0, bytes_per_moment=2.0, stack=stack)
    assert estimate_finetune_memory(run).allocated == pytest.approx(10 * LLAMA_2_7B.num_parameters)


def test_adapters_on_fewer_layers_keep_fewer_inputs() -> None:
    everywhere = replace(QLORA, checkpointing="none")
    assert allocated_gib(replace(everywhere, adapter_targets=frozenset("qv"))) < 0.85 * allocated_gib(everywhere)


def test_an_online_reference_costs_a_model_unless_adapters_can_be_disabled() -> None:
    full = FineTuning(LLAMA_2_7B, 2048)
    difference = allocated_gib(with_preference_pairs(full, "online")) - allocated_gib(
        with_preference_pairs(full, "cached")
    )
    assert difference * BYTES_PER_GIB == pytest.approx(2 * 32 * LLAMA_2_7B.block_weights + 4 * LLAMA_2_7B.outer_weights)
    assert with_preference_pairs(QLORA, "online") == with_preference_pairs(QLORA, "cached")


def test_a_pair_takes_the_activations_of_two_samples() -> None:
    assert allocated_gib(with_preference_pairs(QLORA, "cached")) == allocated_gib(replace(QLORA, micro_size=2))


def test_the_longest_sequence_fits_and_the_next_does_not() -> None:
    longest = find_longest_sequence(QLORA, 24e9)
    totals = [estimate_finetune_memory(replace(QLORA, seq_len=length)).total for length in (longest, longest + 256)]
    assert longest > 0
    assert totals[0] <= 24e9 < totals[1]


def test_nothing_fits_where_the_base_does_not() -> None:
    assert find_longest_sequence(replace(QLORA, sizes=LLAMA_2_70B), 24e9) == 0
