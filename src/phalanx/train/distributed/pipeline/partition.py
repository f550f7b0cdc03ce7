"""Partition any model into pipeline stages: where it may be cut, which parameters each stage needs, and the stages.

Every stage runs the model's own forward on the same batch; only the hidden state is sent. Stage k computes blocks [a,
b). Blocks before a return their input, the one just before a returns the activation that was received, and block b ends
the forward (`train/distributed/stubs.py`). Parameters keep the model's names. The dataflow (`dataflow.py`) says which
parameters a stage needs: embeddings on the first stage, the head on the last, a tied weight on both, and a table that
every block reads on all of them, whatever their names. `schedule.py` runs the stages.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phalanx.errors import RecipeError
from phalanx.pytree import iterate_tensors
from phalanx.train.distributed.module_state import EXTRA_STATE_PREFIX, find_extra_state_modules
from phalanx.train.distributed.pipeline.dataflow import Dataflow, ModelLossFn
from phalanx.train.distributed.stubs import (
    Passthrough,
    ShapeStub,
    StageEndSignal,
    StageInput,
    StageOutput,
    make_placeholder,
)


def balance_stage_bounds(
    weights: Sequence[float], stages: int, *, head_cost: float = 0.0, blocks_per_stage: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return bounds [stages + 1] of the stages' blocks: stage k has blocks [bounds[k], bounds[k + 1]), at least one.

    `weights` [blocks] is the cost of each block, `head_cost` what the last stage has in addition; the cost of the most
    expensive stage is minimized. `blocks_per_stage` [stages] sets the numbers of blocks directly. Raises RecipeError if
    they do not fit.
    """
    blocks = len(weights)
    if blocks_per_stage is not None:
        if len(blocks_per_stage) != stages or sum(blocks_per_stage) != blocks or min(blocks_per_stage) < 1:
            raise RecipeError(
                f"parallelism.pipeline: blocks per stage {list(blocks_per_stage)} must be {stages} numbers of at "
                f"least 1 that add up to the {blocks} blocks of the model"
            )
        return tuple(sum(blocks_per_stage[:stage]) for stage in range(stages + 1))
    total = [sum(weights[:count]) for count in range(blocks + 1)]

    def cost(first: int, end: int) -> float:
        return total[end] - total[first] + (head_cost if end == blocks else 0)

    # best[end]: (cost of the most expensive stage, sum of squares, bounds) of the stages that hold blocks [0, end)
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for stage in range(1, stages + 1):
        ends = [blocks] if stage == stages else range(stage, blocks - (stages - stage) + 1)
        best = {
            end: min(
                (max(max_cost, cost(first, end)), squares + cost(first, end) ** 2, (*bounds, end))
                for first, (max_cost, squares, bounds) in best.items()
                if first < end
            )
            for end in ends
        }
    return best[blocks][2]


@dataclass(frozen=True)
class StagePartition:
    """The stages of a model: stage k computes blocks [bounds[k], bounds[k + 1]). Made by `partition_stages`."""

    dataflow: Dataflow
    bounds: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.bounds) - 1

    def block_names(self, stage: int) -> tuple[str, ...]:
        """Return the names of a stage's own blocks."""
        return self.dataflow.blocks[self.bounds[stage] : self.bounds[stage + 1]]

    def parameter_names(self, stage: int) -> frozenset[str]:
        """Return the names of a stage's parameters. Unused parameters are on the last stage."""
        last = stage == self.num_stages - 1
        needs = self.dataflow.required_params[self.bounds[stage] : self.bounds[stage + 1] + last]
        return frozenset().union(*needs, self.dataflow.unused_params if last else ())

    @property
    def tied_params(self) -> dict[str, tuple[int, ...]]:
        """Return the stages of each parameter of which several stages have a copy, in order of name: their gradients
        must be added, and it counts once."""
        stages_by_name: dict[str, list[int]] = {}
        for stage in range(self.num_stages):
            for name in self.parameter_names(stage):
                stages_by_name.setdefault(name, []).append(stage)
        return {name: tuple(stages) for name, stages in sorted(stages_by_name.items()) if len(stages) > 1}


def partition_stages(dataflow: Dataflow, bounds: Sequence[int]) -> StagePartition:
    """Make stages with these bounds. Raises RecipeError if the model cannot be cut there."""
    names = dataflow.blocks
    for stage in range(1, len(bounds) - 1):
        boundary = bounds[stage]
        before, after = names[boundary - 1], names[boundary]
        prefix = f"parallelism.pipeline: cannot cut between {before} and {after}"
        if problem := dataflow.outputs[boundary - 1].problem:
            raise RecipeError(f"{prefix}: {before} {problem}")
        if not dataflow.takes_previous_output[boundary - 1]:
            raise RecipeError(f"{prefix}: the first argument of {after} is not the output of {before}")
        for index in range(boundary, len(names) + 1):
            user = "the model's end" if index == len(names) else names[index]
            if skipped := [earlier for earlier in sorted(dataflow.input_blocks[index]) if earlier < boundary - 1]:
                raise RecipeError(f"{prefix}: {user} also uses the output of {names[skipped[0]]} (a skip connection)")
            if extra := [earlier for earlier in sorted(dataflow.extra_input_blocks[index]) if earlier < boundary]:
                raise RecipeError(f"{prefix}: {user} uses what {names[extra[0]]} returns besides its first output")
    return StagePartition(dataflow, tuple(bounds))


def assign_buffer_owners(model: nn.Module, partition: StagePartition) -> dict[str, int]:
    """Return the stage that saves each buffer (by name) and each extra state (by logical name) of the whole model. In a
    block it is the block's stage; outside, the last stage with the module. Raises RecipeError for a buffer that
    forwards change and of which several stages have a copy."""
    named = dict(model.named_modules(remove_duplicate=False))
    blocks = {id(named[name]) for name in partition.dataflow.blocks}
    stages_by_module: dict[str, list[int]] = {name: [] for name in named}
    for stage in range(partition.num_stages):
        stage_param_names = partition.parameter_names(stage)
        needed = {id(parameter) for name, parameter in model.named_parameters() if name in stage_param_names}
        unneeded = _unneeded_modules(model, blocks, partition.dataflow.blocks, needed)
        left_out = {id(module) for part in unneeded for module in part.modules()}
        for name, module in named.items():
            if id(module) not in left_out:
                stages_by_module[name].append(stage)
    for stage in range(partition.num_stages):
        for block in partition.block_names(stage):
            stages_by_module |= {name: [stage] for name in named if name == block or name.startswith(f"{block}.")}
    first = {id(buffer): name for name, buffer in model.named_buffers()}
    found = {EXTRA_STATE_PREFIX + name: stages_by_module[name][-1] for name in find_extra_state_modules(model)}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        stages_with_module = stages_by_module[name.rpartition(".")[0]]
        if len(stages_with_module) > 1 and first[id(buffer)] in partition.dataflow.changed_buffers:
            raise RecipeError(
                f"parallelism.pipeline: forwards change {name}, of which several stages have a copy; keep it in a "
                "block or in a module with parameters, or use parallelism.pipeline=1"
            )
        found[name] = stages_with_module[-1]
    return found


class PartialModel(NamedTuple):
    """One stage's copy of the model. It has only the stage's parameters, under the model's own names."""

    model: nn.Module
    stage_input: StageInput | None  # None on the first stage
    stubs: tuple[ShapeStub, ...]
    placeholders: tuple[tuple[nn.Module, str, Tensor], ...]
    """Single parameters left out: module, attribute, meta tensor."""

    def set_device(self, device: torch.device) -> None:
        """Set the device that the stubs' results claim to be on."""
        for stub in self.stubs:
            stub.device = device
        for module, name, like in self.placeholders:
            setattr(module, name, make_placeholder(like, device))


def extract_stages(model: nn.Module, partition: StagePartition, stages: Sequence[int]) -> dict[int, PartialModel]:
    """Make the models of these stages. They take over the parameters and buffers of the given model, so drop it
    afterwards; if two of the stages have the same parameter (tied), the later one gets a copy. Raises RecipeError if
    the model's Python objects cannot be copied."""
    used_names: set[str] = set()
    models = {}
    for stage in stages:
        models[stage] = _extract_stage(model, partition, stage, used_names)
        used_names |= partition.parameter_names(stage)
    return models


def _extract_stage(model: nn.Module, partition: StagePartition, stage: int, used_names: set[str]) -> PartialModel:
    needed_names = partition.parameter_names(stage)
    blocks = [model.get_submodule(name) for name in partition.dataflow.blocks]
    returned = partition.dataflow.outputs
    first, end = partition.bounds[stage], partition.bounds[stage + 1]
    # A deep copy takes objects in this memo as they are: the model itself is not changed.
    copies: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if name not in needed_names:
            copies[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        elif name in used_names:
            copies[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        else:
            copies[id(parameter)] = parameter
    left_out = {id(copies[id(p)]) for name, p in model.named_parameters() if name not in needed_names}
    for buffer in model.buffers():
        copies[id(buffer)] = buffer.clone() if used_names else buffer
    stage_input = None
    stubs: list[ShapeStub] = []
    needed = {id(p) for name, p in model.named_parameters() if name in needed_names}
    try:
        for part in _unneeded_modules(model, {id(block) for block in blocks}, partition.dataflow.blocks, needed):
            stubs.append(ShapeStub(part))
            copies[id(part)] = stubs[-1]
        for index, block in enumerate(blocks):
            if index == first - 1:
                copies[id(block)] = stage_input = StageInput(block, returned[index].wrap_output)
            elif index < first and returned[index].keeps_shape and returned[index].problem is None:
                copies[id(block)] = Passthrough(block, returned[index].wrap_output)
            elif index < first:
                stubs.append(ShapeStub(block))
                copies[id(block)] = stubs[-1]
            elif index >= end:
                copies[id(block)] = StageOutput(block)
        stage_model = copy.deepcopy(model, copies)
    except (TypeError, RuntimeError) as error:
        raise RecipeError(f"parallelism.pipeline: the model's objects cannot be copied: {error}") from error
    emptied = []
    for module in stage_model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in left_out:
                delattr(module, name)
                emptied.append((module, name, parameter.detach()))
    return PartialModel(stage_model, stage_input, tuple(stubs), tuple(emptied))


def _unneeded_modules(model: nn.Module, blocks: set[int], names: Sequence[str], needed: set[int]) -> list[nn.Module]:
    """Return the outermost modules outside the blocks with parameters, but none that the stage needs."""
    around = {id(model)}
    for name in names:
        levels = name.split(".")
        around |= {id(model.get_submodule(".".join(levels[:depth]))) for depth in range(1, len(levels))}

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        if id(module) in blocks:
            return
        own = {id(parameter) for parameter in module.parameters()}
        if own and not own & needed and id(module) not in around:
            yield module
        else:
            for child in module.children():
                yield from visit(child)

    return list(visit(model))


class StageModule(nn.Module):
    """A stage as a module: the received activation [...] (None on the first stage) -> the activation to send or, on the
    last stage, the sum of losses (0-d, fp32). Parameters are named as in the model, with the prefix `model.`.

    `set_batches` sets the batches of a step, and `micro_batch_index` is the micro-batch that the next forward computes.
    On the last stage `results` holds the loss function's result for each, detached.

    In training mode `seed(micro_batch)` seeds the random numbers before each forward; after each block, also one of
    another stage, they are seeded again (`ops/random_draws.py`).
    """

    def __init__(
        self,
        partial_model: PartialModel,
        partition: StagePartition,
        index: int,
        loss_fn: ModelLossFn,
        *,
        seed: Callable[[int], None] | None = None,
    ):
        super().__init__()
        self.model = partial_model.model
        self.index = index
        self.is_last = index == partition.num_stages - 1
        self.blocks = tuple(f"model.{name}" for name in partition.block_names(index))
        self.loss_fn = loss_fn
        self.micro_batch_index = 0
        self.results: list[Any] = []
        self._partial_model = (partial_model,)  # in a tuple, so that its modules are registered under one name only
        self._device: torch.device | None = None
        self._batches: Sequence[Any] = ()
        self._current_loss_fn = loss_fn
        self._seed = seed

    def set_batches(self, batches: Sequence[Any], loss_fn: ModelLossFn | None = None) -> None:
        """Set the batches of the next forwards and, if given, another loss function for them."""
        self._batches = batches
        self._current_loss_fn = loss_fn or self.loss_fn
        self.results = [None] * len(batches)

    def forward(self, hidden: Tensor | None = None) -> Tensor:
        (partial_model,) = self._partial_model
        batch = self._batches[self.micro_batch_index]
        device = next(iterate_tensors(batch)).device if hidden is None else hidden.device
        if device != self._device:
            partial_model.set_device(device)
            self._device = device
        if self._seed is not None and self.training:
            self._seed(self.micro_batch_index)
        if partial_model.stage_input is not None:
            partial_model.stage_input.hidden = hidden
        try:
            result = self._current_loss_fn(self.model, batch)
        except StageEndSignal as end:
            output = end.hidden
            if torch.is_grad_enabled() and not output.requires_grad:
                # Everything is frozen. The next stage still sends a gradient, because schedules require one.
                output = output.detach().requires_grad_()
            return output.contiguous()
        finally:
            if partial_model.stage_input is not None:
                partial_model.stage_input.hidden = None
        if not self.is_last:
            raise RuntimeError(f"stage {self.index} computed the whole model: no block after its own was called")
        self.results[self.micro_batch_index] = tuple(x.detach() if isinstance(x, Tensor) else x for x in result)
        total: Tensor = result[0]
        return total.float()
