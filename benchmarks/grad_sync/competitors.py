"""Who exchanges gradients, by name: ours and the peers, each as one function of a step on a paced model.

A contender's step is forward, backward and all of the exchange, with no optimizer: that costs the same for all. Those
that let parameters drift apart and bring them together every so many steps have an optimizer that moves them once, in
the very first step, by the gradients, so that what comes out can be checked as it can for gradients.

Not here: Horovod, whose last release (0.28.1 of 2023) does not build with a torch of today: it asks for C++14, torch's
headers for C++17. torch's bf16 hook is here, but it refuses gloo. Not for timing, and not for processes: `node.py`.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from links import RENDEZVOUS_PORT, address
from phalanx.recipe.schema import OuterOptimizerConfig
from phalanx.train.grad_sync.bucketed_reducer import BucketedReducer
from phalanx.train.grad_sync.compression import GRAD_SYNC_ALGORITHMS
from phalanx.train.local_sgd.local_sgd import AVERAGING_OUTER_OPTIMIZER, LocalSGD, SyncSchedule
from rate_limited import RateLimitedModel

BYTES_PER_MIB = 2**20
DILOCO_OUTER_OPTIMIZER = OuterOptimizerConfig(lr=0.7, momentum=0.9)
"""The outer optimizer of DiLoCo (Douillard et al. 2023): SGD with Nesterov's momentum."""


@dataclass(frozen=True)
class TurnInfo:
    """Which node this is; `sync_every`: steps between two exchanges of those that do not exchange in each. `turn` is
    another number each time."""

    rank: int
    world_size: int
    sync_every: int
    turn: int


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Competitor:
    """`step` does a whole step; every `period` steps it does the same again. `values`: after a period, tensors in the
    model's order that are `scale` times the mean of what all nodes have drawn as gradients; None if nothing is
    exchanged, or never all at once."""

    step: Callable[[], None]
    values: Callable[[], Sequence[Tensor]] | None = None
    scale: float = 1.0
    period: int = 1
    close: Callable[[], None] = _nothing


def _gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _parameters(model: nn.Module) -> list[Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def _plain(model: RateLimitedModel, called: nn.Module) -> None:
    """A step of a loop that zeroes, and leaves the exchange to hooks."""
    model.zero_grad()
    called().backward()


def no_sync(model: RateLimitedModel, turn_info: TurnInfo) -> Competitor:
    return Competitor(partial(_plain, model, model))


# ---- ours


def phalanx_strategy(model: RateLimitedModel, turn_info: TurnInfo, **keywords: Any) -> Competitor:
    """`BucketedReducer` with these arguments, a micro-batch a node."""
    settings = {"is_elastic": False, **keywords}
    parameters = list(model.parameters())
    exchange = BucketedReducer(
        parameters, rank=turn_info.rank, world_size=turn_info.world_size, micro_batches=turn_info.world_size, **settings
    )

    def step() -> None:
        model.zero_grad()
        exchange.begin_backward(turn_info.rank)
        model().backward()
        exchange.end_backward()
        exchange.reduce_gradients()

    return Competitor(step, partial(_gradients, model), scale=float(turn_info.world_size), close=exchange.close)


def phalanx_local_sgd(
    model: RateLimitedModel,
    turn_info: TurnInfo,
    outer: OuterOptimizerConfig = AVERAGING_OUTER_OPTIMIZER,
    wire: str = "fp32",
    streams: bool = False,
    delay: int = 0,
) -> Competitor:
    """Steps of its own on each node, and `LocalSGD` after every so many; taken `delay` steps late; or in fragments, as
    many as leave each a step to travel in. What travels beside steps is never all agreed on: nothing is checked."""
    parameters, every = list(model.parameters()), turn_info.sync_every
    fragments = max(1, min(4, every // 2)) if streams else 1
    delay = every // fragments - 1 if streams else delay
    exchange = LocalSGD(
        parameters,
        rank=turn_info.rank,
        world_size=turn_info.world_size,
        schedule=SyncSchedule(every, 0, fragments, delay),
        outer_optimizer=outer,
        sync_dtype=wire,
        bucket_bytes=BYTES_PER_MIB,
    )
    optimizer, numbers = StepOnceOptimizer(parameters), itertools.count(1)

    def step() -> None:
        _plain(model, model)
        optimizer.step()
        exchange.after_step(next(numbers), updated=True)

    values = partial(_parameters, model) if delay == 0 else None
    return Competitor(step, values, -outer.lr * (1 + outer.momentum), every, exchange.close)


# ---- torch's


def ddp(
    model: RateLimitedModel, turn_info: TurnInfo, hook: Callable[[nn.Module], None] | None = None, **keywords: Any
) -> Competitor:
    """DistributedDataParallel; `hook` registers what is to be registered on it."""
    called = DistributedDataParallel(model, **keywords)
    if hook is not None:
        hook(called)
    return Competitor(partial(_plain, model, called), partial(_gradients, model))


def fp16(called: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    called.register_comm_hook(None, fp16_compress_hook)


def bf16(called: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    called.register_comm_hook(None, bf16_compress_hook)


def power_sgd(called: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    called.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2), powerSGD_hook)


class StepOnceOptimizer(torch.optim.Optimizer):
    """Moves parameters against their gradients in its first step, and never again."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        super().__init__(parameters, {})
        self._moved = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self._moved:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad)
        self._moved = True


def post_local_sgd(model: RateLimitedModel, turn_info: TurnInfo) -> Competitor:
    """DDP with a hook that keeps gradients on the node, and torch's averager of parameters."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    alone, _ = dist.new_subgroups(group_size=1)
    called = DistributedDataParallel(model)
    called.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=0), post_localSGD_hook)
    averager = PeriodicModelAverager(period=turn_info.sync_every)
    averager.step = 1  # it averages in steps 0, period, ...: in the last of a period instead
    optimizer = StepOnceOptimizer(list(model.parameters()))

    def step() -> None:
        _plain(model, called)
        optimizer.step()
        averager.average_parameters(model.parameters())

    return Competitor(step, partial(_parameters, model), scale=-1.0, period=turn_info.sync_every)


# ---- others


def torchft_diloco(model: RateLimitedModel, turn_info: TurnInfo, **keywords: Any) -> Competitor:
    """torchft's DiLoCo: each node a replica group of its own, the lighthouse on the first."""
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    port, here, patience = (
        RENDEZVOUS_PORT + 2 + 2 * turn_info.turn % 500,
        address(turn_info.rank),
        timedelta(seconds=120),
    )
    lighthouse = LighthouseServer(f"[::]:{port}", turn_info.world_size) if turn_info.rank == 0 else None
    store = TCPStore(here, port + 1, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(timeout=patience),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=turn_info.world_size,
        use_async_quorum=False,
        timeout=patience,
        quorum_timeout=patience,
        rank=0,
        world_size=1,
        store_addr=here,
        store_port=port + 1,
        lighthouse_addr=f"http://{address(0)}:{port}",
        replica_id=f"node-{turn_info.rank}",
        hostname=here,
        init_sync=False,
    )
    optimizer = StepOnceOptimizer(list(model.parameters()))
    outer = torch.optim.SGD(
        model.parameters(), lr=DILOCO_OUTER_OPTIMIZER.lr, momentum=DILOCO_OUTER_OPTIMIZER.momentum, nesterov=True
    )
    diloco = DiLoCo(manager, [model], optimizer, outer, turn_info.sync_every, pin_memory=False, **keywords)
    diloco.__enter__()

    def step() -> None:
        _plain(model, model)
        optimizer.step()

    def close() -> None:
        nonlocal store
        diloco.__exit__(None, None, None)
        dist.barrier()  # the lighthouse goes when nobody asks it any more
        manager.shutdown(wait=False)
        if lighthouse is not None:
            lighthouse.shutdown()
        del store

    # momentum begins at the gradient itself, so that Nesterov's first step is 1 + momentum of it
    return Competitor(
        step,
        partial(_parameters, model),
        -DILOCO_OUTER_OPTIMIZER.lr * (1 + DILOCO_OUTER_OPTIMIZER.momentum),
        turn_info.sync_every,
        close,
    )


NO_SYNC = "none"
PHALANX_COMPETITORS: dict[str, Callable[[RateLimitedModel, TurnInfo], Competitor]] = {
    "all-reduce": phalanx_strategy,
    "all-reduce-1mib": partial(phalanx_strategy, bucket_bytes=BYTES_PER_MIB),
    "replicas": partial(phalanx_strategy, is_elastic=True),
    "replicas-1mib": partial(phalanx_strategy, is_elastic=True, bucket_bytes=BYTES_PER_MIB),
    **{
        f"{name}-1mib": partial(phalanx_strategy, algorithm=name, bucket_bytes=BYTES_PER_MIB)
        for name in GRAD_SYNC_ALGORITHMS
        if name != "all-reduce"
    },
    "int8-1.5mib": partial(phalanx_strategy, algorithm="int8", bucket_bytes=1.5 * BYTES_PER_MIB),
    "powersgd-2mib": partial(phalanx_strategy, algorithm="powersgd", bucket_bytes=2 * BYTES_PER_MIB),
    "local": phalanx_local_sgd,
    "diloco-late": partial(phalanx_local_sgd, outer=DILOCO_OUTER_OPTIMIZER, wire="int8", delay=2),
    "diloco-late3": partial(phalanx_local_sgd, outer=DILOCO_OUTER_OPTIMIZER, wire="int8", delay=3),
    "diloco-streaming": partial(phalanx_local_sgd, outer=DILOCO_OUTER_OPTIMIZER, wire="int8", streams=True),
    **{
        f"diloco-{wire}": partial(phalanx_local_sgd, outer=DILOCO_OUTER_OPTIMIZER, wire=wire)
        for wire in ("fp32", "int8")
    },
    # as FireCaffe had it: all gradients in one, after backward
    **{
        f"{name}-whole": partial(phalanx_strategy, algorithm=name, bucket_bytes=1e15)
        for name in ("parameter-server", "binomial-tree")
    },
}
PEER_COMPETITORS: dict[str, Callable[[RateLimitedModel, TurnInfo], Competitor]] = {
    "ddp": ddp,
    "ddp-1mib": partial(ddp, bucket_cap_mb=1, gradient_as_bucket_view=True),
    "ddp-fp16": partial(ddp, hook=fp16),
    "ddp-bf16": partial(ddp, hook=bf16),
    # on gloo it hangs with more than about two buckets
    "ddp-powersgd": partial(ddp, hook=power_sgd, bucket_cap_mb=1000),
    "post-localsgd": post_local_sgd,
    "torchft-diloco": torchft_diloco,
}
COMPETITORS = {NO_SYNC: no_sync, **PHALANX_COMPETITORS, **PEER_COMPETITORS}
