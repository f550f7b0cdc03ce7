"""What is computed of a model and a batch: the sum of its losses and the number of terms, and a task's metrics.

`Objective` holds both model and scoring: it is what runs in a step and in an evaluation, and the root of what FSDP
shards, so that the loss may use a weight of the model (the output layer's) while it is gathered.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import RecipeError
from phalanx.train.head import bypassed
from phalanx.train.huggingface_calls import adapt, logits_of
from phalanx.train.parallel.attention import Way, choose
from phalanx.train.parallel.collectives import Group, size_of
from phalanx.train.parallel.context import ContextParallel, check_model, slice_batch
from phalanx.train.precision import computing
from phalanx.train.tasks import Task, TensorBatch
from phalanx.train.vocab import vocabulary_group

Sums = list[tuple[str, Tensor, Tensor | int]]
"""Name, sum, number of terms; the loss first."""


@dataclass(frozen=True)
class Sequences:
    """How sequences are split over a context group: `way` of attention, and the model's argument for positions."""

    group: Group
    way: Way
    positions: str


def sequences_of(model: nn.Module, group: Group, length: int) -> Sequences:
    """How the model's sequences of `length` are split. RecipeError when it cannot be told its positions, or attends in
    a way that cannot be split."""
    argument = check_model(model, length)
    heads, kv_heads = attention_heads(model)
    if any(hook is adapt for hook in model._forward_pre_hooks.values()):
        argument = "positions"  # which it turns into its own, together with documents
    return Sequences(group, choose(heads, kv_heads, size_of(group)), argument)


def attention_heads(model: nn.Module) -> tuple[int, int]:
    """Heads of queries and of keys and values; (1, 1) where the model does not tell."""
    config = getattr(model, "config", None)
    for owner, names in ((config, ("num_attention_heads", "num_key_value_heads")), (model, ("heads", "kv_heads"))):
        heads = getattr(owner, names[0], None)
        if isinstance(heads, int):
            return heads, getattr(owner, names[1], None) or heads
    return 1, 1


@dataclass(frozen=True)
class Head:
    """The output layer `name`, left out of the forward because the task takes the loss from what enters it
    (`head_loss`), and the group over which its vocabulary of so many rows is cut."""

    name: str
    loss: Callable[[Tensor, Tensor, TensorBatch], tuple[Tensor, Tensor | int]]
    vocabulary: int
    group: Group = None

    def over(self, group: Group) -> "Head":
        """The same with its vocabulary cut over a group."""
        return replace(self, group=group)


class Scoring:
    """What is computed of a model and a batch, in `precision`: a function of both, so that each pipeline stage can
    have it with its own part of the model."""

    def __init__(self, task: Task, precision: str, device: torch.device):
        self.task = task
        self.precision = precision
        self.device = device
        self.sequences: Sequences | None = None
        self.head: Head | None = None

    def __call__(self, model: nn.Module, batch: TensorBatch, metrics: bool = False) -> Sums:
        """Sums over a micro-batch, or this rank's part of its sequences: the loss, and if asked the task's metrics."""
        with computing(self.precision, self.device), self._splitting(batch) as mine:
            args, kwargs = self.task.inputs(mine)
            if self.sequences is not None:
                kwargs = {**kwargs, self.sequences.positions: mine["positions"]}
            score = getattr(self.task, "metrics", None) if metrics else None
            if self.head is not None and score is None:
                total, terms = _head_loss(self.head, model, args, kwargs, mine)
                return [("loss", total, terms)]
            output = model(*args, **kwargs)
            total, terms = self.task.loss(output, mine)
            sums: Sums = [("loss", total, terms)]
            if score is not None:
                sums += [(name, value, count) for name, (value, count) in score(output, mine).items()]
        return sums

    @contextlib.contextmanager
    def _splitting(self, batch: TensorBatch) -> Iterator[TensorBatch]:
        if self.sequences is None:
            yield batch
            return
        mine = slice_batch(batch, self.sequences.group, self.sequences.way)
        documents = batch.get("documents")
        with ContextParallel(self.sequences.group, self.sequences.way, documents, replace_masks=True) as context:
            yield mine
            if not context.attended:  # a trial looks closer (causality.py), where one process can hold the model
                raise RecipeError(
                    "parallelism.context: the model's forward never calls "
                    "torch.nn.functional.scaled_dot_product_attention, so each part of a sequence would be trained "
                    "as a sequence of its own; call it by that name, as F.scaled_dot_product_attention, or use "
                    "parallelism.context=1"
                )


def _head_loss(
    head: Head, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch: TensorBatch
) -> tuple[Tensor, Tensor | int]:
    layer = model.get_submodule(head.name)
    with bypassed(layer):
        output = model(*args, **kwargs)
    hidden = logits_of(output)
    weight = layer.weight  # as it is now: gathered while the forward runs, where it is sharded
    assert isinstance(weight, Tensor)
    with vocabulary_group(head.group, head.vocabulary):
        return head.loss(hidden, weight, batch)


class Objective(nn.Module):
    """A model with its scoring: the root of what is sharded."""

    def __init__(self, model: nn.Module, scoring: Scoring):
        super().__init__()
        self.model = model
        self.scoring = scoring

    def forward(self, batch: TensorBatch, metrics: bool = False) -> Sums:
        """Sums over a micro-batch: the loss, and if asked the task's metrics."""
        return self.scoring(self.model, batch, metrics)
