"""The constants of software stacks: how many there are, and that each is known."""

from dataclasses import fields, replace

import pytest

from phalanx.cluster import load_cluster
from phalanx.planner.device_costs import (
    PHALANX_STACK,
    UNKNOWN_GENERATION,
    device_costs,
    device_costs_for_stack,
    gemm_seconds,
    generation_of,
    load_stack_data,
    phalanx_stack,
    stack_by_name,
    sustained_share,
)
from phalanx.planner.scenario import SoftwareStack

H100 = load_cluster("h100:8").node.accelerator


def test_every_key_of_a_stack_is_one_that_predictions_read() -> None:
    names = {each.name for each in fields(SoftwareStack)} | {"match", "generation", "since", "like"}
    for values in load_stack_data()["stacks"].values():
        assert set(values) <= names


def test_every_key_of_a_generation_is_known() -> None:
    for values in load_stack_data()["generations"].values():
        assert set(values) == {"products", "flash"}


@pytest.mark.parametrize("name", list(load_stack_data()["stacks"]))
def test_every_stack_is_found_by_its_name_and_has_plausible_values(name: str) -> None:
    found = stack_by_name(name)
    assert found.name == name
    assert 0.5 < found.compute_factor < 2
    assert 0 <= found.max_tp_overlap < 1
    assert 0 <= found.launch_s < 1e-4


def test_a_stack_that_does_not_exist_is_named() -> None:
    with pytest.raises(KeyError, match="caffe"):
        stack_by_name("caffe")


def test_a_stack_has_what_the_one_it_is_like_has_but_for_what_it_says() -> None:
    graphs, plain = stack_by_name("megatron-graphs"), stack_by_name("megatron")
    assert graphs.comm_factor == plain.comm_factor
    assert (graphs.launch_s, graphs.routing_sync_s) == (0, 0)


def test_a_generation_nobody_measured_is_typical() -> None:
    odd = H100.model_copy(update={"generation": "quantum"})
    assert generation_of(odd) == generation_of(H100.model_copy(update={"generation": UNKNOWN_GENERATION}))
    assert generation_of(odd) != generation_of(H100)


def test_a_step_on_a_cpu_is_its_operations() -> None:
    cpu = phalanx_stack(H100.model_copy(update={"generation": "cpu"}), 2)
    assert (cpu.launch_s, cpu.step_overhead_s) == (0, 0)
    assert replace(phalanx_stack(H100, 2), launch_s=0.0, step_overhead_s=0.0) == cpu


def test_training_keeps_up_less_than_single_products_reach() -> None:
    plain, used = device_costs(H100, "bf16"), device_costs_for_stack(H100, "bf16", stack_by_name(PHALANX_STACK))
    assert used.matmul_curve.efficiency == pytest.approx(
        plain.matmul_curve.efficiency * generation_of(H100)["products"] * sustained_share(H100)
    )
    assert used.peak_flops == plain.peak_flops


def test_a_lower_power_limit_lowers_what_is_kept_up() -> None:
    limited = H100.model_copy(update={"power_w": 500.0})
    assert sustained_share(limited) < sustained_share(H100) < 1
    assert sustained_share(H100.model_copy(update={"power_w": 3000.0})) == 1
    assert sustained_share(H100.model_copy(update={"power_w": None})) == pytest.approx(sustained_share(H100), abs=0.01)
    assert sustained_share(H100.model_copy(update={"generation": "new"})) == 1


def test_products_of_odd_rows_take_longer() -> None:
    device = device_costs(H100, "bf16")
    seconds = [gemm_seconds(device, 1, 8192, 8192, 8192, 2, row_elements=row) for row in (1800, 1824, 1856, 0)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[2] == seconds[3]
    cpu = device_costs(H100.model_copy(update={"generation": "cpu"}), "bf16")
    assert gemm_seconds(cpu, 1, 8, 8, 8, 2, row_elements=1) == gemm_seconds(cpu, 1, 8, 8, 8, 2)


def test_a_stack_without_fused_attention_stores_scores() -> None:
    assert device_costs_for_stack(H100, "bf16", stack_by_name("megatron-2021")).attention_efficiency is None


def test_attention_is_never_faster_than_the_peak() -> None:
    flash = device_costs_for_stack(H100, "bf16", SoftwareStack(attention_speed=100.0)).attention_efficiency
    assert flash == (1.0, 1.0)
