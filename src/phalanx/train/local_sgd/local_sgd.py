"""Local SGD and DiLoCo: workers take inner steps without communication, and synchronize every `sync_every` steps.

A round starts with the same weights on all workers. After `sync_every` inner steps, and after the last step of the run,
the workers all-reduce their pseudo-gradients (round start minus current weights), and the outer optimizer applies the
mean: as plain averaging under `average` (McMahan et al. 2017, arXiv 1602.05629; Stich 2019, arXiv 1805.09767), or by
SGD with Nesterov momentum under `diloco` (Douillard et al. 2023, arXiv 2311.08105). The sums are fp32 and are sent in
buckets, by the gradient synchronization algorithms.

All weights are sent at once, or fragments in turn, which lowers the peak bandwidth. Sums may be applied some steps
after they were sent, while workers continue with inner steps (Streaming DiLoCo: Douillard et al. 2025, 2501.18512).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.compat import call_foreach
from phalanx.recipe.schema import OuterOptimizerConfig
from phalanx.train.distributed.dtensor_utils import to_local
from phalanx.train.distributed.process_group import clone_group
from phalanx.train.grad_sync.algorithms import CommContext
from phalanx.train.grad_sync.buckets import Bucket, make_buckets, make_parameter_views
from phalanx.train.grad_sync.comm_queue import CommQueue
from phalanx.train.grad_sync.compression import GRAD_SYNC_ALGORITHMS
from phalanx.train.ops.collectives import Group


@dataclass(frozen=True)
class SyncSchedule:
    """Each of `num_fragments` is sent every `sync_every` steps, at evenly spaced offsets, and applied `sync_delay`
    steps later, before the next fragment is sent. After `last_step`, the last of the run, all are applied, so that the
    run ends with the same weights everywhere. In the first `warmup_steps` steps all are sent and applied after each
    step: weights change fast then, and the updates of separate workers do not add up (post-local SGD: Lin et al. 2020,
    arXiv 1808.07217)."""

    sync_every: int
    last_step: int
    num_fragments: int = 1
    sync_delay: int = 0
    warmup_steps: int = 0

    @property
    def is_streaming(self) -> bool:
        """Whether some weights differ between workers after every step from `warmup_steps` to the last."""
        return self.num_fragments > 1 or self.sync_delay > 0

    def fragments_starting(self, step: int) -> list[int]:
        """Return the fragments that are sent after this step."""
        if step == self.last_step or 0 < step <= self.warmup_steps:
            return list(range(self.num_fragments))
        return [
            fragment
            for fragment in range(self.num_fragments)
            if step > 0 and step % self.sync_every == fragment * self.sync_every // self.num_fragments
        ]

    def fragments_in_flight(self, step: int) -> list[int]:
        """Return the fragments that were sent by the end of this step and are not applied yet."""
        if step == self.last_step or not self.sync_delay:
            return []
        start_steps = range(max(self.warmup_steps, step - self.sync_delay) + 1, step + 1)
        return [fragment for each in start_steps for fragment in self.fragments_starting(each)]

    def steps_in_sync(self, step: int) -> range:
        """Return the steps with evaluations and saves that are due after this step. If all weights are synchronized at
        once, these are the steps of the round that ends here."""
        if self.is_streaming or step <= self.warmup_steps:
            return range(step, step + 1)
        first_step = max(self.warmup_steps, (step - 1) // self.sync_every * self.sync_every) + 1
        return range(first_step, step + 1) if self.fragments_starting(step) else range(0)


AVERAGING_OUTER_OPTIMIZER = OuterOptimizerConfig(lr=1.0, momentum=0.0)
"""Outer step that sets the weights to the mean over all workers."""
ALGORITHM_BY_SYNC_DTYPE = {"fp32": "all-reduce", "bf16": "bf16", "int8": "int8"}
"""Gradient synchronization algorithm that sends pseudo-gradients in each dtype."""
FRAGMENT_UPDATE_ALPHA = 0.5
"""Weight of a worker's own parameters when a delayed sum arrives, after which it has taken more inner steps (Douillard
et al. 2025, section 2.3)."""


class LocalSGD:
    """Local SGD on one worker, by a `schedule`. At construction and at `start_round` all workers must hold the same
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
        bucket_bytes = min(bucket_bytes, size / schedule.num_fragments)
        self.buckets = make_buckets(parameters, bucket_bytes, world_size, dtype=torch.float32)
        for bucket in self.buckets:
            if self._factory.uses_error_feedback:
                bucket.enable_error_feedback()
        self._global_params = [torch.zeros_like(bucket.buffer.flat) for bucket in self.buckets]
        has_momentum = bool(outer_optimizer.momentum)
        self._outer_momenta = [torch.zeros_like(start) for start in self._global_params if has_momentum]
        self._comm_queue: CommQueue | None = None
        self._in_flight: list[int] = []  # buckets that were sent and not applied yet
        self._in_flight_received = True  # whether their sums have arrived
        self.in_sync = True
        self.start_round()

    def after_step(self, step: int, updated: bool) -> bool:
        """Send and apply what is due after this step; return whether there was anything. Every worker calls it after
        every step. `updated`: the step changed this worker's weights."""
        self.in_sync = self.in_sync and not updated
        last, in_flight = step == self.schedule.last_step, self.schedule.fragments_in_flight(step)
        completed = set(self._in_flight) - set(self._buckets_of(in_flight))
        if completed:
            self._complete_sync(FRAGMENT_UPDATE_ALPHA)
        starting = self.schedule.fragments_starting(step)
        if starting:
            self._start_sync(self._buckets_of(starting))
            if not set(starting) & set(in_flight):
                self._complete_sync(outer=AVERAGING_OUTER_OPTIMIZER if step <= self.schedule.warmup_steps else None)
            self.in_sync = last or step <= self.schedule.warmup_steps or not self.schedule.is_streaming
        return bool(completed or starting)

    @torch.no_grad()
    def start_round(self) -> None:
        """Start a round with the current weights, which must be equal on all workers."""
        for bucket, start in zip(self.buckets, self._global_params, strict=True):
            call_foreach("copy_", _bucket_views(bucket, start), [to_local(p) for p in bucket.parameters])
        self.in_sync = True

    @torch.no_grad()
    def step_outer_from_mean(self) -> None:
        """Take the outer step when this worker's weights are the mean over all already, without communication. Sums in
        flight are discarded: their pseudo-gradients are still part of the weights."""
        self.discard_in_flight()
        for bucket_index in range(len(self.buckets)):
            self._compute_pseudogradient(bucket_index)
            self._outer_step(bucket_index, 0.0, self._outer_optimizer)
        self.in_sync = True

    @contextmanager
    def use_global_params(self) -> Iterator[None]:
        """Return a context in which the parameters are the last synchronized weights."""
        if self.in_sync:
            yield
            return
        own = [[to_local(p).clone() for p in bucket.parameters] for bucket in self.buckets]
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
        """Return the sums in flight, fp32, live, by parameter. Waits until they have arrived."""
        self._wait_in_flight()
        found = self._views_by_param([bucket.buffer.flat for bucket in self.buckets])
        return {p: found[p] for bucket_index in self._in_flight for p in self.buckets[bucket_index].parameters}

    def restore_in_flight(self, step: int) -> dict[nn.Parameter, Tensor]:
        """Return buffers, as `in_flight_pseudogradients`, to fill for a run that resumes after this step."""
        self.discard_in_flight()
        self._in_flight = self._buckets_of(self.schedule.fragments_in_flight(step))
        return self.in_flight_pseudogradients()

    def in_flight_params(self, step: int) -> list[nn.Parameter]:
        """Return the parameters of which sums are in flight after this step."""
        bucket_indices = self._buckets_of(self.schedule.fragments_in_flight(step))
        return [p for bucket_index in bucket_indices for p in self.buckets[bucket_index].parameters]

    def global_params(self) -> dict[nn.Parameter, Tensor]:
        """Return the weights at the start of the round, fp32, live."""
        return self._views_by_param(self._global_params)

    def outer_momenta(self) -> dict[nn.Parameter, Tensor]:
        """Return the momenta of the outer optimizer, fp32, live; empty if it has none."""
        return self._views_by_param(self._outer_momenta) if self._outer_momenta else {}

    def discard_in_flight(self) -> None:
        """Forget the sums in flight."""
        self._wait_in_flight()
        self._in_flight = []

    def residuals(self) -> dict[nn.Parameter, Tensor]:
        """Return this worker's error feedback of pseudo-gradients, live; empty if the algorithm has none."""
        if not self._factory.uses_error_feedback:
            return {}
        return self._views_by_param([b.residual for b in self.buckets if b.residual is not None])

    def close(self) -> None:
        """Release the process groups."""
        if self._comm_queue is not None:
            self._comm_queue.close()
        self._comm_queue = self._group = None

    def _buckets_of(self, fragments: Sequence[int]) -> list[int]:
        """Return the buckets of these fragments. Assigned in turn, so that each fragment has layers of all depths."""
        return [index for index in range(len(self.buckets)) if index % self.schedule.num_fragments in fragments]

    @torch.no_grad()
    def _start_sync(self, bucket_indices: list[int]) -> None:
        """Send this worker's pseudo-gradients of some buckets."""
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
        """Wait until the sums in flight have arrived."""
        if not self._in_flight_received and self._comm_queue is not None:
            self._comm_queue.wait_all()
        self._in_flight_received = True

    @torch.no_grad()
    def _complete_sync(self, own_weight: float = 0.0, outer: OuterOptimizerConfig | None = None) -> None:
        """Apply the outer step to the buckets in flight; `own_weight` of this worker's own parameters is kept."""
        self._wait_in_flight()
        for bucket_index in self._in_flight:
            self.buckets[bucket_index].buffer.flat.div_(self._world_size)
            self._outer_step(bucket_index, own_weight, outer or self._outer_optimizer)
        self._in_flight = []

    def _get_comm_queue(self) -> CommQueue | None:
        """Create the queue at the first synchronization. With `sync_delay` it gets its own group, because steps
        communicate at the same time."""
        if self._world_size > 1 and self._comm_queue is None:
            device = self.buckets[0].buffer.flat.device
            group = clone_group(self._group) if self.schedule.sync_delay else self._group
            second_group = clone_group(self._group) if self._factory.is_two_phase else group
            comm = CommContext(self._rank, self._world_size, group, second_group, device)
            self._comm_queue = CommQueue(self._factory(comm, self.buckets), use_threads=comm.on_cpu)
        return self._comm_queue

    def _compute_pseudogradient(self, bucket_index: int) -> None:
        """Write the pseudo-gradient to the bucket: the round's start minus the current parameters."""
        bucket, flat = self.buckets[bucket_index], self.buckets[bucket_index].buffer.flat
        call_foreach("copy_", bucket.buffer.views, [to_local(p) for p in bucket.parameters])
        torch.sub(self._global_params[bucket_index], flat, out=flat)

    def _outer_step(self, bucket_index: int, own_weight: float, outer: OuterOptimizerConfig) -> None:
        """Apply the outer gradient to the round's start, as torch.optim.SGD does. The result is the next start and,
        except for the part kept by `own_weight`, the parameters."""
        bucket, start = self.buckets[bucket_index], self._global_params[bucket_index]
        direction = bucket.buffer.flat
        if outer.momentum:
            momentum = self._outer_momenta[bucket_index].mul_(outer.momentum).add_(direction)
            direction.add_(momentum, alpha=outer.momentum)
        start.sub_(direction, alpha=outer.lr)
        local_params, views = [to_local(p) for p in bucket.parameters], _bucket_views(bucket, start)
        before = [p.detach().clone() for p in local_params] if own_weight else []
        call_foreach("copy_", local_params, views)
        call_foreach("copy_", views, local_params)  # as rounded to the parameters' dtype
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
