"""Which parameters of a model are matrices of layers: what optimizers and adapters choose from.

They are the weights of linear layers, and stacks of matrices: fused experts, which mixtures of experts (transformers
from version 5, `phalanx.models:moe`) hold as one parameter [experts, ., .].
"""

from torch import nn

from phalanx.train.ops.blocks import find_blocks


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer: nn.Linear and transformers' Conv1D are."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is transformers' Conv1D, a linear layer with a weight [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def find_expert_stacks(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the fused experts of a model, by name: parameters of 3 dimensions of modules that are named after experts
    or are divided by expert parallelism."""
    return {
        f"{name}.{key}": parameter
        for name, module in model.named_modules()
        if getattr(module, "expert_parallel", False) or "expert" in f"{name}.{type(module).__name__}".lower()
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3 and not is_torch_layer(module)
    }


def is_torch_layer(module: nn.Module) -> bool:
    """Return whether a module is one of torch's own, such as a convolution."""
    return type(module).__module__.startswith("torch.nn.")


def find_router_names(model: nn.Module) -> set[str]:
    """Return the names of linear layers that choose experts: those named after routers, and those next to experts with
    an output for each of them."""
    experts = {name.rpartition(".")[0]: len(stack) for name, stack in find_expert_stacks(model).items()}
    experts |= {
        name: len(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and "expert" in name.rpartition(".")[2].lower()
    }
    counts = {name.rpartition(".")[0]: count for name, count in experts.items()}
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and (
            "router" in f"{name}.{type(module).__name__}".lower()
            or module.out_features == counts.get(name.rpartition(".")[0])
        )
    }


def names_in_blocks(model: nn.Module, names: list[str]) -> list[str]:
    """Return those names that are inside the model's blocks."""
    blocks = tuple(f"{name}." for name in find_blocks(model))
    return [name for name in names if name.startswith(blocks)]
