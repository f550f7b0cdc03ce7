"""Software stacks and generations of hardware: the constants that are fitted, read from data/stacks.yaml. They belong
to (hardware, software stack), never to a model or a run; docs/explanation/planner.md lists them all, and a test counts
them.
"""

from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

from ruamel.yaml import YAML

from phalanx.cluster.spec import AcceleratorSpec
from phalanx.planner.device_costs import DeviceCosts, device_costs
from phalanx.planner.scenario import SoftwareStack

PHALANX_STACK = "phalanx"
UNKNOWN_GENERATION = "other"
"""Generation of hardware about which nothing is known."""


@dataclass(frozen=True)
class AcceleratorGeneration:
    """What a generation of accelerators keeps up in training."""

    gemm_efficiency: float
    attention_efficiency: tuple[float, float] | None


@cache
def load_stack_data() -> dict[str, Any]:
    """The file: generations, precisions, stacks."""
    text = (files("phalanx.planner") / "data/stacks.yaml").read_text("utf-8")
    found: dict[str, Any] = YAML(typ="safe").load(text)
    return found


def generation_of(device: AcceleratorSpec) -> AcceleratorGeneration:
    """The generation of an accelerator; typical values where its own is not known."""
    kinds = load_stack_data()["generations"]
    values = kinds.get(device.generation) or kinds[UNKNOWN_GENERATION]
    return AcceleratorGeneration(values["products"], tuple(values["flash"]) if values["flash"] else None)


def stack_by_name(name: str) -> SoftwareStack:
    """The stack of that name. KeyError: there is none."""
    values = load_stack_data()["stacks"][name]
    values = {**load_stack_data()["stacks"].get(values.get("like"), {}), **values}
    names = {each.name for each in fields(SoftwareStack)}
    return SoftwareStack(name=name, **{key: value for key, value in values.items() if key in names})


def phalanx_stack(device: AcceleratorSpec, devices: int) -> SoftwareStack:
    """Phalanx itself. On one device as it was measured on this generation of accelerators; else, and on several, where
    it was not measured, with what is usual for torch: what shares power, memory and time with communication computes
    more slowly than the same device alone.

    A CPU runs its operations itself: their launches are part of them (`kernel_us`, which `phalanx calibrate` measures),
    and nothing else was found in a step: whole steps of 14 ms take as long as a plain loop's
    (docs/benchmarks/loop_overhead.md).
    """
    name = f"{PHALANX_STACK}-{device.generation}" if devices == 1 else PHALANX_STACK
    stack = replace(stack_by_name(name if name in load_stack_data()["stacks"] else PHALANX_STACK), name=PHALANX_STACK)
    return replace(stack, launch_s=0.0, step_overhead_s=0.0) if device.generation == "cpu" else stack


def device_costs_for_stack(accelerator: AcceleratorSpec, precision: str, stack_used: SoftwareStack) -> DeviceCosts:
    """What an accelerator does under a stack. KeyError naming the precision when it has no such arithmetic."""
    plain, generation_costs = device_costs(accelerator, precision), generation_of(accelerator)
    gemm_efficiency = generation_costs.gemm_efficiency * load_stack_data()["precisions"].get(precision, 1.0)
    curve = plain.matmul_curve.model_copy(update={"efficiency": plain.matmul_curve.efficiency * gemm_efficiency})
    flash = None
    if generation_costs.attention_efficiency is not None and stack_used.attention_speed:
        flash = (
            min(1.0, generation_costs.attention_efficiency[0] * stack_used.attention_speed),
            min(1.0, generation_costs.attention_efficiency[1] * stack_used.attention_speed),
        )
    return replace(
        plain, matmul_curve=curve, attention_efficiency=flash, bandwidth=plain.bandwidth * stack_used.memory_op_speed
    )
