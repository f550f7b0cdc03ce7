"""Check that the workers together would save each element of each tensor once."""

from collections.abc import Mapping

from pydantic import BaseModel, ValidationError

from phalanx.errors import UsageError
from phalanx.train.checkpoint.format import RankManifest, merge_rank_manifests
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.object_collectives import (
    broadcast_json_from_rank_zero,
    format_dtype,
    recv_json,
    send_json,
)
from phalanx.train.distributed.parallel_model import LocalTensor


class _Claim(BaseModel):
    """What one worker holds (dtype and shape of each logical tensor), and what it would save of it."""

    held: dict[str, str]
    share: RankManifest


def check_all_saved(dist_env: DistEnv, step: int, state: Mapping[str, LocalTensor], share: RankManifest) -> None:
    """Check that the workers, of which each would save its `share` of the `state` that it holds, save everything once:
    a user's optimizer or module may hold different state on each worker. Every worker calls it, after an update. Raises
    UsageError on every worker if they do not."""
    held = {
        name: f"{format_dtype(each.tensor.dtype)}{list(each.global_blocks.global_shape)}"
        for name, each in state.items()
    }
    claim = _Claim(held=held, share=share)
    if not dist_env.is_rank_zero:
        send_json(0, claim.model_dump(mode="json"), None)
    problem = _find_problem(claim, dist_env.world_size) if dist_env.is_rank_zero else None
    if dist_env.world_size > 1:
        problem = broadcast_json_from_rank_zero(dist_env, problem)
    if problem:
        raise UsageError(
            f"step {step}: a checkpoint would not hold the state of all workers: {problem}; let the model and the "
            "optimizer hold tensors of the same names, shapes and dtypes on every worker"
        )


def _find_problem(claim: _Claim, world_size: int) -> str:
    """Return, on rank 0, what is wrong with the state that all workers would save; "" if nothing is."""
    others = (_Claim.model_validate(recv_json(rank, None)) for rank in range(1, world_size))
    claims = [claim, *others]
    first: dict[str, tuple[int, str]] = {}
    for rank, each in enumerate(claims):
        for name, what in each.held.items():
            before, known = first.setdefault(name, (rank, what))
            if known != what:
                return f"{name} is {known} on worker {before} and {what} on worker {rank}"
    try:
        left = first.keys() - merge_rank_manifests((each.share for each in claims), {}).tensors.keys()
    except ValueError as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
    else:
        if not left:
            return ""
        problem = f"no worker would save {min(left)}"
    if lone := sorted(name for name in first if sum(name in each.held for each in claims) == 1):
        problem += f", and one worker alone holds {lone[0]}"
    return problem
