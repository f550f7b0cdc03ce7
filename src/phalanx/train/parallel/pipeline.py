"""Running the stages of a pipeline: forward and backward by the schedules of torch.distributed.pipelining, forward
alone by a loop of our own.

    gpipe        all forwards, then all backwards                        (Huang et al. 2019)
    1f1b         one forward, one backward, in turn: less memory         (Narayanan et al. 2021)
    interleaved  1f1b with several stages a rank: smaller bubbles        (Narayanan et al. 2021)
    zero-bubble  the backward in two halves, for inputs and for weights, which fills the bubbles (Qi et al. 2023 and,
                 with two stages a rank, as a V: the first and the last stage on one rank, Qi et al. 2024)

Every rank of the pipeline calls `step` or `evaluate` with the same batches. Gradients are left in the parameters as
sums over micro-batches, and added to what is there. Adding them over tied parameters, replicas or shards, dividing
and updating is the caller's. Cutting the model is `stages.py`.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from phalanx.errors import RecipeError
from phalanx.recipe.checks import divisors
from phalanx.recipe.pipelines import fitting, stages_problem
from phalanx.train.nodes import dtype_name, dtype_named, heard_from, say_to
from phalanx.train.parallel.stages import Stage
from phalanx.train.parallel.standins import tensors_in
from phalanx.train.parallel.survey import Objective

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
# Schedules that compute the backward in two halves. They need the graph of every operation, so blocks must not be
# compiled, and they add to `.grad` without running hooks that wait for gradients to accumulate.
SPLIT_BACKWARD = ("zero-bubble",)


def owners(schedule: str, stages: int, ranks: int) -> tuple[int, ...]:
    """The rank of each stage: in turn (0, 1, 0, 1), or as a V (0, 1, 1, 0) for zero-bubble with two stages a rank.
    RecipeError when the schedule cannot have so many stages on so many ranks."""
    if schedule not in SCHEDULES:
        raise RecipeError(f"parallelism.pipeline: no schedule {schedule!r}; expected {', '.join(SCHEDULES)}")
    if problem := stages_problem(schedule, stages, ranks):
        raise RecipeError(f"parallelism.pipeline: {problem}")
    if schedule == "zero-bubble" and stages == 2 * ranks:
        return tuple(min(stage, stages - 1 - stage) for stage in range(stages))
    return tuple(stage % ranks for stage in range(stages))


def check_micro_batches(schedule: str, micro_batches: int, stages: int, ranks: int, samples: int | None = None) -> None:
    """RecipeError when the schedule cannot run with so many micro-batches a step. With `samples`, how many the
    pipeline gets a step, it names the values of batch.micro_size that fit, else the numbers of micro-batches."""
    if fitting(schedule, micro_batches, stages, ranks):
        return
    if samples is None:
        near = [n for n in range(1, 2 * max(micro_batches, stages) + 1) if fitting(schedule, n, stages, ranks)]
        near = sorted(sorted(near, key=lambda n: abs(n - micro_batches))[:4])
        valid = f"{', '.join(map(str, near))} would fit"
    else:
        sizes = [m for m in divisors(samples) if fitting(schedule, samples // m, stages, ranks)]
        if sizes:
            valid = f"batch.micro_size of {', '.join(map(str, sizes))} would fit"
        else:
            valid = f"no batch.micro_size fits the {samples} samples of a step; raise batch.global_size"
    raise RecipeError(
        f"batch.micro_size: {schedule} with {stages} stages on {ranks} ranks cannot run {micro_batches} micro-batches "
        f"a step; {valid}"
    )


class Activation(NamedTuple):
    """What travels from one stage to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def example(self, device: torch.device | str) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=device, requires_grad=torch.is_grad_enabled())


class Flow(NamedTuple):
    """What a stage receives and sends: None at the ends."""

    received: Activation | None
    sent: Activation | None


class Pipeline:
    """This rank's stages of a pipeline over `group`, by number. They may have been wrapped, sharded or compiled.

    `scale` is asked in each backward for the factor of the loss (fp16). The shapes of activations are found at the
    first step, by a forward of each stage in turn on zeros, and again when a batch has another shape; all micro-batches
    of a step must have the same.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        count: int,
        *,
        schedule: str,
        group: dist.ProcessGroup,
        device: torch.device,
        scale: Callable[[], float] | None = None,
    ):
        self.stages = dict(sorted(stages.items()))
        self.count = count
        self.schedule = schedule
        self.group = group
        self.device = device
        self.owners = owners(schedule, count, group.size())
        self._rank = group.rank()
        own = [stage for stage, owner in enumerate(self.owners) if owner == self._rank]
        if own != list(self.stages):
            raise ValueError(f"rank {self._rank} has stages {own} under {schedule}, not {list(self.stages)}")
        if schedule in SPLIT_BACKWARD:
            for module in itertools.chain(*(stage.modules() for stage in stages.values())):
                # Before the backward they look for the parameters in the graph, where only unsharded ones stand:
                # those that were given back after the forward would silently get no gradient.
                if isinstance(module, FSDPModule):
                    module.set_reshard_after_forward(False, recurse=False)
        self._scale = scale
        self._flows: dict[Any, dict[int, Flow]] = {}
        self._runner: tuple[Any, Any] = (None, None)

    def step(self, batches: Sequence[Any]) -> list[Any] | None:
        """Forward and backward of all micro-batches: what the objective returned for each, detached, on the rank that
        has the last stage, None elsewhere. The first of each is the sum of losses. RecipeError when the schedule does
        not fit their number."""
        check_micro_batches(self.schedule, len(batches), self.count, self.group.size())
        runner = self._prepared(batches)
        for stage in self.stages.values():
            stage.begin(batches)
        # Losses are given out by the stage. Schedules want targets, to know the micro-batches of the last stage.
        target = torch.arange(len(batches)) if self._has_last else None
        try:
            runner.step(target=target, return_outputs=False)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            # Schedules make a RuntimeError of everything; the caller tells out of memory from a bad recipe.
            error.__cause__.add_note(str(error).strip())
            raise error.__cause__ from None
        return self._results()

    def evaluate(self, batches: Sequence[Any], objective: Objective | None = None) -> list[Any] | None:
        """Forward of any number of batches of one shape, without gradients: what the objective (that of the stages
        unless another is given) returned for each, on the rank that has the last stage, None elsewhere."""
        if not batches:
            return [] if self._has_last else None
        with torch.no_grad():
            flows = self._flows_of(batches)
            for stage in self.stages.values():
                stage.begin(batches, objective)
            self._forward(len(batches), flows)
        return self._results()

    @property
    def _has_last(self) -> bool:
        return self.count - 1 in self.stages

    def _results(self) -> list[Any] | None:
        last = self.stages.get(self.count - 1)
        for stage in self.stages.values():
            results = stage.results
            stage.begin(())  # batches are not kept until the next step
        return results if last is not None else None

    def _prepared(self, batches: Sequence[Any]) -> Any:
        """The schedule for batches of this shape and number."""
        key = (_shapes(batches[0]), len(batches))
        if self._runner[0] != key:
            flows = self._flows_of(batches)
            made = [
                _TurnTaking(
                    stage,
                    index,
                    self.count,
                    self.device,
                    input_args=() if flow.received is None else flow.received.example("meta"),
                    output_args=torch.zeros((), device="meta") if flow.sent is None else flow.sent.example("meta"),
                    group=self.group,
                )
                for (index, stage), flow in zip(self.stages.items(), flows.values(), strict=True)
            ]
            self._runner = key, _runner(self.schedule, made, len(batches), self._scaled)
        elif any(_shapes(batch) != key[0] for batch in batches):
            raise ValueError("micro-batches of one step must have the same shapes")
        return self._runner[1]

    def _scaled(self, loss: Tensor, _: Tensor) -> Tensor:
        scale = 1.0 if self._scale is None else self._scale()
        return loss if scale == 1.0 else loss * scale

    def _flows_of(self, batches: Sequence[Any]) -> dict[int, Flow]:
        """What own stages receive and send for such batches: known, or found by a forward of each stage in turn."""
        key = _shapes(batches[0])
        if any(_shapes(batch) != key for batch in batches):
            raise ValueError("micro-batches of one step must have the same shapes")
        if key not in self._flows:
            self._flows[key] = self._measured(batches[0])
        return self._flows[key]

    def _measured(self, batch: Any) -> dict[int, Flow]:
        flows: dict[int, Flow] = {}
        handed: Activation | None = None  # by the stage before, where that is on this rank
        for index, stage in self.stages.items():
            received = None
            if index > 0:
                received = handed if self.owners[index - 1] == self._rank else self._hear(self.owners[index - 1])
            sent = None
            if not stage.last:
                sent = handed = self._sent_by(stage, batch, received)
                if self.owners[index + 1] != self._rank:
                    words = [list(sent.shape), dtype_name(sent.dtype)]
                    say_to(self._global(index + 1), words, self.group, self.device)
            flows[index] = Flow(received, sent)
        return flows

    def _hear(self, rank: int) -> Activation:
        shape, dtype = heard_from(dist.get_global_rank(self.group, rank), self.group, self.device)
        return Activation(tuple(shape), dtype_named(dtype))

    def _sent_by(self, stage: Stage, batch: Any, received: Activation | None) -> Activation:
        buffers = [(buffer, buffer.clone()) for buffer in stage.buffers()]
        stage.begin([batch])
        stage.turn = 0
        hidden = stage(None if received is None else received.example(self.device))
        stage.begin(())
        with torch.no_grad():
            for buffer, before in buffers:  # running statistics have seen nothing
                buffer.copy_(before)
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return Activation(tuple(hidden.shape), hidden.dtype)

    def _global(self, stage: int) -> int:
        return dist.get_global_rank(self.group, self.owners[stage])

    def _forward(self, count: int, flows: Mapping[int, Flow]) -> None:
        """Forward of micro-batches 0..count-1 through own stages, in groups of as many micro-batches as ranks."""
        ranks = self.group.size()
        groups = [range(first, min(first + ranks, count)) for first in range(0, count, ranks)]
        orders = [[(index, turn) for index in range(self.count) for turn in group] for group in groups]
        mail = _Mail(itertools.chain(*orders), self.owners, flows, self.group, self.device)
        handed: dict[int, Tensor] = {}  # by micro-batch: from one stage of this rank to the next
        for order in orders:
            mail.next_group()
            for index, turn in order:
                if self.owners[index] != self._rank:
                    continue
                hidden = None
                if index > 0:
                    here = self.owners[index - 1] == self._rank
                    hidden = handed.pop(turn) if here else mail.receive((index - 1, turn))
                stage = self.stages[index]
                stage.turn = turn
                hidden = stage(hidden)
                if stage.last:
                    continue
                if self.owners[index + 1] == self._rank:
                    handed[turn] = hidden
                else:
                    mail.send((index, turn), hidden)
        mail.close()


Hop = tuple[int, int]  # the output of a stage for a micro-batch, on its way to the next stage


class _Mail:
    """Activations between ranks. Between any two ranks they are started in one order on both sides, the order of
    `tasks` (stage, micro-batch), as NCCL needs it: an activation that is to be received is asked for before a later
    one is sent."""

    def __init__(
        self,
        tasks: Iterable[Hop],
        owners: Sequence[int],
        flows: Mapping[int, Flow],
        group: dist.ProcessGroup,
        device: torch.device,
    ):
        self._owners, self._flows, self._group, self._device = owners, flows, group, device
        self._rank = group.rank()
        self._hops: dict[int, deque[Hop]] = {}  # by peer: not started yet
        for stage, turn in tasks:
            ends = set(owners[stage : stage + 2])
            if len(ends) == 2 and self._rank in ends:
                self._hops.setdefault((ends - {self._rank}).pop(), deque()).append((stage, turn))
        self._arriving: dict[Hop, tuple[Tensor, Any]] = {}
        self._leaving: deque[list[tuple[Tensor, Any]]] = deque()

    def receive(self, hop: Hop) -> Tensor:
        """What the previous stage sends."""
        while hop not in self._arriving:
            self._ask(self._owners[hop[0]])
        buffer, work = self._arriving.pop(hop)
        work.wait()
        return buffer

    def send(self, hop: Hop, hidden: Tensor) -> None:
        """To the next stage, without waiting for it."""
        peer = self._owners[hop[0] + 1]
        while self._hops[peer][0] != hop:
            self._ask(peer)
        self._hops[peer].popleft()
        work = dist.isend(hidden, dist.get_global_rank(self._group, peer), self._group)
        self._leaving[-1].append((hidden, work))

    def next_group(self) -> None:
        """Let go of what was sent two groups ago: it has surely been asked for, so waiting cannot block for ever."""
        self._leaving.append([])
        while len(self._leaving) > 2:
            self._wait(self._leaving.popleft())

    def close(self) -> None:
        """Wait for all that was sent."""
        for sent in self._leaving:
            self._wait(sent)

    def _ask(self, peer: int) -> None:
        hop = self._hops[peer].popleft()
        activation = self._flows[hop[0] + 1].received
        assert activation is not None
        buffer = activation.example(self._device)
        self._arriving[hop] = buffer, dist.irecv(buffer, dist.get_global_rank(self._group, peer), self._group)

    def _wait(self, sent: list[tuple[Tensor, Any]]) -> None:
        for _, work in sent:
            work.wait()


class _TurnTaking(PipelineStage):
    """Tells its module which micro-batch is computed, as a number: an index given as a tensor would have to be read
    back from the device."""

    def __init__(self, stage: Stage, *args: Any, **kwargs: Any):
        super().__init__(stage, *args, **kwargs)
        self.stage = stage

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.stage.turn = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)


def _runner(schedule: str, stages: list[Any], micro_batches: int, loss: Callable[..., Tensor]) -> Any:
    """A schedule of torch's. Losses are sums: gradients are not to be divided by the number of micro-batches."""
    if schedule == "gpipe":
        return ScheduleGPipe(stages[0], micro_batches, loss, scale_grads=False)
    if schedule == "1f1b":
        return Schedule1F1B(stages[0], micro_batches, loss, scale_grads=False)
    if schedule == "interleaved":
        return ScheduleInterleaved1F1B(stages, micro_batches, loss, scale_grads=False)
    if len(stages) == 2:
        return ScheduleZBVZeroBubble(stages, micro_batches, loss, scale_grads=False)
    return ScheduleInterleavedZeroBubble(stages, micro_batches, loss, scale_grads=False)


def _shapes(batch: Any) -> Any:
    return tuple((tuple(x.shape), x.dtype) for x in tensors_in(batch))
