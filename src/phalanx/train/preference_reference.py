"""Compute the log-probabilities of a preference loss's reference: the model as it is before the first step.

They are computed once for all samples, and kept in the run's directory: training needs neither a second model nor a
second forward.
"""

from dataclasses import replace

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save
from torch import Tensor

from phalanx.data import RunData
from phalanx.errors import DataError
from phalanx.run import Run
from phalanx.run.directory import write_atomic
from phalanx.train.distributed.object_collectives import all_reduce_max
from phalanx.train.loss import LossModule, eval_mode
from phalanx.train.tasks.preference import Preference, SequenceLogProbs
from phalanx.train.train_context import TrainContext
from phalanx.train.train_step import to_device

_TENSOR_NAME, _FINGERPRINT_KEY = "log_probs", "data"


def ensure_reference(context: TrainContext, data: RunData, resumes: bool) -> None:
    """Give a preference task its reference: that of the run, or of the model as it is. All workers must call it.

    Raises DataError if the run has trained already and its reference is missing or of other data.
    """
    loss_module = context.loss_module
    task = loss_module.loss_fn.task if isinstance(loss_module, LossModule) else None
    if not isinstance(task, Preference) or not task.config.needs_reference:
        return
    assert isinstance(loss_module, LossModule)
    dist_env, found = context.dist_env, load_reference(context.run, data.fingerprint)
    # Without a shared disk, a node that has come back has none: the first rank that has it gives it to the others.
    width, owner = all_reduce_max(
        dist_env, [0, -dist_env.world_size] if found is None else [found.shape[1], -dist_env.rank]
    )
    if width:
        log_probs = _broadcast(found, (data.num_sample_ids, int(width)), -int(owner), context)
    elif resumes:
        raise DataError(
            f"{context.run.reference}: is missing or of other data, and the model before the first step is gone; "
            "restore the file, or start a new run"
        )
    else:
        log_probs = _compute_reference(context, loss_module, task, data)
    if found is None and dist_env.local_rank == 0:
        content = save({_TENSOR_NAME: log_probs.cpu()}, metadata={_FINGERPRINT_KEY: data.fingerprint})
        write_atomic(context.run.reference, content)
    task.reference = log_probs.to(dist_env.device)


def load_reference(run: Run, fingerprint: str) -> Tensor | None:
    """Read the reference of a run, fp32 [ids, d]; None if there is none of these data."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(run.reference, framework="pt") as file:
            if (file.metadata() or {}).get(_FINGERPRINT_KEY) != fingerprint:
                return None
    except (FileNotFoundError, SafetensorError):
        return None
    tensor: Tensor = load_file(run.reference)[_TENSOR_NAME]
    return tensor


def _broadcast(log_probs: Tensor | None, shape: tuple[int, int], owner: int, context: TrainContext) -> Tensor:
    device = context.dist_env.device
    log_probs = torch.empty(shape, device=device) if log_probs is None else log_probs.to(device)
    if context.dist_env.world_size > 1:
        dist.broadcast(log_probs, owner)
    return log_probs


@torch.no_grad()
def _compute_reference(context: TrainContext, loss_module: LossModule, task: Preference, data: RunData) -> Tensor:
    """Score all samples, divided over data-parallel ranks. Ranks that shard parameters issue the same collectives: all
    score equally many batches, the last ones some of them again."""
    mesh, dist_env, micro_size = context.parallel_model.mesh, context.dist_env, int(context.recipe.batch.micro_size)
    num_ids = data.num_sample_ids
    micro_size = min(micro_size, num_ids)
    num_rounds = -(-num_ids // (micro_size * mesh.dp_size))
    scored: list[tuple[int, Tensor]] = []
    loss_fn, scorer = loss_module.loss_fn, SequenceLogProbs(task.config)
    lm_head = loss_fn.lm_head
    loss_fn.task = scorer
    loss_fn.lm_head = None if lm_head is None else replace(lm_head, head_loss=scorer.head_loss)
    try:
        with eval_mode(loss_module):
            for number in range(num_rounds):
                first = min((number * mesh.dp_size + mesh.dp_rank) * micro_size, num_ids - micro_size)
                context.heartbeat.record("evaluation")
                batch = to_device(data.read_by_ids(first, micro_size), dist_env.device)
                scored.append((first, loss_module(batch)[0][1]))
    finally:
        loss_fn.task, loss_fn.lm_head = task, lm_head
    width = int(all_reduce_max(dist_env, [max(log_probs.shape[1] for _, log_probs in scored)])[0])
    reference = torch.full((num_ids, width), -torch.inf, device=dist_env.device)
    for first, log_probs in scored:
        reference[first : first + micro_size, : log_probs.shape[1]] = log_probs
    if dist_env.world_size > 1:
        dist.all_reduce(reference, dist.ReduceOp.MAX)
    return reference.nan_to_num_(neginf=0.0)
