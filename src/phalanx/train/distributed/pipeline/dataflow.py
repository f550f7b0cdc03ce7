"""The dataflow of a model, which determines how a pipeline can cut it; found by one run without data.

The model runs once, on fake tensors. For each block, and for the loss after the last, the autograd graph is followed
back to the parameters and to the outputs of earlier blocks. So embeddings, heads and tied weights need not be declared,
and skip connections are found. Dependencies that autograd does not record (through integers or under `no_grad`) are not
found. `partition.py` cuts the model.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from phalanx.compat import fake_tensor_mode, tensor_version
from phalanx.errors import RecipeError
from phalanx.pytree import iterate_tensors, map_tensors
from phalanx.train.distributed.buffer_sync import find_changed_buffers, updates_running_stats
from phalanx.train.distributed.stubs import get_first_argument

# The loss of a model on a batch of tensors: (sum of losses, number of terms, ...).
ModelLossFn = Callable[[nn.Module, Any], tuple[Any, ...]]


class BlockOutput(NamedTuple):
    """The form of a block's output: the activation alone, or as the first element of a tuple or list."""

    container_type: type | None  # None: the activation alone
    other_values: tuple[Any, ...]  # the elements after it, with None for tensors, which are not sent
    keeps_shape: bool  # the activation has the shape of the block's first argument
    problem: str | None  # why there is no activation

    def wrap_output(self, hidden: Tensor) -> Any:
        return hidden if self.container_type is None else self.container_type((hidden, *self.other_values))


@dataclass(frozen=True)
class Dataflow:
    """The dataflow of a model of n blocks. Names are those of `model.named_parameters()`: tied weights have one."""

    blocks: tuple[str, ...]
    required_params: tuple[frozenset[str], ...]
    """[n + 1] parameters that each block's output depends on; the last: the loss."""
    input_blocks: tuple[frozenset[int], ...]
    """[n + 1] blocks with outputs that each block, and the loss, depends on directly."""
    extra_input_blocks: tuple[frozenset[int], ...]
    """[n + 1] the same for outputs of these blocks other than the activation."""
    takes_previous_output: tuple[bool, ...]
    """[n - 1] whether the first argument of a block is, as an object, the output of the block before."""
    outputs: tuple[BlockOutput, ...]  # [n]
    unused_params: frozenset[str]  # parameters that nothing depends on
    reused_params: frozenset[str]  # parameters that are applied to something that depends on them already
    changed_buffers: frozenset[str]  # buffers outside the blocks that a training forward changes, by first name


def trace_dataflow(model: nn.Module, blocks: Sequence[str], loss_fn: ModelLossFn, batch: Any) -> Dataflow:
    """Run the loss once and record dependencies. Model and batch are left unchanged.

    `blocks` are names of modules in execution order. Tensors are fake, with shapes and dtypes but no data, so this
    takes no memory, and model and batch may be on the meta device. Raises RecipeError if the model cannot run like
    this, or if its blocks do not run one after another.
    """
    if not blocks:
        raise RecipeError(
            "parallelism.pipeline: the model has no repeated blocks to cut between; use parallelism.pipeline=1"
        )
    with torch.enable_grad(), torch.random.fork_rng(devices=[]), fake_tensor_mode():

        def substitute(x: Tensor) -> Tensor:
            return torch.empty(x.shape, dtype=x.dtype, device="cpu")

        parameters = {name: substitute(parameter) for name, parameter in model.named_parameters()}
        for parameter in parameters.values():
            parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
        buffers = {name: substitute(buffer) for name, buffer in model.named_buffers()}
        training = [(module, module.training) for module in model.modules()]
        model.train()
        tracer = _DataflowTracer(model, blocks, parameters, buffers)
        try:
            loss = torch.func.functional_call(
                _LossWrapper(model, loss_fn),
                {f"model.{name}": tensor for name, tensor in (parameters | buffers).items()},
                (map_tensors(batch, substitute),),
            )
        except RecipeError:
            raise
        except Exception as error:
            raise RecipeError(
                f"parallelism.pipeline: the model cannot be cut into stages, since its forward without data fails: "
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            ) from error
        finally:
            tracer.remove_hooks()
            for module, mode in training:
                module.training = mode
        return tracer.build_dataflow(loss)


class _LossWrapper(nn.Module):
    """Model and loss function as one module, so that `functional_call` can replace its tensors."""

    def __init__(self, model: nn.Module, loss_fn: ModelLossFn):
        super().__init__()
        self.model = model
        self._loss_fn = loss_fn

    def forward(self, batch: Any) -> Any:
        return self._loss_fn(self.model, batch)[0]


class _DataflowTracer:
    """Hooks that record one forward."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[str], parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
    ):
        self._model, self._blocks = model, tuple(blocks)
        modules = [model.get_submodule(name) for name in blocks]
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._block_params = [frozenset(names[id(p)] for p in module.parameters()) for module in modules]
        self._outside_params = frozenset(names.values()).difference(*self._block_params)
        # Edges must be kept, since autograd nodes are identifiable only while they are referenced.
        self._edges = [get_gradient_edge(p) for p in parameters.values() if p.requires_grad]
        trained = [name for name, p in parameters.items() if p.requires_grad]
        # Parameters without gradients cannot be traced: every stage gets them.
        self._untracked_params = self._outside_params.difference(trained)
        self._graph_sources: dict[Node, str | int] = {e.node: n for e, n in zip(self._edges, trained, strict=True)}
        self._required_params: list[frozenset[str]] = []
        self._input_blocks: list[frozenset[int]] = []
        self._extra_input_blocks: list[frozenset[int]] = []
        self._takes_previous_output: list[bool] = []
        self._outputs: list[BlockOutput] = []
        self._reused_params: set[str] = set()
        self._last_output: Tensor | None = None
        self._no_grad_params: set[str] = set()
        self._handles = []
        for index, module in enumerate(modules):
            begin, end = partial(self._begin_block, index), partial(self._end_block, index)
            self._handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            self._handles.append(module.register_forward_hook(end, with_kwargs=True))
        inside = {id(child) for module in modules for child in module.modules()}
        for module in model.modules():
            own = {names[id(p)] for p in module.parameters(recurse=False)}
            if own and id(module) not in inside:
                self._handles.append(module.register_forward_hook(partial(self._note_use_without_grad, own)))
        self._changed_buffers: set[str] = set()
        within = {id(buffer) for module in modules for buffer in module.buffers()}
        self._buffers = {name for name, buffer in model.named_buffers() if id(buffer) not in within}
        self._buffer_versions = {
            name: (buffer, tensor_version(buffer)) for name, buffer in buffers.items() if name in self._buffers
        }
        for name, module in model.named_modules():
            if updates_running_stats(module):  # without incrementing the version counter
                own = {f"{name}.{buffer}" if name else buffer for buffer, _ in module.named_buffers(recurse=False)}
                self._changed_buffers |= own & self._buffers
        self._handles.append(model.register_forward_hook(lambda *_: self._record_changed_buffers()))

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def build_dataflow(self, loss: Any) -> Dataflow:
        """Build the dataflow from the records and the loss."""
        count = len(self._outputs)
        if count < len(self._blocks):
            raise RecipeError(
                f"parallelism.pipeline: block {self._blocks[count]} does not run, so stages cannot be cut"
            )
        self._required_params.append(self._trace_graph(loss))
        self._required_params = [needs | self._untracked_params for needs in self._required_params]
        idle = self._outside_params.difference(*self._required_params)
        if hidden := sorted(idle & self._no_grad_params):
            raise RecipeError(
                f"parallelism.pipeline: parameter {hidden[0]} is used without autograd, so the stages that need it "
                "cannot be found; compute it inside a block, or use parallelism.pipeline=1"
            )
        return Dataflow(
            self._blocks,
            tuple(self._required_params),
            tuple(self._input_blocks),
            tuple(self._extra_input_blocks),
            tuple(self._takes_previous_output),
            tuple(self._outputs),
            idle,
            frozenset(self._reused_params),
            frozenset(self._changed_buffers),
        )

    def _record_changed_buffers(self) -> None:
        """Record which buffers the forward has written to, or replaced."""
        now = {name: buffer for name, buffer in self._model.named_buffers() if name in self._buffers}
        self._changed_buffers |= set(find_changed_buffers(self._buffer_versions, now))

    def _begin_block(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if index != len(self._outputs):
            raise RecipeError(
                f"parallelism.pipeline: block {self._blocks[index]} runs out of order or more than once, so stages "
                f"cannot be cut; use parallelism.pipeline=1"
            )
        if index:
            self._takes_previous_output.append(get_first_argument(args, kwargs) is self._last_output)

    def _end_block(
        self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        self._required_params.append(self._trace_graph(output) | self._block_params[index])
        returned = _describe_output(output, get_first_argument(args, kwargs))
        self._outputs.append(returned)
        if returned.problem is not None:
            return None
        # New leaves replace the outputs, so that later blocks depend on them and not on what is before.
        self._last_output = self._make_graph_source(output if returned.container_type is None else output[0], index)
        if returned.container_type is None:
            return self._last_output
        others = map_tensors(tuple(output[1:]), lambda x: self._make_graph_source(x, -1 - index))
        return returned.container_type((self._last_output, *others))

    def _make_graph_source(self, x: Tensor, mark: int) -> Tensor:
        source = x.detach()
        if source.is_floating_point():
            edge = get_gradient_edge(source.requires_grad_())
            self._edges.append(edge)
            self._graph_sources[edge.node] = mark
        return source

    def _note_use_without_grad(self, own: set[str], module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not any(x.requires_grad for x in iterate_tensors(output)):
            self._no_grad_params.update(own)

    def _trace_graph(self, outputs: Any) -> frozenset[str]:
        """Record the blocks with outputs at the ends of the graph of some tensors; return the parameters there."""
        seen = _find_ancestors(get_gradient_edge(x).node for x in iterate_tensors(outputs) if x.requires_grad)
        found = [self._graph_sources[node] for node in seen if node in self._graph_sources]
        self._reused_params |= self._find_reused_params(seen)
        marks = {mark for mark in found if isinstance(mark, int)}
        self._input_blocks.append(frozenset(mark for mark in marks if mark >= 0))
        self._extra_input_blocks.append(frozenset(-1 - mark for mark in marks if mark < 0))
        return frozenset(name for name in found if isinstance(name, str))

    def _find_reused_params(self, graph: set[Node]) -> set[str]:
        """Return the parameters that a block applies to its input, and again to what depends on the result."""
        readers: dict[Node, list[Node]] = {}
        for reader in graph:
            for node, _ in reader.next_functions:
                if node is not None:
                    readers.setdefault(node, []).append(reader)
        received = [node for node, mark in self._graph_sources.items() if isinstance(mark, int)]
        follows = _find_reachable(received, lambda node: readers.get(node, ()))
        reused = set()
        for source, name in self._graph_sources.items():
            own = _find_reachable([source], lambda node: set(readers.get(node, ())) - follows)  # cast, transposed
            operations = {reader for node in own for reader in readers.get(node, ())} & follows
            if isinstance(name, str) and any(_find_ancestors([each]) & (operations - {each}) for each in operations):
                reused.add(name)
        return reused


def _find_ancestors(nodes: Iterable[Node]) -> set[Node]:
    """Return nodes of an autograd graph, and all nodes that they depend on."""
    return _find_reachable(nodes, lambda node: (each for each, _ in node.next_functions if each is not None))


def _find_reachable(nodes: Iterable[Node], next_nodes: Callable[[Node], Iterable[Node]]) -> set[Node]:
    queue = list(nodes)
    seen = set(queue)
    while queue:
        for node in next_nodes(queue.pop()):
            if node not in seen:
                seen.add(node)
                queue.append(node)
    return seen


def _describe_output(output: Any, given: Any) -> BlockOutput:
    single = isinstance(output, Tensor)
    several = isinstance(output, list | tuple) and len(output) > 0 and not hasattr(output, "_fields")
    hidden = output if single else output[0] if several else None
    others = tuple(output[1:]) if several else ()
    problem = None
    if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
        problem = f"returns {type(output).__name__}, not a tensor of floats or a tuple that begins with one"
    keeps_shape = isinstance(hidden, Tensor) and isinstance(given, Tensor) and hidden.shape == given.shape
    return BlockOutput(None if single else type(output), map_tensors(others, lambda x: None), keeps_shape, problem)
