"""How values flow in a model: what a pipeline must know of it before it can be cut, found by one run on no data.

The model runs once, on tensors without data, and for each block (and for the loss, which comes after the last) the
autograd graph is followed back to the parameters and to the outputs of earlier blocks. So nobody has to declare what is
an embedding, a head or a tied weight, and skip connections are seen. What autograd does not see (a value that depends
on another through integers or under `no_grad`) is not found. Cutting is `stages.py`.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from phalanx.compat import fake_tensors, version_of
from phalanx.errors import RecipeError
from phalanx.train.forward_state import keeps_statistics
from phalanx.train.parallel.standins import first_argument, map_tensors, tensors_in

# What a step does with a model and a batch (of tensors): (sum of losses, number of terms, ...).
Objective = Callable[[nn.Module, Any], tuple[Any, ...]]


class Returned(NamedTuple):
    """What a block returns: its activation alone, or first in a tuple or list."""

    kind: type | None  # None: the activation alone
    others: tuple[Any, ...]  # what comes after it, with None for tensors: they do not travel
    keeps_shape: bool  # the activation has the shape of the block's first argument
    problem: str | None  # why there is no activation

    def form(self, hidden: Tensor) -> Any:
        return hidden if self.kind is None else self.kind((hidden, *self.others))


@dataclass(frozen=True)
class Survey:
    """How values flow in a model, of n blocks. Names are those of `model.named_parameters()`: tied weights have one."""

    blocks: tuple[str, ...]
    needs: tuple[frozenset[str], ...]  # [n + 1] parameters that each block's output depends on; the last: the loss
    reads: tuple[frozenset[int], ...]  # [n + 1] blocks whose output each block, and the loss, depends on directly
    extras: tuple[frozenset[int], ...]  # [n + 1] the same for what these blocks return besides their activation
    joined: tuple[bool, ...]  # [n - 1] whether a block gets as its first argument the very output of the one before
    returned: tuple[Returned, ...]  # [n]
    idle: frozenset[str]  # parameters that nothing depends on
    changed: Mapping[str, frozenset[int]]
    """Buffers outside the blocks that a forward in training changes, by the first name of each, and where: in which
    block, or behind which and before the next. What comes before the first block counts as in it."""


def survey(model: nn.Module, blocks: Sequence[str], objective: Objective, batch: Any, *, real: bool = False) -> Survey:
    """Run the objective once and see what depends on what. Model and batch are left as they are.

    `blocks` are names of modules in the order in which they run. Tensors are fake, with shapes and dtypes but no data,
    so this takes no memory and model or batch may be on the meta device. `real` runs it with the data, where model and
    batch are, for a model whose forward looks at values. RecipeError when the model cannot be run so, or its blocks do
    not run one after the other.
    """
    if not blocks:
        raise RecipeError(
            "parallelism.pipeline: the model has no repeated blocks to cut between; use parallelism.pipeline=1"
        )
    devices = {p.device for p in model.parameters() if real and p.device.type not in ("cpu", "meta")}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.random.fork_rng(devices=list(devices)))
        if not real:
            stack.enter_context(fake_tensors())

        def lent(x: Tensor) -> Tensor:
            return x.detach().clone() if real else torch.empty(x.shape, dtype=x.dtype, device="cpu")

        parameters = {name: lent(parameter) for name, parameter in model.named_parameters()}
        for parameter in parameters.values():
            parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
        buffers = {name: lent(buffer) for name, buffer in model.named_buffers()}
        training = [(module, module.training) for module in model.modules()]
        model.train()
        watch = _Watch(model, blocks, parameters, buffers)
        try:
            outcome = torch.func.functional_call(
                _Whole(model, objective),
                {f"model.{name}": tensor for name, tensor in (parameters | buffers).items()},
                (map_tensors(batch, lent),),
            )
        except RecipeError:
            raise
        except Exception as error:
            how = "" if real else " without data"
            raise RecipeError(
                f"parallelism.pipeline: the model cannot be cut into stages, since its forward{how} fails: "
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            ) from error
        finally:
            watch.stop()
            for module, mode in training:
                module.training = mode
        return watch.survey(outcome)


class _Whole(nn.Module):
    """Model and objective as one module, so that `functional_call` can lend it other tensors."""

    def __init__(self, model: nn.Module, objective: Objective):
        super().__init__()
        self.model = model
        self._objective = objective

    def forward(self, batch: Any) -> Any:
        return self._objective(self.model, batch)[0]


class _Watch:
    """Hooks that follow one forward."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[str], parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
    ):
        self._model, self._blocks = model, tuple(blocks)
        modules = [model.get_submodule(name) for name in blocks]
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._own = [frozenset(names[id(p)] for p in module.parameters()) for module in modules]
        self._outside = frozenset(names.values()).difference(*self._own)
        # Edges are kept, since nodes are known again only while something holds them.
        self._edges = [get_gradient_edge(p) for p in parameters.values() if p.requires_grad]
        trained = [name for name, p in parameters.items() if p.requires_grad]
        # Parameters of integers have no gradients to follow: every stage gets them.
        self._unseen = self._outside.difference(trained)
        self._leaves: dict[Node, str | int] = {e.node: n for e, n in zip(self._edges, trained, strict=True)}
        self._needs: list[frozenset[str]] = []
        self._reads: list[frozenset[int]] = []
        self._extras: list[frozenset[int]] = []
        self._joined: list[bool] = []
        self._returned: list[Returned] = []
        self._last: Tensor | None = None
        self._blind: set[str] = set()
        self._handles = []
        for index, module in enumerate(modules):
            self._handles.append(module.register_forward_pre_hook(self._entering(index), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leaving(index), with_kwargs=True))
        inside = {id(child) for module in modules for child in module.modules()}
        for module in model.modules():
            own = {names[id(p)] for p in module.parameters(recurse=False)}
            if own and id(module) not in inside:
                self._handles.append(module.register_forward_hook(self._seeing(own)))
        self._changed: dict[str, set[int]] = {}
        within = {id(buffer) for module in modules for buffer in module.buffers()}
        self._buffers = {name for name, buffer in model.named_buffers() if id(buffer) not in within}
        self._versions = self._seen(buffers)
        for name, module in model.named_modules():
            if id(module) not in inside and keeps_statistics(module):
                own = {f"{name}.{buffer}" if name else buffer for buffer, _ in module.named_buffers(recurse=False)}
                self._handles.append(module.register_forward_hook(self._counting(own & self._buffers)))
        self._handles.append(model.register_forward_hook(lambda *_: self._look()))

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()

    def survey(self, outcome: Any) -> Survey:
        """What was seen, given the loss."""
        count = len(self._returned)
        if count < len(self._blocks):
            raise RecipeError(
                f"parallelism.pipeline: block {self._blocks[count]} does not run, so stages cannot be cut"
            )
        self._needs.append(self._followed(outcome))
        self._needs = [needs | self._unseen for needs in self._needs]
        idle = self._outside.difference(*self._needs)
        if hidden := sorted(idle & self._blind):
            raise RecipeError(
                f"parallelism.pipeline: parameter {hidden[0]} is used without autograd, so it cannot be told which "
                "stages need it; compute it inside a block, or use parallelism.pipeline=1"
            )
        return Survey(
            self._blocks,
            tuple(self._needs),
            tuple(self._reads),
            tuple(self._extras),
            tuple(self._joined),
            tuple(self._returned),
            idle,
            {name: frozenset(places) for name, places in self._changed.items()},
        )

    def _seen(self, buffers: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
        return {name: (buffer, version_of(buffer)) for name, buffer in buffers.items() if name in self._buffers}

    def _place(self) -> int:
        """Where the forward is now."""
        return max(0, len(self._returned) - 1)

    def _look(self, place: int | None = None) -> None:
        """Note which buffers were written to, or replaced, since the last look."""
        now = self._seen(dict(self._model.named_buffers()))
        for name, (buffer, version) in now.items():
            before, count = self._versions.get(name, (None, 0))
            if buffer is not before or version != count:
                self._changed.setdefault(name, set()).add(self._place() if place is None else place)
        self._versions = now

    def _counting(self, own: set[str]) -> Callable[..., None]:
        """Running statistics are written to without being counted."""

        def hook(*_: Any) -> None:
            for name in own:
                self._changed.setdefault(name, set()).add(self._place())

        return hook

    def _entering(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if index != len(self._returned):
                raise RecipeError(
                    f"parallelism.pipeline: block {self._blocks[index]} runs out of order or more than once, so stages "
                    f"cannot be cut; use parallelism.pipeline=1"
                )
            self._look()
            if index:
                self._joined.append(first_argument(args, kwargs) is self._last)

        return hook

    def _leaving(self, index: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            self._look(index)
            self._needs.append(self._followed(output) | self._own[index])
            returned = _returned(output, first_argument(args, kwargs))
            self._returned.append(returned)
            if returned.problem is not None:
                return None
            # Leaves in place of the outputs: what follows is seen to depend on them, and not on what lies behind.
            self._last = self._leaf(output if returned.kind is None else output[0], index)
            if returned.kind is None:
                return self._last
            others = map_tensors(tuple(output[1:]), lambda x: self._leaf(x, -1 - index))
            return returned.kind((self._last, *others))

        return hook

    def _leaf(self, x: Tensor, mark: int) -> Tensor:
        leaf = x.detach()
        if leaf.is_floating_point():
            edge = get_gradient_edge(leaf.requires_grad_())
            self._edges.append(edge)
            self._leaves[edge.node] = mark
        return leaf

    def _seeing(self, own: set[str]) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not any(x.requires_grad for x in tensors_in(output)):
                self._blind.update(own)

        return hook

    def _followed(self, outputs: Any) -> frozenset[str]:
        """Note which blocks' outputs stand at the ends of the graph behind some tensors; the parameters that do."""
        queue = [get_gradient_edge(x).node for x in tensors_in(outputs) if x.requires_grad]
        seen = set(queue)
        while queue:
            for node, _ in queue.pop().next_functions:
                if node is not None and node not in seen:
                    seen.add(node)
                    queue.append(node)
        found = [self._leaves[node] for node in seen if node in self._leaves]
        marks = {mark for mark in found if isinstance(mark, int)}
        self._reads.append(frozenset(mark for mark in marks if mark >= 0))
        self._extras.append(frozenset(-1 - mark for mark in marks if mark < 0))
        return frozenset(name for name in found if isinstance(name, str))


def _returned(output: Any, given: Any) -> Returned:
    single = isinstance(output, Tensor)
    several = isinstance(output, list | tuple) and len(output) > 0 and not hasattr(output, "_fields")
    hidden = output if single else output[0] if several else None
    others = tuple(output[1:]) if several else ()
    problem = None
    if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
        problem = f"returns {type(output).__name__}, not a tensor of floats or a tuple that begins with one"
    keeps_shape = isinstance(hidden, Tensor) and isinstance(given, Tensor) and hidden.shape == given.shape
    return Returned(None if single else type(output), map_tensors(others, lambda x: None), keeps_shape, problem)
