"""Fewer exchanges: workers take steps of their own, and now and then agree on weights.

A round begins with the same weights everywhere. After so many steps, and after the last of a run, workers tell each
other how far they have moved, and an outer step follows the mean of that: all the way under `average` (McMahan et al.
2017, arXiv 1602.05629; Stich 2019, arXiv 1805.09767), by SGD with Nesterov momentum under `diloco` (Douillard et al.
2023, arXiv 2311.08105). Sums are fp32 and travel in buckets, by the strategies for gradients. `sync_schedule.py` has
more ways than all weights at once.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from phalanx.compat import call_foreach
from phalanx.recipe.schema import OuterOptimizerConfig
from phalanx.train.distributed.environment import clone_group
from phalanx.train.grad_sync.algorithms.base import CommContext
from phalanx.train.grad_sync.buckets import Bucket, make_buckets, make_parameter_views
from phalanx.train.grad_sync.comm_queue import CommQueue
from phalanx.train.grad_sync.registry import GRAD_SYNC_ALGORITHMS
from phalanx.train.local_sgd.sync_schedule import SyncSchedule
from phalanx.train.ops.collectives import Group
from phalanx.train.optim.dtensor_utils import to_local

AVERAGING_OUTER_OPTIMIZER = OuterOptimizerConfig(lr=1.0, momentum=0.0)
"""The outer step that takes the mean of all workers' weights."""
ALGORITHM_BY_SYNC_DTYPE = {"fp32": "all-reduce", "bf16": "bf16", "int8": "int8"}
"""The strategy that carries what travels as this."""
FRAGMENT_UPDATE_ALPHA = 0.5
"""How much a worker keeps of its own weights when a mean lands of what it told some steps ago, during which it went on
(Douillard et al. 2025, section 2.3)."""


class LocalSGD:
    """A worker's part in what a `schedule` says. When it is made, and at `start_round`, all workers hold the same
    weights. `in_sync`: whether they do now."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        rank: int,
        world_size: int,
        schedule: SyncSchedule,
        outer_optimizer: OuterOptimizerConfig = AVERAGING_OUTER_OPTIMIZER,
        sync_dtype: str = "fp32",
        bucket_bytes: float = 25 * 2**20,
        group: Group = None,
    ):
        self.schedule = schedule
        self._rank, self._world_size, self._outer_optimizer, self._group = rank, world_size, outer_optimizer, group
        self._factory = GRAD_SYNC_ALGORITHMS[ALGORITHM_BY_SYNC_DTYPE[sync_dtype]]
        size = sum(to_local(p).numel() * p.element_size() for p in parameters)
        self.buckets = make_buckets(
            parameters, min(bucket_bytes, size / schedule.num_fragments), world_size, dtype=torch.float32
        )
        for bucket in self.buckets:
            if self._factory.uses_error_feedback:
                bucket.enable_error_feedback()
        self._global_params = [torch.zeros_like(bucket.buffer.flat) for bucket in self.buckets]
        self._outer_momenta = (
            [torch.zeros_like(start) for start in self._global_params] if outer_optimizer.momentum else []
        )
        self._comm_queue: CommQueue | None = None
        self._in_flight: list[int] = []  # buckets that have left and not landed
        self._in_flight_received = True  # their sums are in them
        self.in_sync = True
        self.start_round()

    def after_step(self, step: int, updated: bool) -> bool:
        """After this step: send the others what is due, and take what has come; whether there was anything. Every
        worker calls it after every step; `updated`: the step changed its weights."""
        self.in_sync = self.in_sync and not updated
        last, in_flight = step == self.schedule.last_step, self.schedule.fragments_in_flight(step)
        completed = [
            bucket_index for bucket_index in self._in_flight if self._fragment_of(bucket_index) not in in_flight
        ]
        if completed:
            self._complete_sync(FRAGMENT_UPDATE_ALPHA)
        starting = set(self.schedule.fragments_starting(step))
        if starting:
            self._start_sync(
                [
                    bucket_index
                    for bucket_index in range(len(self.buckets))
                    if self._fragment_of(bucket_index) in starting
                ]
            )
            if not starting & set(in_flight):
                self._complete_sync(outer=AVERAGING_OUTER_OPTIMIZER if step <= self.schedule.warmup_steps else None)
            self.in_sync = last or step <= self.schedule.warmup_steps or not self.schedule.is_streaming
        return bool(completed or starting)

    @torch.no_grad()
    def start_round(self) -> None:
        """A round begins with the weights of now, which all workers hold."""
        for bucket, start in zip(self.buckets, self._global_params, strict=True):
            call_foreach("copy_", _bucket_views(bucket, start), [to_local(p) for p in bucket.parameters])
        self.in_sync = True

    @torch.no_grad()
    def step_outer_from_mean(self) -> None:
        """The outer step where the weights of this worker are the mean of all: nothing has to travel. Sums that have
        not landed are of no use: what they told of is still in the weights."""
        self.discard_in_flight()
        for bucket_index in range(len(self.buckets)):
            self._compute_pseudogradient(bucket_index)
            self._outer_step(bucket_index, 0.0, self._outer_optimizer)
        self.in_sync = True

    def use_global_params(self) -> AbstractContextManager[None]:
        """Within it parameters are what all workers agreed on last."""
        return nullcontext() if self.in_sync else self._swap_in_global_params()

    @contextmanager
    def _swap_in_global_params(self) -> Iterator[None]:
        own = [[to_local(p).detach().clone() for p in bucket.parameters] for bucket in self.buckets]
        try:
            self._copy_to_params([_bucket_views(*each) for each in zip(self.buckets, self._global_params, strict=True)])
            yield
        finally:
            self._copy_to_params(own)

    @torch.no_grad()
    def _copy_to_params(self, values: Sequence[list[Tensor]]) -> None:
        for bucket, each in zip(self.buckets, values, strict=True):
            call_foreach("copy_", [to_local(p) for p in bucket.parameters], each)

    def in_flight_pseudogradients(self) -> dict[nn.Parameter, Tensor]:
        """Sums that have not landed, fp32, live, of how far workers had moved; it waits until they have come."""
        self._wait_in_flight()
        found = self._views_by_param([bucket.buffer.flat for bucket in self.buckets])
        return {p: found[p] for bucket_index in self._in_flight for p in self.buckets[bucket_index].parameters}

    def restore_in_flight(self, step: int) -> dict[nn.Parameter, Tensor]:
        """As `flying`, of a run that goes on after this step: the sums are to be written there."""
        self.discard_in_flight()
        self._in_flight = self._in_flight_buckets(step)
        return self.in_flight_pseudogradients()

    def in_flight_params(self, step: int) -> list[nn.Parameter]:
        """Whose sums are flying after this step."""
        return [p for bucket_index in self._in_flight_buckets(step) for p in self.buckets[bucket_index].parameters]

    def _in_flight_buckets(self, step: int) -> list[int]:
        in_flight = self.schedule.fragments_in_flight(step)
        return [
            bucket_index for bucket_index in range(len(self.buckets)) if self._fragment_of(bucket_index) in in_flight
        ]

    def global_params(self) -> dict[nn.Parameter, Tensor]:
        """The weights with which the round began, fp32, live."""
        return self._views_by_param(self._global_params)

    def outer_momenta(self) -> dict[nn.Parameter, Tensor]:
        """The outer optimizer's state, fp32, live; empty where it has none."""
        return self._views_by_param(self._outer_momenta) if self._outer_momenta else {}

    def discard_in_flight(self) -> None:
        """Nothing is flying any more."""
        self._wait_in_flight()
        self._in_flight = []

    def residuals(self) -> dict[nn.Parameter, Tensor]:
        """What this worker has not told yet of how far it moved, live; empty where nothing is held back."""
        return (
            self._views_by_param([b.residual for b in self.buckets if b.residual is not None])
            if self._factory.uses_error_feedback
            else {}
        )

    def close(self) -> None:
        """Let go of the group."""
        if self._comm_queue is not None:
            self._comm_queue.close()
        self._comm_queue = self._group = None

    def _fragment_of(self, bucket: int) -> int:
        """To which one a bucket belongs: by turns, so that each has some of all depths of a model."""
        return bucket % self.schedule.num_fragments

    @torch.no_grad()
    def _start_sync(self, bucket_indices: list[int]) -> None:
        """Tell the others how far this worker has moved."""
        comm_queue = self._get_comm_queue()
        for bucket_index in bucket_indices:
            bucket = self.buckets[bucket_index]
            self._compute_pseudogradient(bucket_index)
            if bucket.residual is not None:
                bucket.residual.add_(bucket.buffer.flat)
            if comm_queue is not None:
                comm_queue.submit(bucket_index, bucket)
            elif bucket.residual is not None:
                bucket.buffer.flat.copy_(bucket.residual)
                bucket.residual.zero_()
        self._in_flight, self._in_flight_received = bucket_indices, comm_queue is None

    def _wait_in_flight(self) -> None:
        """Wait until the sums are there."""
        if not self._in_flight_received and self._comm_queue is not None:
            self._comm_queue.wait_all()
        self._in_flight_received = True

    @torch.no_grad()
    def _complete_sync(self, own_weight: float = 0.0, outer: OuterOptimizerConfig | None = None) -> None:
        """The outer step of what is flying, or another; this worker keeps so much of its own weights."""
        self._wait_in_flight()
        for bucket_index in self._in_flight:
            self.buckets[bucket_index].buffer.flat.div_(self._world_size)
            self._outer_step(bucket_index, own_weight, outer or self._outer_optimizer)
        self._in_flight = []

    def _get_comm_queue(self) -> CommQueue | None:
        """When something leaves for the first time: meet the others in the groups of the strategy. What takes its time
        has one of its own, for steps have messages of theirs meanwhile."""
        if self._world_size > 1 and self._comm_queue is None:
            device = self.buckets[0].buffer.flat.device
            group = clone_group(self._group) if self.schedule.sync_delay else self._group
            second_group = clone_group(self._group) if self._factory.is_two_phase else group
            comm = CommContext(self._rank, self._world_size, group, second_group, device, range(self._world_size))
            self._comm_queue = CommQueue(self._factory(comm, self.buckets), use_threads=comm.on_cpu)
        return self._comm_queue

    def _compute_pseudogradient(self, bucket_index: int) -> None:
        """Leave in the bucket how far its parameters have moved against their direction: the outer gradient."""
        bucket, flat = self.buckets[bucket_index], self.buckets[bucket_index].buffer.flat
        call_foreach("copy_", bucket.buffer.views, [to_local(p) for p in bucket.parameters])
        torch.sub(self._global_params[bucket_index], flat, out=flat)

    def _outer_step(self, bucket_index: int, own_weight: float, outer: OuterOptimizerConfig) -> None:
        """Follow the outer gradient from where the round began, as torch.optim.SGD does; the next begins there, and
        parameters with it, but for what is kept of their `own_weight`."""
        bucket, start, direction = (
            self.buckets[bucket_index],
            self._global_params[bucket_index],
            self.buckets[bucket_index].buffer.flat,
        )
        if outer.momentum:
            momentum = self._outer_momenta[bucket_index].mul_(outer.momentum).add_(direction)
            direction.add_(momentum, alpha=outer.momentum)
        start.sub_(direction, alpha=outer.lr)
        local_params, views = [to_local(p) for p in bucket.parameters], _bucket_views(bucket, start)
        before = [p.detach().clone() for p in local_params] if own_weight else []
        call_foreach("copy_", local_params, views)
        call_foreach("copy_", views, local_params)  # rounded, as parameters are
        if own_weight:
            call_foreach("lerp_", local_params, before, own_weight)

    def _views_by_param(self, flats: Sequence[Tensor]) -> dict[nn.Parameter, Tensor]:
        return {
            parameter: view
            for bucket, flat in zip(self.buckets, flats, strict=True)
            for parameter, view in zip(bucket.parameters, _bucket_views(bucket, flat), strict=True)
        }


def _bucket_views(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    return make_parameter_views(flat, bucket.parameters, bucket.offsets)
