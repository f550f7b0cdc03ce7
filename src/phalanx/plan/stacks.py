"""Software stacks and generations of hardware: the constants that are fitted, read from data/stacks.yaml. They belong
to (hardware, software stack), never to a model or a run; docs/explanation/planner.md lists them all, and a test counts
them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

from ruamel.yaml import YAML

from phalanx.cluster.description import Accelerator
from phalanx.plan.rates import Rates, rates
from phalanx.plan.setup import Stack

OURS = "phalanx"
OTHER = "other"
"""Generation of hardware about which nothing is known."""


@dataclass(frozen=True)
class Generation:
    """What a generation of accelerators keeps up in training."""

    products: float
    flash: tuple[float, float] | None


@cache
def known() -> dict[str, Any]:
    """The file: generations, precisions, stacks."""
    text = (files("phalanx.plan") / "data/stacks.yaml").read_text("utf-8")
    found: dict[str, Any] = YAML(typ="safe").load(text)
    return found


def generation(device: Accelerator) -> Generation:
    """Of an accelerator; what is typical where its own is not known."""
    kinds = known()["generations"]
    values = kinds.get(device.generation) or kinds[OTHER]
    return Generation(values["products"], tuple(values["flash"]) if values["flash"] else None)


def stack(name: str) -> Stack:
    """The stack of that name. KeyError: there is none."""
    values = known()["stacks"][name]
    values = {**known()["stacks"].get(values.get("like"), {}), **values}
    names = {each.name for each in fields(Stack)}
    return Stack(name=name, **{key: value for key, value in values.items() if key in names})


def own_stack(device: Accelerator, devices: int) -> Stack:
    """Phalanx itself. On one device as it was measured on this generation of accelerators; else, and on several, where
    it was not measured, with what is usual for torch: what shares power, memory and time with communication computes
    more slowly than the same device alone."""
    name = f"{OURS}-{device.generation}" if devices == 1 else OURS
    return replace(stack(name if name in known()["stacks"] else OURS), name=OURS)


def rates_of(device: Accelerator, precision: str, using: Stack) -> Rates:
    """What an accelerator does under a stack. KeyError naming the precision when it has no such arithmetic."""
    plain, of = rates(device, precision), generation(device)
    kept = of.products * known()["precisions"].get(precision, 1.0)
    curve = plain.curve.model_copy(update={"efficiency": plain.curve.efficiency * kept})
    flash = None
    if of.flash is not None and using.flash:
        flash = (min(1.0, of.flash[0] * using.flash), min(1.0, of.flash[1] * using.flash))
    return replace(plain, curve=curve, flash=flash, bandwidth=plain.bandwidth * using.memory)


def constants() -> Mapping[str, float]:
    """Every number of data/stacks.yaml, by its path."""
    found: dict[str, float] = {}

    def walk(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, below in value.items():
                walk(f"{path}.{key}" if path else key, below)
        elif isinstance(value, list):
            for index, below in enumerate(value):
                walk(f"{path}.{index}", below)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[path] = value

    walk("", known())
    return found
