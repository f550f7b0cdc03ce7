"""Collectives of ranks are compared; what is pending is read while the main thread waits."""

import time

import torch
import torch.distributed as dist

from phalanx.compat import list_process_groups
from phalanx.errors import RecipeError
from phalanx.train.distributed.collective_trace import CollectiveCheck, read_collectives
from phalanx.train.distributed.environment import DistEnv
from process_worlds import ProcessWorlds


def compared(rank: int, world: int) -> str:
    check = CollectiveCheck(DistEnv(rank=rank, world_size=world))
    dist.all_reduce(torch.ones(4))
    check.compare("step 1")
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if rank else torch.float32))  # as many bytes: nothing hangs
    try:
        check.compare("step 2")
    except RecipeError as error:
        return str(error)
    return ""


def test_a_collective_that_differs_is_named_on_all_workers(world: ProcessWorlds) -> None:
    for message in world.run(2, compared):
        assert message.startswith("step 2: collective")
        assert "all_reduce of 4 Float on worker 0 and all_reduce of 4 Int on worker 1" in message


def pending(rank: int, world: int) -> tuple[list[str], list[str], tuple[int, ...]]:
    pair = dist.new_group([0, 1])
    work = dist.all_reduce(torch.ones(3), group=pair, async_op=True) if rank == 0 else None
    own = [each for each in read_collectives() if each.group == pair.group_name]
    before = [each.operation for each in own if each.is_pending]
    dist.barrier()  # until rank 0 has looked
    if work is None:
        dist.all_reduce(torch.ones(3), group=pair)
    else:
        work.wait()
    for _ in range(1000):  # gloo's thread marks a collective as done after it has woken who waits for it
        after = [each.operation for each in read_collectives() if each.group == pair.group_name and each.is_pending]
        if not after:
            break
        time.sleep(0.01)
    return before, after, list_process_groups()[pair.group_name]


def test_a_collective_is_pending_until_all_ranks_have_issued_it(world: ProcessWorlds) -> None:
    first, second = world.run(2, pending)
    assert first == (["all_reduce of 3 Float"], [], (0, 1))
    assert second == ([], [], (0, 1))
