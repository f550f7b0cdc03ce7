"""Run the stages of a pipeline: train with the schedules of torch.distributed.pipelining, evaluate in a forward loop.

    gpipe        all forwards, then all backwards                         (Huang et al. 2019)
    1f1b         alternate one forward and one backward: less memory      (Narayanan et al. 2021)
    interleaved  1f1b with several stages per rank: smaller bubbles       (Narayanan et al. 2021)
    zero-bubble  split the backward into input and weight gradients, which fills the bubbles (Qi et al. 2023 and, with
                 two stages per rank, as a V: first and last stage on one rank, Qi et al. 2024)

Every rank of the pipeline calls `step` or `evaluate` with the same batches. Gradients are accumulated in the parameters
as sums over micro-batches. The caller reduces them over tied parameters, replicas and shards, divides and updates.
`partition.py` cuts the model.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
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

from phalanx.pytree import iterate_tensors
from phalanx.train.distributed.object_collectives import format_dtype, parse_dtype, recv_json, send_json
from phalanx.train.distributed.pipeline.dataflow import ModelLossFn
from phalanx.train.distributed.pipeline.partition import StageModule

# Schedules that split the backward. They need the graph of every operation, so blocks must not be compiled, and they
# add to `.grad` without running post-accumulate hooks.
SPLIT_BACKWARD_SCHEDULES = ("zero-bubble",)


def assign_stage_owners(schedule: str, stages: int, ranks: int) -> tuple[int, ...]:
    """Return the rank of each stage: round-robin (0, 1, 0, 1), or as a V (0, 1, 1, 0) for zero-bubble with two stages
    per rank."""
    if schedule == "zero-bubble" and stages == 2 * ranks:
        return tuple(min(stage, stages - 1 - stage) for stage in range(stages))
    return tuple(stage % ranks for stage in range(stages))


class ActivationSpec(NamedTuple):
    """Shape and dtype of the activation between two stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def make_example(self, device: torch.device | str) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=device, requires_grad=torch.is_grad_enabled())


class StageIO(NamedTuple):
    """What a stage receives and sends: None at the ends of the pipeline."""

    received: ActivationSpec | None
    sent: ActivationSpec | None


class Pipeline:
    """This rank's stages of a pipeline over `group`, by stage number. They may be wrapped, sharded or compiled.

    `get_loss_scale` is called in each backward for the loss scale (fp16). Activation shapes are found in the first
    step, by a forward of each stage in turn on zeros, and again if the batch has another shape. All micro-batches of a
    step must have the same shape.
    """

    def __init__(
        self,
        stages: Mapping[int, StageModule],
        num_stages: int,
        *,
        schedule: str,
        group: dist.ProcessGroup,
        device: torch.device,
        get_loss_scale: Callable[[], float] | None = None,
    ):
        self.stages = dict(sorted(stages.items()))
        self.num_stages = num_stages
        self.schedule = schedule
        self.group = group
        self.device = device
        self.stage_owners = assign_stage_owners(schedule, num_stages, group.size())
        self._rank = group.rank()
        if schedule in SPLIT_BACKWARD_SCHEDULES:
            for module in itertools.chain(*(stage.modules() for stage in stages.values())):
                # These schedules look up parameters in the graph before the backward. It has only unsharded ones;
                # parameters that were freed after the forward would silently get no gradient.
                if isinstance(module, FSDPModule):
                    module.set_reshard_after_forward(False, recurse=False)
        self._get_loss_scale = get_loss_scale
        self._stage_ios: dict[Any, dict[int, StageIO]] = {}
        self._torch_schedule: tuple[Any, Any] = (None, None)

    def step(self, batches: Sequence[Any]) -> list[Any] | None:
        """Run forward and backward of all micro-batches. Return, on the rank with the last stage, the loss function's
        result for each, detached (the first element is the sum of losses); None on other ranks. The recipe's checks
        ensure that the schedule supports their number."""
        torch_schedule = self._get_torch_schedule(batches)
        for stage in self.stages.values():
            stage.set_batches(batches)
        # The stage computes the losses. Schedules need targets, from which they know the micro-batch in the last stage.
        target = torch.arange(len(batches)) if self.num_stages - 1 in self.stages else None
        try:
            torch_schedule.step(target=target, return_outputs=False)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
                # Schedules wrap every error in a RuntimeError; the caller must see the cause, such as out of memory.
            error.__cause__.add_note(str(error).strip())
            raise error.__cause__ from None
        return self._take_results()

    @torch.no_grad()
    def evaluate(self, batch: Any, loss_fn: ModelLossFn | None = None) -> Any:
        """Run forward of a batch, without gradients. Return, on the rank with the last stage, the result of the loss
        function (`loss_fn`, or that of the stages); None on other ranks. A rank does not wait for later stages, so
        several batches in a row fill the pipeline."""
        stage_ios = self._get_stage_ios(batch)
        hidden: Tensor | None = None
        for index, stage in self.stages.items():
            stage.set_batches([batch], loss_fn)
            stage.micro_batch_index = 0
            received = stage_ios[index].received
            if received is not None and self.stage_owners[index - 1] != self._rank:
                hidden = received.make_example(self.device)
                dist.recv(hidden, self._global_rank(index - 1), self.group)
            hidden = stage(hidden)
            if not stage.is_last and self.stage_owners[index + 1] != self._rank:
                dist.send(hidden, self._global_rank(index + 1), self.group)
        results = self._take_results()
        return None if results is None else results[0]

    def _take_results(self) -> list[Any] | None:
        last = self.stages.get(self.num_stages - 1)
        for stage in self.stages.values():
            results = stage.results
            stage.set_batches(())  # do not keep the batches in memory until the next step
        return results if last is not None else None

    def _get_torch_schedule(self, batches: Sequence[Any]) -> Any:
        """Return the schedule for batches of this shape and number."""
        key = (_tensor_shapes(batches[0]), len(batches))
        if any(_tensor_shapes(batch) != key[0] for batch in batches):
            raise ValueError("micro-batches of one step must have the same shapes")
        if self._torch_schedule[0] != key:
            stage_ios = self._get_stage_ios(batches[0])
            made = [
                _IndexedStage(
                    stage,
                    index,
                    self.num_stages,
                    self.device,
                    input_args=() if stage_io.received is None else stage_io.received.make_example("meta"),
                    output_args=torch.zeros((), device="meta")
                    if stage_io.sent is None
                    else stage_io.sent.make_example("meta"),
                    group=self.group,
                )
                for (index, stage), stage_io in zip(self.stages.items(), stage_ios.values(), strict=True)
            ]
            self._torch_schedule = key, _make_torch_schedule(self.schedule, made, len(batches), self._scale_loss)
        return self._torch_schedule[1]

    def _scale_loss(self, loss: Tensor, _: Tensor) -> Tensor:
        scale = 1.0 if self._get_loss_scale is None else self._get_loss_scale()
        return loss if scale == 1.0 else loss * scale

    def _get_stage_ios(self, batch: Any) -> dict[int, StageIO]:
        """Return what this rank's stages receive and send for such batches: cached, or found by a forward on zeros."""
        key = _tensor_shapes(batch)
        if key not in self._stage_ios:
            self._stage_ios[key] = self._infer_stage_ios(batch)
        return self._stage_ios[key]

    def _infer_stage_ios(self, batch: Any) -> dict[int, StageIO]:
        stage_ios: dict[int, StageIO] = {}
        local_output: ActivationSpec | None = None  # of the previous stage, if it is on this rank
        for index, stage in self.stages.items():
            received = sent = None
            if index > 0 and self.stage_owners[index - 1] == self._rank:
                received = local_output
            elif index > 0:
                shape, dtype = recv_json(self._global_rank(index - 1), self.group, self.device)
                received = ActivationSpec(tuple(shape), parse_dtype(dtype))
            if not stage.is_last:
                sent = local_output = self._infer_output(stage, batch, received)
                if self.stage_owners[index + 1] != self._rank:
                    spec = [list(sent.shape), format_dtype(sent.dtype)]
                    send_json(self._global_rank(index + 1), spec, self.group, self.device)
            stage_ios[index] = StageIO(received, sent)
        return stage_ios

    def _infer_output(self, stage: StageModule, batch: Any, received: ActivationSpec | None) -> ActivationSpec:
        buffers = [(buffer, buffer.clone()) for buffer in stage.buffers()]
        stage.set_batches([batch])
        stage.micro_batch_index = 0
        hidden = stage(None if received is None else received.make_example(self.device))
        stage.set_batches(())
        with torch.no_grad():
            for buffer, before in buffers:  # undo the update of running statistics
                buffer.copy_(before)
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return ActivationSpec(tuple(hidden.shape), hidden.dtype)

    def _global_rank(self, stage: int) -> int:
        return dist.get_global_rank(self.group, self.stage_owners[stage])


class _IndexedStage(PipelineStage):
    """Sets the index of the micro-batch on its module as a Python number: an index given as a tensor would have to be
    read back from the device."""

    def __init__(self, stage: StageModule, *args: Any, **kwargs: Any):
        super().__init__(stage, *args, **kwargs)
        self.stage = stage

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.stage.micro_batch_index = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)


def _make_torch_schedule(schedule: str, stages: list[Any], micro_batches: int, loss: Callable[..., Tensor]) -> Any:
    """Make a schedule of torch. Losses are sums: gradients must not be divided by the number of micro-batches."""
    if schedule in ("gpipe", "1f1b"):
        single = ScheduleGPipe if schedule == "gpipe" else Schedule1F1B
        return single(stages[0], micro_batches, loss, scale_grads=False)
    if schedule == "interleaved":
        return ScheduleInterleaved1F1B(stages, micro_batches, loss, scale_grads=False)
    zero_bubble = ScheduleZBVZeroBubble if len(stages) == 2 else ScheduleInterleavedZeroBubble
    return zero_bubble(stages, micro_batches, loss, scale_grads=False)


def _tensor_shapes(batch: Any) -> Any:
    return tuple((tuple(x.shape), x.dtype) for x in iterate_tensors(batch))
