"""What runs on each node: turns of contenders, as they are asked for by `run.py` through standard input.

    python node.py RANK WORLD                   # the first line in: {"shapes": ..., "pace": ...}

Each further line {"contender", "turn", "warmup", "steps", "local"} is a turn: the model and the contender are made
anew, it does steps for warm-up, without pace, and steps that count, and one line comes out: the seconds of each step
that counts, the bytes that the kernel saw on the interface meanwhile, and how far what was exchanged in the warm-up is
from what it should be.
"""

import datetime
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from competitors import COMPETITORS, Competitor, TurnInfo
from links import INTERFACE_NAME, RENDEZVOUS_PORT, address, counters
from rate_limited import ComputeTiming, RateLimitedModel

STDIN_TIMEOUT_S = 120.0
"""Seconds for one collective; whoever asked for the turn gives up earlier."""


def run_turn(
    shapes: dict[str, list[int]], pace: ComputeTiming, place: TurnInfo, wanted: Sequence[Tensor], asked: dict[str, Any]
) -> dict[str, Any]:
    model = RateLimitedModel(shapes, pace, seed=place.rank)
    contender = COMPETITORS[asked["contender"]](model, place)
    try:
        return _timed(model, contender, wanted, asked["warmup"], asked["steps"])
    finally:
        contender.close()


def _timed(
    model: RateLimitedModel, contender: Competitor, wanted: Sequence[Tensor], warmup: int, steps: int
) -> dict[str, Any]:
    errors = []
    model.pacer.hurries = True
    last = round_up_to_period(warmup, contender.period)
    for number in range(1, last + 1):
        contender.step()
        # those with local steps are checked once: momentum moves on with what it has
        if contender.values is not None and (number == contender.period or (contender.period == 1 and number == last)):
            errors.append(relative_distance(contender.values(), wanted, contender.scale))
    model.pacer.hurries = False
    dist.barrier()
    before, seconds = counters(), []
    for _ in range(round_up_to_period(steps, contender.period)):
        begun = time.monotonic()
        contender.step()
        seconds.append(time.monotonic() - begun)
    dist.barrier()  # what this node has sent is there now
    moved = counters().since(before)
    return {
        "seconds": seconds,
        "period": contender.period,
        "sent": moved.sent,
        "received": moved.received,
        "error": max(errors, default=None),
    }


def round_up_to_period(steps: int, period: int) -> int:
    """At least so many steps, in whole periods."""
    return -(-max(steps, 1) // period) * period


def relative_distance(values: Sequence[Tensor], wanted: Sequence[Tensor], scale: float) -> float:
    """How far values are from `scale` times what is wanted, relative to that, in the Euclidean norm."""
    pairs = list(zip(values, wanted, strict=True))
    off = sum(float((value.float() - scale * want).square().sum()) for value, want in pairs)
    whole = sum(float((scale * want).square().sum()) for _, want in pairs)
    return float((off / whole) ** 0.5)


def expected_mean(shapes: dict[str, list[int]], pace: ComputeTiming, world: int) -> list[Tensor]:
    """The mean of what all nodes draw as gradients."""
    drawn = [RateLimitedModel(shapes, pace, seed=rank).drawn for rank in range(world)]
    return [torch.stack(each).mean(0) for each in zip(*drawn, strict=True)]


def serve(replies: IO[str]) -> None:
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    given = json.loads(sys.stdin.readline())
    shapes, pace = given["shapes"], ComputeTiming.from_dict(given["pace"])
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE_NAME
    store = TCPStore(address(0), RENDEZVOUS_PORT, world, is_master=rank == 0)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=STDIN_TIMEOUT_S)
    )
    wanted = expected_mean(shapes, pace, world)
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        place = TurnInfo(rank, world, asked["local"], asked["turn"])
        try:
            reply = run_turn(shapes, pace, place, wanted, asked)
        except Exception as error:
            print(json.dumps({"failed": f"{type(error).__name__}: {error}"[:300]}), file=replies, flush=True)
            raise
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print, too
    serve(own)
