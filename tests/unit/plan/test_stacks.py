"""The constants of software stacks: how many there are, and that each is known."""

from dataclasses import fields

import pytest

from phalanx.cluster import load_cluster
from phalanx.plan.rates import rates
from phalanx.plan.setup import Stack
from phalanx.plan.stacks import OTHER, OURS, constants, generation, known, rates_of, stack

H100 = load_cluster("h100:8").node.accelerator


def test_there_are_few_constants() -> None:
    assert 0 < len(constants()) < 70
    assert set(known()) == {"generations", "precisions", "stacks"}


def test_every_key_of_a_stack_is_one_that_predictions_read() -> None:
    names = {each.name for each in fields(Stack)} | {"match", "generation", "since", "like"}
    for values in known()["stacks"].values():
        assert set(values) <= names


def test_every_key_of_a_generation_is_known() -> None:
    for values in known()["generations"].values():
        assert set(values) == {"products", "flash"}


def test_constants_are_told_by_their_path() -> None:
    assert constants()["stacks.torch.computing"] == stack("torch").computing
    assert constants()["generations.hopper.flash.0"] == generation(H100).flash[0]  # type: ignore[index]
    assert "stacks.megatron-2021.sequence_parallel" not in constants()  # a fact, no number


@pytest.mark.parametrize("name", list(known()["stacks"]))
def test_every_stack_is_found_by_its_name_and_has_plausible_values(name: str) -> None:
    found = stack(name)
    assert found.name == name
    assert 0.5 < found.computing < 2
    assert 0 <= found.tensor_hidden < 1
    assert 0 <= found.launch < 1e-4


def test_a_stack_that_does_not_exist_is_named() -> None:
    with pytest.raises(KeyError, match="caffe"):
        stack("caffe")


def test_a_stack_has_what_the_one_it_is_like_has_but_for_what_it_says() -> None:
    graphs, plain = stack("megatron-graphs"), stack("megatron")
    assert graphs.communicating == plain.communicating
    assert (graphs.launch, graphs.routing) == (0, 0)


def test_a_generation_nobody_measured_is_typical() -> None:
    odd = H100.model_copy(update={"generation": "quantum"})
    assert generation(odd) == generation(H100.model_copy(update={"generation": OTHER}))
    assert generation(odd) != generation(H100)


def test_training_keeps_up_less_than_single_products_reach() -> None:
    plain, used = rates(H100, "bf16"), rates_of(H100, "bf16", stack(OURS))
    assert used.curve.efficiency == pytest.approx(plain.curve.efficiency * generation(H100).products)
    assert used.peak == plain.peak


def test_a_stack_without_fused_attention_stores_scores() -> None:
    assert rates_of(H100, "bf16", stack("megatron-2021")).flash is None


def test_attention_is_never_faster_than_the_peak() -> None:
    flash = rates_of(H100, "bf16", Stack(flash=100.0)).flash
    assert flash == (1.0, 1.0)


def test_a_precision_that_is_missing_is_named() -> None:
    with pytest.raises(KeyError, match="fp4"):
        rates_of(H100, "fp4", stack(OURS))
