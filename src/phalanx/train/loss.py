"""Compute the loss of a model on a batch: the sum of losses, the number of terms, and a task's metrics.

`LossModule` contains the model and the loss function. It runs in training and evaluation, and is the root of what FSDP
shards, so that the loss may use a weight of the model (that of the output layer) while it is gathered. A task's
`head_loss` takes hidden states and the weight of the output layer (LM head) instead of logits: `bypass_lm_head` lets a
model return these.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.compat import fake_tensor_mode
from phalanx.errors import RecipeError
from phalanx.pytree import map_tensors
from phalanx.train.distributed.context_attention import ContextMethod, choose_context_method
from phalanx.train.distributed.context_parallel import ContextParallel, check_context_parallel, shard_batch
from phalanx.train.hf.inputs import adapt_inputs, compute_positions, find_auxiliary_loss, find_logits, get_logits
from phalanx.train.ops.collectives import Group, group_size
from phalanx.train.ops.linear_cross_entropy import vocab_parallel
from phalanx.train.precision import autocast_context
from phalanx.train.tasks import LanguageModeling, Task, TensorBatch, add_auxiliary_loss
from phalanx.train.tasks.preference import Preference


def find_lm_head(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return the name of the `nn.Linear` that produces the output, or the output's `logits`, of `model(*args,
    **kwargs)`. None if there is none: logits that are scaled, capped, sliced or converted are not the output of the
    layer.

    The model runs once, without gradients and in evaluation mode, so that random numbers and running statistics do not
    change. A model on the meta device runs without data; raises RecipeError if it cannot.
    """
    outputs_by_name: dict[str, list[Any]] = {}

    def record(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        outputs_by_name.setdefault(name, []).append(output)

    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    hooks = [module.register_forward_hook(partial(record, name)) for name, module in layers.items()]
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
    vars(head)["forward"] = lambda x: x
    try:
        yield
    finally:
        if before is None:
            del vars(head)["forward"]
        else:
            vars(head)["forward"] = before


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


LossSums = list[tuple[str, Tensor, Tensor | int]]
"""(name, sum, number of terms) of the loss, then of each metric."""


@dataclass(frozen=True)
class ContextSplit:
    """How sequences are split over a context-parallel group: the attention method, the argument for positions, and
    whether positions restart in each document, as `adapt_inputs` has them on one process."""

    group: Group
    method: ContextMethod
    positions_argument: str
    restarts_positions: bool


def plan_context_split(model: nn.Module, group: Group, length: int) -> ContextSplit:
    """Plan the split of the model's sequences of `length`. Raises RecipeError if its forward takes no positions, or if
    its attention does not support context parallelism."""
    argument = check_context_parallel(model, length)
    heads, kv_heads = count_attention_heads(model)
    is_adapted = any(hook is adapt_inputs for hook in model._forward_pre_hooks.values())
    if is_adapted:
        argument = "positions"  # the hook converts them to the model's own, together with documents
    return ContextSplit(group, choose_context_method(heads, kv_heads, group_size(group)), argument, is_adapted)


def count_attention_heads(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of query heads and of key-value heads; (1, 1) if the model does not say."""
    config = getattr(model, "config", None)
    for owner, names in ((config, ("num_attention_heads", "num_key_value_heads")), (model, ("heads", "kv_heads"))):
        heads = getattr(owner, names[0], None)
        if isinstance(heads, int):
            return heads, getattr(owner, names[1], None) or heads
    return 1, 1


@dataclass(frozen=True)
class LMHead:
    """The output layer `name`, which is bypassed because the task computes the loss from its input (`head_loss`); its
    vocabulary size, and the group over which the vocabulary is sharded."""

    name: str
    head_loss: Callable[[Tensor, Tensor, TensorBatch], tuple[Tensor, Tensor | int]]
    vocab_size: int
    group: Group = None


class LossFn:
    """The loss of a model on a batch, in `precision`. A function of both, so that each pipeline stage can use it with
    its own part of the model."""

    def __init__(self, task: Task, precision: str, device: torch.device):
        self.task = task
        self.precision = precision
        self.device = device
        self.context_split: ContextSplit | None = None
        self.lm_head: LMHead | None = None

    def __call__(self, model: nn.Module, batch: TensorBatch, metrics: bool = False) -> LossSums:
        """Return sums over a micro-batch, or this rank's part of its sequences: the loss and, if asked, metrics."""
        with autocast_context(self.precision, self.device), self._split_sequences(batch) as mine:
            if (roll_out := getattr(self.task, "roll_out", None)) is not None:
                mine = roll_out(model, mine)
            args, kwargs = self.task.inputs(mine)
            if self.context_split is not None:
                kwargs = {**kwargs, self.context_split.positions_argument: mine["positions"]}
            score = getattr(self.task, "metrics", None) if metrics else None
            if self.lm_head is not None and score is None:
                total, num_terms, output = _compute_head_loss(self.lm_head, model, args, kwargs, mine)
            else:
                output = model(*args, **kwargs)
                total, num_terms = self.task.loss(output, mine)
            sums: LossSums = [("loss", total, num_terms)]
            if metrics and (auxiliary_loss := find_auxiliary_loss(output)) is not None:
                sums.append(("aux_loss", auxiliary_loss * num_terms, num_terms))
            if score is not None:
                sums += [(name, value, count) for name, (value, count) in score(output, mine).items()]
        return sums

    @contextlib.contextmanager
    def _split_sequences(self, batch: TensorBatch) -> Iterator[TensorBatch]:
        if self.context_split is None:
            yield batch
            return
        documents = batch.get("documents")
        if documents is not None and self.context_split.restarts_positions:
            batch = {**batch, "positions": compute_positions(documents)}
        mine = shard_batch(batch, self.context_split.group, self.context_split.method)
        with ContextParallel(self.context_split.group, self.context_split.method, documents) as context:
            yield mine
            # If one process can hold the model, a trial checks more (autoconfig/causality_check.py).
            if not context.attention_seen:
                raise RecipeError(
                    "parallelism.context: the model's forward never calls "
                    "torch.nn.functional.scaled_dot_product_attention, so each part of a sequence would be trained "
                    "as a sequence of its own; call it by that name, as F.scaled_dot_product_attention, or use "
                    "parallelism.context=1"
                )


def _compute_head_loss(
    head: LMHead, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch: TensorBatch
) -> tuple[Tensor, Tensor | int, Any]:
    layer = model.get_submodule(head.name)
    with bypass_lm_head(layer):
        output = model(*args, **kwargs)
    hidden = get_logits(output)
    weight = layer.weight  # read now: if sharded, it is gathered only during the forward
    assert isinstance(weight, Tensor)
    with vocab_parallel(head.group, head.vocab_size):
        total, num_terms = head.head_loss(hidden, weight, batch)
    built_in = (LanguageModeling.head_loss, Preference.head_loss)
    if getattr(head.head_loss, "__func__", None) in built_in:  # `loss` of other tasks has the output
        total = add_auxiliary_loss(total, num_terms, output)
    return total, num_terms, output


class LossModule(nn.Module):
    """A model with its loss function: the root module for sharding."""

    def __init__(self, model: nn.Module, loss_fn: LossFn):
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, batch: TensorBatch, metrics: bool = False) -> LossSums:
        """Return sums over a micro-batch: the loss and, if asked, the task's metrics."""
        return self.loss_fn(self.model, batch, metrics)
