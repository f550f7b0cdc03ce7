"""Compute what a loss compares with, once for all samples, and keep it in the run's directory.

A preference loss compares with the log-probabilities of the model as it is before the first step, and a distillation
with a stored teacher with the teacher's. Training then needs neither a second model nor a second forward.
"""

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.data import RunData
from phalanx.errors import DataError
from phalanx.formatting import format_bytes
from phalanx.run import Run
from phalanx.run.directory import fsync_if_supported
from phalanx.train.distributed.object_collectives import all_gather_json, all_reduce_max, format_dtype, parse_dtype
from phalanx.train.loss import LossModule, eval_mode
from phalanx.train.ops.linear_cross_entropy import IGNORED_TARGET
from phalanx.train.precision import autocast_context
from phalanx.train.tasks import TensorBatch
from phalanx.train.tasks.distillation import Distillation, StoredTeacher
from phalanx.train.tasks.preference import LOG_PROBS, Preference, SequenceLogProbs
from phalanx.train.train_context import TrainContext
from phalanx.train.train_step import to_device

logger = logging.getLogger(__name__)

Reference = dict[str, Tensor]
_FINGERPRINT_KEY = "data"
_PART_BYTES = 64 << 20
"""Bytes of a reference that are sent at once."""


def ensure_reference(context: TrainContext, data: RunData, resumes: bool) -> None:
    """Give a task its reference: that of the run, or of the model or teacher as it is. All workers must call it.

    Raises DataError if the run has trained already and its reference is missing or of other data.
    """
    loss_module = context.loss_module
    if not isinstance(loss_module, LossModule):
        return
    task, fingerprint = loss_module.loss_fn.task, data.fingerprint
    compute: Callable[[], Reference]
    if isinstance(task, Preference) and task.config.needs_reference:
        compute = partial(_score_sequences, context, loss_module, task, data)
    elif isinstance(task, Distillation) and (top_k := task.config.teacher_top_k) is not None:
        data.names_samples = True
        fingerprint += f" {task.config.teacher} {top_k} {task.config.temperature}"
        compute = partial(_score_teacher, context, task, top_k, data)
    else:
        return
    task.set_reference(_ensure_file(context, fingerprint, compute, resumes), context.dist_env.device)


def _ensure_file(context: TrainContext, fingerprint: str, compute: Callable[[], Reference], resumes: bool) -> Reference:
    dist_env, run = context.dist_env, context.run
    found = load_reference(run, fingerprint)
    # Without a shared disk, a node that has come back has none: the first rank that has it gives it to the others.
    own_rank = dist_env.world_size if found is None else dist_env.rank
    num_without, owner = all_reduce_max(dist_env, [float(found is None), -own_rank])
    if found is not None and not num_without:
        return found
    if -owner < dist_env.world_size:
        reference = _share(context, found, -int(owner))
    elif resumes:
        raise DataError(
            f"{run.reference}: is missing or of other data, and what it was computed with may have changed; restore "
            "the file, or start a new run"
        )
    else:
        reference = compute()
    if found is None and dist_env.local_rank == 0:
        temporary = run.reference.with_name(f".{run.reference.name}.{os.getpid()}.tmp")
        save_file(reference, temporary, {_FINGERPRINT_KEY: fingerprint})
        with temporary.open("rb") as file:
            fsync_if_supported(file.fileno())
        os.replace(temporary, run.reference)
    all_gather_json(dist_env, None)  # after this every worker of a node sees its file
    written = load_reference(run, fingerprint)
    assert written is not None
    return written


def load_reference(run: Run, fingerprint: str) -> Reference | None:
    """Open the reference of a run, of which the file is read where it is used; None if there is none of these data."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(run.reference, framework="pt") as file:
            if (file.metadata() or {}).get(_FINGERPRINT_KEY) != fingerprint:
                return None
    except (FileNotFoundError, SafetensorError):
        return None
    return load_file(run.reference)


def _share(context: TrainContext, found: Reference | None, owner: int) -> Reference:
    """Send the reference of the rank `owner` to all others, in parts."""
    shapes = {name: [format_dtype(tensor.dtype), *tensor.shape] for name, tensor in (found or {}).items()}
    shapes = all_gather_json(context.dist_env, shapes)[owner]
    reference = found or {
        name: torch.empty(shape, dtype=parse_dtype(dtype)) for name, (dtype, *shape) in shapes.items()
    }
    for tensor in map(reference.__getitem__, shapes):
        for part in tensor.split(max(_PART_BYTES // max(tensor[:1].nbytes, 1), 1)):
            sent = part.to(context.dist_env.device)
            dist.broadcast(sent, owner)
            if found is None:
                part.copy_(sent)
    return reference


def _list_rounds(context: TrainContext, data: RunData) -> tuple[int, list[list[int]]]:
    """Return the size of a batch, and in each round the first sample id of the batch of each data-parallel rank. Ranks
    that shard parameters issue the same collectives: all have equally many, the last ones some of them again."""
    dp_size, num_ids = context.parallel_model.mesh.dp_size, data.num_sample_ids
    size = min(int(context.recipe.batch.micro_size), num_ids)
    starts = range(0, num_ids, size * dp_size)
    return size, [[min(first + rank * size, num_ids - size) for rank in range(dp_size)] for first in starts]


def _read_own_batches(context: TrainContext, data: RunData) -> Iterator[tuple[int, TensorBatch]]:
    """Yield this rank's batches of `_list_rounds`, each with its first sample id."""
    size, rounds = _list_rounds(context, data)
    for firsts in rounds:
        first = firsts[context.parallel_model.mesh.dp_rank]
        context.heartbeat.record("evaluation")
        yield first, to_device(data.read_by_ids(first, size), context.dist_env.device)


@torch.no_grad()
def _score_sequences(context: TrainContext, loss_module: LossModule, task: Preference, data: RunData) -> Reference:
    """Score all samples with the model as it is, divided over data-parallel ranks."""
    dist_env = context.dist_env
    scored: list[tuple[int, Tensor]] = []
    loss_fn, scorer = loss_module.loss_fn, SequenceLogProbs(task.config)
    lm_head = loss_fn.lm_head
    loss_fn.task = scorer
    loss_fn.lm_head = None if lm_head is None else replace(lm_head, head_loss=scorer.head_loss)
    try:
        with eval_mode(loss_module):
            for first, batch in _read_own_batches(context, data):
                scored.append((first, loss_module(batch)[0][1]))
    finally:
        loss_fn.task, loss_fn.lm_head = task, lm_head
    width = int(all_reduce_max(dist_env, [max(log_probs.shape[1] for _, log_probs in scored)])[0])
    reference = torch.full((data.num_sample_ids, width), -torch.inf, device=dist_env.device)
    for first, log_probs in scored:
        reference[first : first + len(log_probs), : log_probs.shape[1]] = log_probs
    _all_reduce_max(context, reference)
    return {LOG_PROBS: reference.nan_to_num_(neginf=0.0).cpu()}


@torch.no_grad()
def _score_teacher(context: TrainContext, task: Distillation, top_k: int, data: RunData) -> Reference:
    """Score all targets with the teacher, divided over data-parallel ranks: its `top_k` largest log-probabilities. The
    first worker of a node has them in the host's memory."""
    dist_env = context.dist_env
    mesh = context.parallel_model.mesh
    run = context.run
    size, rounds = _list_rounds(context, data)
    counts = torch.zeros(data.num_sample_ids + 1, dtype=torch.int64, device=dist_env.device)
    for first, batch in _read_own_batches(context, data):
        counts[first + 1 : first + 1 + size] = (batch["targets"] != IGNORED_TARGET).sum(1)
    _all_reduce_max(context, counts)
    first_rows = counts.cpu().cumsum(0)
    num_rows, num_bytes = int(first_rows[-1]), int(first_rows[-1]) * (2 * top_k + 1) * 4
    if num_bytes > (free := shutil.disk_usage(run.path).free):
        raise DataError(
            f"task.teacher_top_k: {top_k} log-probabilities of {num_rows} targets take {format_bytes(num_bytes)}, and "
            f"{run.path} has {format_bytes(free)} free; give a smaller number, or null to run the teacher next to the "
            "student"
        )
    logger.info("store %d log-probabilities of %d targets: %s", top_k, num_rows, format_bytes(num_bytes))
    kept_rows = num_rows if dist_env.local_rank == 0 else 0
    stored = StoredTeacher(
        torch.empty(kept_rows, top_k + 1), torch.empty(kept_rows, top_k, dtype=torch.int32), first_rows
    )
    teacher = task.load_teacher()
    for firsts, (_, batch) in zip(rounds, _read_own_batches(context, data), strict=True):
        with autocast_context(context.recipe.precision, dist_env.device):
            log_probs, tokens = task.score(teacher, batch, top_k)
        spans = [(int(first_rows[first]), int(first_rows[first + size])) for first in firsts]
        length = max(stop - start for start, stop in spans)
        for rows, own in ((stored.log_probs, log_probs), (stored.tokens, tokens)):
            slots = own.new_full((mesh.dp_size, length, own.shape[1]), torch.iinfo(torch.int32).min)
            slots[mesh.dp_rank, : len(own)] = own
            _all_reduce_max(context, slots)
            for slot, (start, stop) in zip(slots if kept_rows else (), spans, strict=False):
                rows[start:stop] = slot[: stop - start].to(rows.dtype)
    return stored.tensors()


def _all_reduce_max(context: TrainContext, values: Tensor) -> None:
    if context.dist_env.world_size > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX)
