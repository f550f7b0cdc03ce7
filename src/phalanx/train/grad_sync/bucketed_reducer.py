"""Bucketed gradient reducer: sum gradients over micro-batches and workers, overlapped with backward.

Buckets are fixed before step 0. Hooks count the gradients as backward makes them, including those that FSDP has
reduced. When a bucket has all of its gradients, they are copied in with one foreach call (one Python copy per gradient
would cost small models 1 %), and the bucket is sent while backward continues. Buckets are always sent in order.
(torch's DDP rebuilds its buckets after the first step, which changes the order of addition, and therefore bits, when a
run resumes.)

`fixed-world`: micro-batches are accumulated locally, then an algorithm sums each bucket: the same bits for the same
number of workers.
`elastic`: micro-batch gradients are added in the fixed tree of `DeterministicTree`, first on the worker
and then over workers.
"""

import itertools
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.data.prefetch import micro_batch_range
from phalanx.errors import RecipeError
from phalanx.recipe.devices import device_kind_of
from phalanx.train.distributed.dtensor_utils import to_local, total_norm
from phalanx.train.distributed.process_group import clone_group
from phalanx.train.grad_sync.algorithms import (
    CommContext,
    DeterministicTree,
    GradSyncAlgorithm,
    count_merges_after,
    cover_range,
)
from phalanx.train.grad_sync.buckets import Bucket, make_buckets
from phalanx.train.grad_sync.comm_queue import CommQueue
from phalanx.train.grad_sync.compression import GRAD_SYNC_ALGORITHMS, make_projection_bases
from phalanx.train.ops.collectives import Group


class BucketedReducer:
    """Sum gradients over micro-batches and workers.

    For every micro-batch: `begin_backward`, backward, `end_backward`; then once `reduce_gradients`, after which every
    parameter's `.grad` is a view of the sum. Before the first micro-batch no parameter may have a `.grad`. A parameter
    without a gradient counts as zero. Under `fixed-world`, values written to `metric_slots` (fp32) before the last
    backward are summed with the gradients; it is None if the algorithm cannot carry them.

    Each worker has its `feed.micro_batch_range` of the micro-batches; `group` is the data-parallel group (None: the
    world). Of a parameter that FSDP shards, the local shard is reduced, over the workers with the same shard.
    `powersgd` sends uncompressed gradients in the first `warmup_steps` steps, then with rank `powersgd_rank`;
    `start_step` sets the step. Raises RecipeError if one backward makes a gradient twice, as reentrant activation
    checkpointing can.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        rank: int,
        world_size: int,
        micro_batches: int,
        is_elastic: bool,
        bucket_bytes: float = 25 * 2**20,
        group: Group = None,
        num_metric_slots: int = 0,
        algorithm: str = "all-reduce",
        powersgd_rank: int = 4,
        warmup_steps: int = 0,
    ):
        self.rank = rank
        self.world_size = self.num_norm_samples = world_size
        self.is_elastic = is_elastic
        self.micro_batches = micro_batches
        indices_by_rank = [micro_batch_range(micro_batches, r, world_size) for r in range(world_size)]
        self._first_micro_batch, self._last_micro_batch = indices_by_rank[rank].start, indices_by_rank[rank].stop - 1
        self._tree_nodes_by_rank = [cover_range(micro_batches, each.start, each.stop) for each in indices_by_rank]
        factory = GRAD_SYNC_ALGORITHMS[algorithm]
        carries_metrics = factory.carries_metrics and not is_elastic
        is_fp32 = parameters[0].dtype == torch.float32
        has_metric_slots = num_metric_slots > 0 and carries_metrics and world_size > 1 and is_fp32
        self.buckets = make_buckets(
            parameters, bucket_bytes, world_size, num_metric_slots if has_metric_slots else 0, overlaps_backward=True
        )
        if factory.is_low_rank and not is_elastic:
            first = 0
            for bucket in self.buckets:
                bucket.projection_bases = make_projection_bases(bucket, powersgd_rank, first)
                first += len(bucket.parameters)
        self._comm_queue: CommQueue | None = None
        self._started = world_size == 1
        self._group, self._factory = group, factory
        if factory.uses_error_feedback and not is_elastic:
            for bucket in self.buckets:
                bucket.enable_error_feedback()
        last = self.buckets[-1]
        self.metric_slots = (
            last.buffer.flat[last.num_used : last.num_used + num_metric_slots] if has_metric_slots else None
        )
        self._parameters = list(parameters)
        self._next_bucket = 0  # the first bucket that is not complete yet
        self._collects = False
        self._micro_batch_index = 0
        self._warmup_steps = warmup_steps
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_grad_ready, bucket, index))
            for bucket in self.buckets
            for index, parameter in enumerate(bucket.parameters)
            # On a GPU FSDP may still write the gradient on its own stream; `end_backward` collects these later.
            if not (isinstance(parameter, DTensor) and device_kind_of(parameter.device.type).is_gpu)
        ]

    def close(self) -> None:
        """Remove the hooks from the model and release the groups."""
        for hook in self._hooks:
            hook.remove()
        if self._comm_queue is not None:
            self._comm_queue.close()
        self._comm_queue = self._group = None

    def _start_algorithm(self) -> None:
        """Create the groups and the queue of the algorithm, before the first step."""
        self._started = True
        device, two_phase = self.buckets[0].buffer.flat.device, self.is_elastic or self._factory.is_two_phase
        second_group = clone_group(self._group) if two_phase else self._group
        # A low-rank algorithm starts all-reduces in a thread; a group must not have operations from two threads.
        group = clone_group(self._group) if self._factory.is_low_rank and not self.is_elastic else self._group
        comm = CommContext(self.rank, self.world_size, group, second_group, device)
        if self.is_elastic:
            algorithm: GradSyncAlgorithm = DeterministicTree(comm, self.micro_batches, self._tree_nodes_by_rank)
        else:
            algorithm = self._factory(comm, self.buckets)
        self._comm_queue = CommQueue(algorithm, use_threads=comm.on_cpu)

    def start_step(self, step: int) -> None:
        """Set the number of the next step."""
        for bucket in self.buckets:
            bucket.send_uncompressed = step <= self._warmup_steps

    def begin_backward(self, micro_batch_index: int) -> None:
        """Announce the backward of micro-batch `micro_batch_index` of the global batch."""
        if not self._started:
            self._start_algorithm()
        self._micro_batch_index = micro_batch_index
        # Under `fixed-world`, autograd accumulates earlier micro-batches in `.grad`; only the last one fills buckets.
        self._collects = self.is_elastic or micro_batch_index == self._last_micro_batch
        if self._collects:
            self._next_bucket = 0
            for bucket in self.buckets:
                bucket.missing_grads = set(range(len(bucket.parameters)))
                if self.is_elastic and micro_batch_index == self._first_micro_batch:
                    bucket.free_buffers += bucket.tree_nodes
                    bucket.tree_nodes = []

    def end_backward(self) -> None:
        """Finish the micro-batch: complete the buckets that miss gradients."""
        if not self._collects:
            return
        for bucket in self.buckets:
            if bucket.missing_grads:  # earlier micro-batches may have left gradients for these
                bucket.missing_grads = set()
                bucket.take_grads()
        self._send_complete_buckets()
        self._collects = False

    def reduce_gradients(self) -> None:
        """Wait for the sums and make them the parameters' gradients."""
        if self._comm_queue is not None:
            self._comm_queue.wait_all()
        for bucket in self.buckets:
            if self.is_elastic and self.world_size == 1:  # this worker has the root of the tree
                (root,) = bucket.tree_nodes
                bucket.free_buffers.append(bucket.buffer)
                bucket.tree_nodes, bucket.buffer = [], root
            if bucket.residual is not None and self.world_size == 1:
                bucket.flat_grads().copy_(bucket.residual[: bucket.num_used])
                bucket.residual.zero_()
            for parameter, gradient in zip(bucket.parameters, bucket.buffer.gradients, strict=True):
                parameter.grad = gradient

    def grad_norm(self) -> Tensor:
        """Return the Euclidean norm of the whole sum (0-d). With `is_elastic` it is computed per parameter, which is
        slower: the order of addition must not depend on bucket sizes, since another run may use other sizes."""
        return total_norm(self._local_grads() if self.is_elastic else self.grad_tensors())

    def grad_tensors(self) -> list[Tensor]:
        """Return the sum as a few large tensors."""
        return [bucket.flat_grads() for bucket in self.buckets]

    def residuals(self) -> dict[nn.Parameter, Tensor]:
        """Return the unsent part of each parameter's gradients, live; empty without error feedback."""
        pairs = (zip(bucket.parameters, bucket.residual_views, strict=False) for bucket in self.buckets)
        return dict(itertools.chain.from_iterable(pairs))

    def projection_bases(self) -> dict[nn.Parameter, Tensor]:
        """Return the PowerSGD bases, live [columns, rank], equal on all workers; empty if there are none."""
        pairs = (zip(bucket.parameters, bucket.projection_bases, strict=False) for bucket in self.buckets)
        return {parameter: basis for parameter, basis in itertools.chain.from_iterable(pairs) if basis is not None}

    def local_squared_norm(self) -> Tensor | None:
        """Return, between two backwards, the squared norm (0-d) of this worker's gradient so far; None with
        `is_elastic`, which keeps micro-batch gradients separate."""
        gradients = self._local_grads()
        return total_norm(gradients).square() if gradients else None

    def _local_grads(self) -> list[Tensor]:
        """Return the local gradient of each parameter that has one."""
        return [to_local(parameter.grad) for parameter in self._parameters if parameter.grad is not None]

    def _on_grad_ready(self, bucket: Bucket, index: int, parameter: nn.Parameter) -> None:
        """Hook: backward has finished this parameter's gradient."""
        if not self._collects:
            return
        if index not in bucket.missing_grads:
            raise RecipeError(
                f"model.build: one backward made the gradient of a parameter of shape {list(parameter.shape)} twice; "
                "checkpoint activations with use_reentrant=False"
            )
        bucket.missing_grads.discard(index)
        if not bucket.missing_grads:
            bucket.take_grads()
            self._send_complete_buckets()

    def _send_complete_buckets(self) -> None:
        """Send complete buckets, strictly in order, so that all workers issue the same operations in the same order."""
        while self._next_bucket < len(self.buckets) and not self.buckets[self._next_bucket].missing_grads:
            bucket_index, bucket = self._next_bucket, self.buckets[self._next_bucket]
            self._next_bucket += 1
            if self._comm_queue is not None and self._micro_batch_index == self._last_micro_batch:
                self._comm_queue.submit(bucket_index, bucket, self._fill_bucket)
            else:
                self._fill_bucket(bucket)

    def _fill_bucket(self, bucket: Bucket) -> None:
        """Copy the collected gradients into the bucket, in the form in which they are sent."""
        bucket.copy_grads_in()
        if self.is_elastic:
            self._add_to_tree(bucket)

    def _add_to_tree(self, bucket: Bucket) -> None:
        """Add a micro-batch's gradient to this worker's part of the tree."""
        bucket.tree_nodes.append(bucket.buffer)
        for _ in range(count_merges_after(self.micro_batches, self._first_micro_batch, self._micro_batch_index)):
            right = bucket.tree_nodes.pop()
            bucket.tree_nodes[-1].flat.add_(right.flat)
            bucket.free_buffers.append(right)
        bucket.buffer = bucket.take_buffer()
