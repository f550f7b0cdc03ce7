"""Cutting any model into pipeline stages: where it may be cut, which parameters each stage needs, the stages.

Every stage runs the model's own forward on the same batch; only the hidden state travels. Stage k computes blocks
[a, b). Blocks before a are passed through, the one just before a returns the activation that was received, and block b
ends the forward (`standins.py`). Names of parameters stay the model's own. Which parameters a stage needs is known
from how values flow (`survey.py`): embeddings land on the first stage, the head on the last, a tied weight on both, a
table that every block reads on all of them, whatever the model calls these. Running the stages is `pipeline.py`.
"""

import bisect
import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phalanx.errors import RecipeError
from phalanx.train.checkpoint.format import EXTRA
from phalanx.train.parallel.standins import Ghost, Inlet, Outlet, Passage, StageEnd, hollow, tensors_in
from phalanx.train.parallel.survey import Objective, Survey
from phalanx.train.savable import extra_modules

END = 0.25  # what embedding and head count for, in blocks, where no weights are given: only enough to break ties


class Tie(NamedTuple):
    """A parameter of which several stages have a copy: their gradients are to be added, and it counts once."""

    name: str
    stages: tuple[int, ...]


def cut_points(
    blocks: int,
    stages: int,
    weights: Sequence[float] | None = None,
    *,
    before: float = 0.0,
    after: float = 0.0,
    counts: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Bounds [stages + 1] of the stages' blocks: stage k has blocks [bounds[k], bounds[k + 1]), at least one.

    Without weights the numbers of blocks are as even as can be, and the ends, which also have embedding and head, get
    the smaller ones. `weights` [blocks] say what each block costs (parameters, FLOPs, seconds), `before` and `after`
    what embedding and head do, in the same unit: the dearest stage becomes as cheap as possible. `counts` [stages]
    gives the numbers of blocks outright. RecipeError when they do not fit.
    """
    if stages > blocks:
        raise RecipeError(
            f"parallelism.pipeline: {stages} stages need as many blocks, but the model has {blocks}; "
            f"use {blocks} stages or fewer"
        )
    if counts is not None:
        if len(counts) != stages or sum(counts) != blocks or min(counts) < 1:
            raise RecipeError(
                f"parallelism.pipeline: blocks per stage {list(counts)} must be {stages} numbers of at least 1 that "
                f"add up to the {blocks} blocks of the model"
            )
        return tuple(sum(counts[:stage]) for stage in range(stages + 1))
    if weights is None:
        weights, before, after = [1.0] * blocks, END, END
    elif len(weights) != blocks:
        raise ValueError(f"{len(weights)} weights for {blocks} blocks")
    total = [sum(weights[:count]) for count in range(blocks + 1)]

    def cost(first: int, end: int) -> float:
        return total[end] - total[first] + (before if first == 0 else 0) + (after if end == blocks else 0)

    # best[end]: (dearest stage, sum of squares, bounds) of the stages so far, which hold blocks [0, end)
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for stage in range(1, stages + 1):
        ends = [blocks] if stage == stages else range(stage, blocks - (stages - stage) + 1)
        best = {
            end: min(
                (max(dearest, cost(first, end)), squares + cost(first, end) ** 2, (*bounds, end))
                for first, (dearest, squares, bounds) in best.items()
                if first < end
            )
            for end in ends
        }
    return best[blocks][2]


@dataclass(frozen=True)
class Division:
    """A model's stages: stage k computes blocks [bounds[k], bounds[k + 1]). Made by `divide`."""

    survey: Survey
    bounds: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    def blocks(self, stage: int) -> tuple[str, ...]:
        """Names of a stage's own blocks."""
        return self.survey.blocks[self.bounds[stage] : self.bounds[stage + 1]]

    def stage_of(self, block: int) -> int:
        """The stage that computes a block."""
        return bisect.bisect_right(self.bounds, block) - 1

    def parameters(self, stage: int) -> frozenset[str]:
        """Names of the parameters that a stage holds. Those that nothing uses are on the last."""
        last = stage == self.stages - 1
        needs = self.survey.needs[self.bounds[stage] : self.bounds[stage + 1] + last]
        return frozenset().union(*needs, self.survey.idle if last else ())

    @property
    def ties(self) -> tuple[Tie, ...]:
        """Parameters that several stages hold, in order of name."""
        held: dict[str, list[int]] = {}
        for stage in range(self.stages):
            for name in self.parameters(stage):
                held.setdefault(name, []).append(stage)
        return tuple(Tie(name, tuple(stages)) for name, stages in sorted(held.items()) if len(stages) > 1)


def divide(found: Survey, bounds: Sequence[int]) -> Division:
    """Stages with these bounds. RecipeError where the model cannot be cut."""
    names = found.blocks
    for stage in range(1, len(bounds) - 1):
        cut = bounds[stage]
        before, after = names[cut - 1], names[cut]
        here = f"parallelism.pipeline: cannot cut between {before} and {after}"
        if problem := found.returned[cut - 1].problem:
            raise RecipeError(f"{here}: {before} {problem}")
        if not found.joined[cut - 1]:
            raise RecipeError(f"{here}: the first argument of {after} is not the output of {before}")
        for index in range(cut, len(names) + 1):
            user = "the model's end" if index == len(names) else names[index]
            if skipped := [earlier for earlier in sorted(found.reads[index]) if earlier < cut - 1]:
                raise RecipeError(f"{here}: {user} also uses the output of {names[skipped[0]]} (a skip connection)")
            if extra := [earlier for earlier in sorted(found.extras[index]) if earlier < cut]:
                raise RecipeError(f"{here}: {user} uses what {names[extra[0]]} returns besides its first output")
    return Division(found, tuple(bounds))


def keepers(model: nn.Module, division: Division) -> dict[str, int]:
    """The stage that keeps what a module of the whole model has besides parameters: buffers by their names, extra state
    by its logical name. In a block it is the block's; a buffer that forwards change outside belongs to the stage that
    has values there; others to the last that has the module, which alone comes to the end of the forward. RecipeError
    for a buffer that several stages would change."""
    named = dict(model.named_modules(remove_duplicate=False))
    blocks = {id(named[name]) for name in division.survey.blocks}
    having: dict[str, list[int]] = {name: [] for name in named}
    for stage in range(division.stages):
        kept = division.parameters(stage)
        needed = {id(parameter) for name, parameter in model.named_parameters() if name in kept}
        left_out = {id(m) for part in _parts(model, blocks, division.survey.blocks, needed) for m in part.modules()}
        for name, module in named.items():
            if id(module) not in left_out:
                having[name].append(stage)
    for stage in range(division.stages):
        for block in division.blocks(stage):
            having |= {name: [stage] for name in named if name == block or name.startswith(f"{block}.")}
    first = {id(buffer): name for name, buffer in model.named_buffers()}
    found = {EXTRA + name: having[name][-1] for name in extra_modules(model)}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        there = having[name.rpartition(".")[0]]
        places = division.survey.changed.get(first[id(buffer)], ())
        stages = sorted({division.stage_of(place) for place in places} & set(there))
        if len(stages) > 1:
            raise RecipeError(
                f"parallelism.pipeline: forwards change {name} in stage {stages[0]} and in stage {stages[1]}, and "
                "neither has what the other does to it; use parallelism.pipeline=1, or a buffer for each of the two "
                "places"
            )
        found[name] = (stages or there)[-1]
    return found


class StageModel(NamedTuple):
    """One stage's copy of the model. It has only the stage's parameters, under the model's own names."""

    model: nn.Module
    inlet: Inlet | None  # None on the first stage
    ghosts: tuple[Ghost, ...]
    hollow: tuple[tuple[nn.Module, str, Tensor], ...]  # single parameters left out: module, attribute, meta tensor

    def place(self, device: torch.device) -> None:
        """Have what stands for the parts left out say that it is on this device."""
        for ghost in self.ghosts:
            ghost.device = device
        for module, name, like in self.hollow:
            setattr(module, name, hollow(like, device))


def cut(model: nn.Module, division: Division, stages: Sequence[int]) -> dict[int, StageModel]:
    """The models of these stages. Parameters and buffers are the given model's, not copies, so drop that afterwards;
    where two of the stages have the same parameter (a tie), the later one gets a copy. RecipeError when the model's
    Python objects cannot be copied."""
    given: set[str] = set()
    models = {}
    for stage in stages:
        models[stage] = _cut(model, division, stage, given)
        given |= division.parameters(stage)
    return models


def _cut(model: nn.Module, division: Division, stage: int, given: set[str]) -> StageModel:
    kept = division.parameters(stage)
    blocks = [model.get_submodule(name) for name in division.survey.blocks]
    returned = division.survey.returned
    first, end = division.bounds[stage], division.bounds[stage + 1]
    # What a deep copy finds here it takes as it is, in place of a copy: the model itself is not changed.
    held: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if name not in kept:
            held[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        elif name in given:
            held[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        else:
            held[id(parameter)] = parameter
    left_out = {id(held[id(p)]) for name, p in model.named_parameters() if name not in kept}
    for buffer in model.buffers():
        held[id(buffer)] = buffer.clone() if given else buffer
    inlet = None
    ghosts: list[Ghost] = []
    needed = {id(p) for name, p in model.named_parameters() if name in kept}
    try:
        for part in _parts(model, {id(block) for block in blocks}, division.survey.blocks, needed):
            ghosts.append(Ghost(part))
            held[id(part)] = ghosts[-1]
        for index, block in enumerate(blocks):
            if index == first - 1:
                held[id(block)] = inlet = Inlet(block, returned[index].form)
            elif index < first and returned[index].keeps_shape and returned[index].problem is None:
                held[id(block)] = Passage(block, returned[index].form)
            elif index < first:
                ghosts.append(Ghost(block))
                held[id(block)] = ghosts[-1]
            elif index >= end:
                held[id(block)] = Outlet(block)
        own = copy.deepcopy(model, held)
    except (TypeError, RuntimeError) as error:
        raise RecipeError(f"parallelism.pipeline: the model's objects cannot be copied: {error}") from error
    emptied = []
    for module in own.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in left_out:
                delattr(module, name)
                emptied.append((module, name, parameter.detach()))
    return StageModel(own, inlet, tuple(ghosts), tuple(emptied))


def _parts(model: nn.Module, blocks: set[int], names: Sequence[str], needed: set[int]) -> list[nn.Module]:
    """The outermost modules outside the blocks that have parameters, but none that the stage needs."""
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


class Stage(nn.Module):
    """A stage as a module: the activation received [...] (None on the first stage) -> the activation to send, or, on
    the last stage, the sum of losses (0-d, fp32). Parameters are called `model.` and then as in the model.

    `begin` gives it the batches of a step, and `turn` says whose turn it is: micro-batch `turn` is computed by the
    next forward. What the objective returned for each, detached, is in `results` on the last stage.

    In training mode `seed(micro_batch, stage)` sets the random numbers before each forward; it must mix in the stage,
    or the stages' dropout masks would be alike. Stages draw where one process would draw on, so with dropout the
    numbers are others than in one process, but the same in every run with the same stages. `context` is made anew
    around each forward: autocast.
    """

    def __init__(
        self,
        cut: StageModel,
        division: Division,
        index: int,
        objective: Objective,
        *,
        seed: Callable[[int, int], None] | None = None,
        context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ):
        super().__init__()
        self.model = cut.model
        self.index = index
        self.last = index == division.stages - 1
        self.blocks = tuple(f"model.{name}" for name in division.blocks(index))
        self.objective = objective
        self.turn = 0
        self.results: list[Any] = []
        self._cut = (cut,)  # in a tuple, so that its modules are registered under one name only
        self._device: torch.device | None = None
        self._batches: Sequence[Any] = ()
        self._now = objective
        self._seed = seed
        self._context = context

    def begin(self, batches: Sequence[Any], objective: Objective | None = None) -> None:
        """Take the batches of the next forwards, and another objective for them if one is given."""
        self._batches = batches
        self._now = objective or self.objective
        self.results = [None] * len(batches)

    def forward(self, hidden: Tensor | None = None) -> Tensor:
        (cut,) = self._cut
        batch = self._batches[self.turn]
        device = next(tensors_in(batch)).device if hidden is None else hidden.device
        if device != self._device:
            cut.place(device)
            self._device = device
        if self._seed is not None and self.training:
            self._seed(self.turn, self.index)
        if cut.inlet is not None:
            cut.inlet.hidden = hidden
        try:
            with self._context():
                result = self._now(self.model, batch)
        except StageEnd as end:
            return self._to_send(end.hidden)
        finally:
            if cut.inlet is not None:
                cut.inlet.hidden = None
        if not self.last:
            raise RuntimeError(f"stage {self.index} computed the whole model: no block after its own was called")
        self.results[self.turn] = tuple(x.detach() if isinstance(x, Tensor) else x for x in result)
        total: Tensor = result[0]
        return total.float()

    def _to_send(self, hidden: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not hidden.requires_grad:
            # All of it is frozen. The next stage sends a gradient all the same: schedules know no other way.
            hidden = hidden.detach().requires_grad_()
        return hidden.contiguous()
