"""Find a model's output layer (LM head), and bypass it, so that the loss can be computed from its input.

A task's `head_loss` takes hidden states and the output layer's weight instead of logits. The model keeps its parameters
and names. Nothing here computes a loss.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.compat import fake_tensor_mode
from phalanx.errors import RecipeError
from phalanx.pytree import map_tensors
from phalanx.train.hf.inputs import find_logits


def find_lm_head(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return the name of the `nn.Linear` that produces the output, or the output's `logits`, of `model(*args,
    **kwargs)`. None if there is none: logits that are scaled, capped, sliced or converted are not the output of the
    layer.

    The model runs once, without gradients and in evaluation mode, so that random numbers and running statistics do not
    change. A model on the meta device runs without data; raises RecipeError if it cannot.
    """
    outputs_by_name: dict[str, list[Any]] = {}

    def make_hook(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            outputs_by_name.setdefault(name, []).append(output)

        return hook

    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    hooks = [module.register_forward_hook(make_hook(name)) for name, module in layers.items()]
    try:
        with torch.no_grad(), eval_mode(model):
            logits = find_logits(_run_model(model, args, kwargs))
    finally:
        for hook in hooks:
            hook.remove()
    # A layer that is called several times is not only the head: bypassing it would change other results.
    heads = [name for name, outputs in outputs_by_name.items() if len(outputs) == 1 and outputs[0] is logits]
    return heads[0] if heads and logits is not None else None


def _run_model(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if not any(parameter.is_meta for parameter in model.parameters()):
        return model(*args, **kwargs)

    def to_fake(x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device="cpu")

    with fake_tensor_mode():
        tensors = {name: to_fake(x) for name, x in [*model.named_parameters(), *model.named_buffers()]}
        try:
            return torch.func.functional_call(model, tensors, map_tensors(args, to_fake), map_tensors(kwargs, to_fake))
        except Exception as error:
            raise RecipeError(
                f"parallelism: {type(model).__name__} cannot run without data, so its output layer cannot be found "
                f"before it is divided ({type(error).__name__}); use parallelism.tensor=1 and memory.chunked_loss=false"
            ) from error


@contextlib.contextmanager
def bypass_lm_head(head: nn.Module) -> Iterator[None]:
    """Return a context in which `head` returns its input: its model returns hidden states instead of logits. Hooks on
    the head still run, so that a sharded one is gathered."""
    # Replace `forward` on the instance; a hook would run after the matmul that is to be avoided.
    before = vars(head).get("forward")
    vars(head)["forward"] = _identity
    try:
        yield
    finally:
        if before is None:
            del vars(head)["forward"]
        else:
            vars(head)["forward"] = before


def _identity(x: Tensor) -> Tensor:
    return x


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Return a context with the model in evaluation mode; afterwards each module is back in its previous mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
