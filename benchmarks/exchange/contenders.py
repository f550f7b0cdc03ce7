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
from links import PORT, address
from paced import PacedModel
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from phalanx.recipe import Recipe
from phalanx.recipe.schema import OuterOptimizerConfig
from phalanx.run import Event
from phalanx.train.exchange import GradientExchange
from phalanx.train.exchange.rounds import PLAIN, Rounds
from phalanx.train.exchange.schedule import Schedule
from phalanx.train.exchange.ways import WAYS
from phalanx.train.exchange_watch import ExchangeWatch
from phalanx.train.place import Place as Worker
from phalanx.train.state import Progress
from phalanx.train.timing import HostStopwatch

MIB = 2**20
DILOCO = OuterOptimizerConfig(lr=0.7, momentum=0.9)
"""The outer optimizer of DiLoCo (Douillard et al. 2023): SGD with Nesterov's momentum."""


@dataclass(frozen=True)
class Place:
    """Which node this is; `local`: steps between two exchanges of those that do not exchange in each. `turn` is another
    number each time."""

    rank: int
    world: int
    local: int
    turn: int


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Contender:
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


def _plain(model: PacedModel, called: nn.Module) -> None:
    """A step of a loop that zeroes, and leaves the exchange to hooks."""
    model.zero_grad()
    called().backward()


def none(model: PacedModel, place: Place) -> Contender:
    return Contender(partial(_plain, model, model))


# ---- ours


def ours(model: PacedModel, place: Place, **keywords: Any) -> Contender:
    """`GradientExchange` with these arguments, a micro-batch a node."""
    settings = {"replicas": False, **keywords}
    parameters = list(model.parameters())
    exchange = GradientExchange(parameters, rank=place.rank, world=place.world, micro_batches=place.world, **settings)

    def step() -> None:
        model.zero_grad()
        exchange.begin(place.rank)
        model().backward()
        exchange.end()
        exchange.finish()

    return Contender(step, partial(_gradients, model), scale=float(place.world), close=exchange.close)


def auto(model: PacedModel, place: Place, **keywords: Any) -> Contender:
    """What `grad_sync.algorithm: auto` has chosen under `determinism: off`, at this pace, before the steps that
    count."""
    recipe = Recipe.model_validate({"determinism": "off", "parallelism": {"replicate": place.world}})
    exchange = GradientExchange(
        list(model.parameters()),
        rank=place.rank,
        world=place.world,
        micro_batches=place.world,
        replicas=False,
        **keywords,
    )
    watch, progress = HostStopwatch(), Progress()

    def tell(event: Event) -> None:
        if place.rank == 0:
            print(event, flush=True)

    choosing = ExchangeWatch(recipe, Worker(place.rank, place.world), exchange, 1, progress, tell)

    def step() -> None:
        watch.start()
        model.zero_grad()
        exchange.begin(place.rank)
        loss = model()
        watch.lap("forward")
        loss.backward()
        exchange.end()
        watch.lap("backward")
        exchange.finish()
        watch.lap("exchange")

    while not progress.exchange.settled:
        step()
        choosing.note(*watch.stop())
        progress.step += 1
        choosing.look()
    return Contender(step, partial(_gradients, model), scale=float(place.world), close=exchange.close)


def rounds(
    model: PacedModel,
    place: Place,
    outer: OuterOptimizerConfig = PLAIN,
    wire: str = "fp32",
    streams: bool = False,
    delay: int = 0,
) -> Contender:
    """Steps of its own on each node, and `Rounds` after every so many; taken `delay` steps late; or in fragments, as
    many as leave each a step to travel in. What travels beside steps is never all agreed on: nothing is checked."""
    parameters, every = list(model.parameters()), place.local
    fragments = max(1, min(4, every // 2)) if streams else 1
    delay = every // fragments - 1 if streams else delay
    exchange = Rounds(
        parameters,
        rank=place.rank,
        world=place.world,
        schedule=Schedule(every, 0, fragments, delay),
        outer=outer,
        wire=wire,
        capacity=MIB,
    )
    optimizer, numbers = Drift(parameters), itertools.count(1)

    def step() -> None:
        _plain(model, model)
        optimizer.step()
        exchange.follow(next(numbers))

    values = partial(_parameters, model) if delay == 0 else None
    return Contender(step, values, -outer.lr * (1 + outer.momentum), every, exchange.close)


# ---- torch's


def ddp(model: PacedModel, place: Place, hook: Callable[[nn.Module], None] | None = None, **keywords: Any) -> Contender:
    """DistributedDataParallel; `hook` registers what is to be registered on it."""
    called = DistributedDataParallel(model, **keywords)
    if hook is not None:
        hook(called)
    return Contender(partial(_plain, model, called), partial(_gradients, model))


def fp16(called: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    called.register_comm_hook(None, fp16_compress_hook)


def bf16(called: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    called.register_comm_hook(None, bf16_compress_hook)


def power_sgd(called: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    called.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2), powerSGD_hook)


class Drift(torch.optim.Optimizer):
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


def post_local_sgd(model: PacedModel, place: Place) -> Contender:
    """DDP with a hook that keeps gradients on the node, and torch's averager of parameters."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    alone, _ = dist.new_subgroups(group_size=1)
    called = DistributedDataParallel(model)
    called.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=0), post_localSGD_hook)
    averager = PeriodicModelAverager(period=place.local)
    averager.step = 1  # it averages in steps 0, period, ...: in the last of a period instead
    optimizer = Drift(list(model.parameters()))

    def step() -> None:
        _plain(model, called)
        optimizer.step()
        averager.average_parameters(model.parameters())

    return Contender(step, partial(_parameters, model), scale=-1.0, period=place.local)


# ---- others


def torchft(model: PacedModel, place: Place, **keywords: Any) -> Contender:
    """torchft's DiLoCo: each node a replica group of its own, the lighthouse on the first."""
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    port, here, patience = PORT + 2 + 2 * place.turn % 500, address(place.rank), timedelta(seconds=120)
    lighthouse = LighthouseServer(f"[::]:{port}", place.world) if place.rank == 0 else None
    store = TCPStore(here, port + 1, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(timeout=patience),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=place.world,
        use_async_quorum=False,
        timeout=patience,
        quorum_timeout=patience,
        rank=0,
        world_size=1,
        store_addr=here,
        store_port=port + 1,
        lighthouse_addr=f"http://{address(0)}:{port}",
        replica_id=f"node-{place.rank}",
        hostname=here,
        init_sync=False,
    )
    optimizer = Drift(list(model.parameters()))
    outer = torch.optim.SGD(model.parameters(), lr=DILOCO.lr, momentum=DILOCO.momentum, nesterov=True)
    diloco = DiLoCo(manager, [model], optimizer, outer, place.local, pin_memory=False, **keywords)
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
    return Contender(step, partial(_parameters, model), -DILOCO.lr * (1 + DILOCO.momentum), place.local, close)


NONE = "none"
OURS: dict[str, Callable[[PacedModel, Place], Contender]] = {
    "all-reduce": ours,
    "all-reduce-1mib": partial(ours, capacity=MIB),
    "auto-1mib": partial(auto, capacity=MIB),
    "replicas": partial(ours, replicas=True),
    "replicas-1mib": partial(ours, replicas=True, capacity=MIB),
    **{f"{name}-1mib": partial(ours, strategy=name, capacity=MIB) for name in WAYS if name != "all-reduce"},
    "int8-1.5mib": partial(ours, strategy="int8", capacity=1.5 * MIB),
    "powersgd-2mib": partial(ours, strategy="powersgd", capacity=2 * MIB),
    "local": rounds,
    "diloco-late": partial(rounds, outer=DILOCO, wire="int8", delay=2),
    "diloco-late3": partial(rounds, outer=DILOCO, wire="int8", delay=3),
    "diloco-streaming": partial(rounds, outer=DILOCO, wire="int8", streams=True),
    **{f"diloco-{wire}": partial(rounds, outer=DILOCO, wire=wire) for wire in ("fp32", "int8")},
    # as FireCaffe had it: all gradients in one, after backward
    **{f"{name}-whole": partial(ours, strategy=name, capacity=1e15) for name in ("parameter-server", "binomial-tree")},
}
PEERS: dict[str, Callable[[PacedModel, Place], Contender]] = {
    "ddp": ddp,
    "ddp-1mib": partial(ddp, bucket_cap_mb=1, gradient_as_bucket_view=True),
    "ddp-fp16": partial(ddp, hook=fp16),
    "ddp-bf16": partial(ddp, hook=bf16),
    # on gloo it hangs with more than about two buckets
    "ddp-powersgd": partial(ddp, hook=power_sgd, bucket_cap_mb=1000),
    "post-localsgd": post_local_sgd,
    "torchft-diloco": torchft,
}
CONTENDERS = {NONE: none, **OURS, **PEERS}
