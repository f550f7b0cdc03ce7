"""Every strategy of the exchange on gloo: the sums of a single process, the same bits on all ranks and again."""

import contextlib
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.train.distributed.failures import is_peer_failure
from phalanx.train.distributed.process_group import clone_group
from phalanx.train.grad_sync.algorithms import CommContext, P2PScatterGather, abort_groups_on_error
from phalanx.train.grad_sync.bucketed_reducer import BucketedReducer
from phalanx.train.grad_sync.compression import GRAD_SYNC_ALGORITHMS
from process_worlds import ProcessWorlds, start_forkserver

SHAPES = ((33, 7), (), (5,), (200,), (16, 16), (1,), (3, 3, 3))
CAPACITY = 400.0  # bytes: several buckets
STEPS = 3
PLAIN = [name for name, way in GRAD_SYNC_ALGORITHMS.items() if way.carries_metrics]
HOLD_BACK = [name for name, way in GRAD_SYNC_ALGORITHMS.items() if way.uses_error_feedback]
TOLERANCE = {"bf16": 2e-2, "int8": 4e-2}
"""Of the largest element, where it is more than the rounding of fp32."""

WHOLE = [name for name, way in GRAD_SYNC_ALGORITHMS.items() if not way.is_low_rank]
"""Those that leave nothing out of a sum but what is rounded off."""

Sums = list[list[Tensor]]
"""Of every step the gradients' sums, and as the last what came back in the slots."""


def sums_of(
    strategy: str,
    rank: int,
    workers: int,
    *,
    alone: bool = False,
    dtype: torch.dtype = torch.float32,
    group: dist.ProcessGroup | None = None,
    first: int = 0,
    held_back: list[Tensor] | None = None,
) -> Sums:
    """What `strategy` leaves on this rank of as many workers. Each has gradients of its own, that differ in size, from
    number `first` on. A single process that is `alone` has those of all. What was `held_back` is added at the end."""
    generator = torch.Generator().manual_seed(7)
    weights = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    exchange = BucketedReducer(
        weights,
        rank=rank,
        world_size=1 if alone else workers,
        micro_batches=workers,
        is_elastic=False,
        bucket_bytes=CAPACITY,
        group=group,
        num_metric_slots=0 if alone else 2,
        algorithm=strategy,
    )
    assert len(exchange.buckets) > 2
    assert (exchange.metric_slots is not None) == (strategy in PLAIN and dtype == torch.float32 and not alone)
    found = []
    for step in range(STEPS):
        for weight in weights:
            weight.grad = None
        if exchange.metric_slots is not None:
            exchange.metric_slots.copy_(torch.tensor([10.0 ** (first + rank), step]))
        for leaf in range(workers) if alone else [rank]:
            noise = torch.Generator().manual_seed(100 * step + first + leaf)
            exchange.begin_backward(leaf)
            factors = [torch.randn(shape, generator=noise) * 4.0 ** (leaf % 3 - 1) for shape in SHAPES]
            torch.stack([(w * f.to(dtype)).sum() for w, f in zip(weights, factors, strict=True)]).sum().backward()
            exchange.end_backward()
        exchange.reduce_gradients()
        gradients = [weight.grad.clone() for weight in weights if weight.grad is not None]
        found.append([*gradients, torch.zeros(0) if exchange.metric_slots is None else exchange.metric_slots.clone()])
    if held_back is not None:
        residuals = exchange.residuals()
        held_back += [residuals[weight].clone() for weight in weights]
    exchange.close()
    return found


def every_strategy(rank: int, world: int, *, dtype: torch.dtype) -> dict[str, tuple[Sums, Sums]]:
    """Each twice."""
    return {
        name: (sums_of(name, rank, world, dtype=dtype), sums_of(name, rank, world, dtype=dtype))
        for name in GRAD_SYNC_ALGORITHMS
    }


def assert_equal(one: Sums, other: Sums) -> None:
    for a, b in zip(one, other, strict=True):
        assert all(x.equal(y) for x, y in zip(a, b, strict=True))


def assert_sums(found: Sums, alone: Sums, tolerance: float) -> None:
    """Those of a single process, but for the slots."""
    for one, other in zip(found, alone, strict=True):
        for a, b in zip(one[:-1], other[:-1], strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance * float(b.abs().max()))


RANKS = pytest.mark.parametrize("ranks", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))])
CASES = pytest.mark.parametrize(
    ("ranks", "dtype"),
    [
        pytest.param(ranks, dtype, id=f"{ranks}-{str(dtype)[6:]}", marks=[] if quick else [pytest.mark.slow])
        for dtype in (torch.float32, torch.bfloat16)
        for ranks in (2, 3, 4, 8)
        for quick in [ranks == 2 or (ranks == 3 and dtype == torch.float32)]
    ],
)
NAMES = pytest.mark.parametrize("name", GRAD_SYNC_ALGORITHMS)


@pytest.mark.parametrize("name", WHOLE)
@CASES
def test_sums_are_those_of_a_single_process(world: ProcessWorlds, ranks: int, dtype: torch.dtype, name: str) -> None:
    alone = sums_of(name, 0, ranks, alone=True, dtype=dtype)
    rough = 5e-2 if dtype == torch.bfloat16 else TOLERANCE.get(name, 1e-5)
    for found in world.run_once(ranks, every_strategy, dtype=dtype):
        assert_sums(found[name][0], alone, rough)


@NAMES
@CASES
def test_all_ranks_have_the_same_bits_and_have_them_again(
    world: ProcessWorlds, ranks: int, dtype: torch.dtype, name: str
) -> None:
    (first, _), *others = (found[name] for found in world.run_once(ranks, every_strategy, dtype=dtype))
    for one, again in [*others, *(found[name] for found in world.run_once(ranks, every_strategy, dtype=dtype))]:
        assert_equal(one, first)
        assert_equal(again, first)


def in_the_manner_of_gpus(rank: int, world: int, *, name: str) -> None:
    """By the operations and in the order of GPUs, where no thread carries anything, beside what CPUs do."""
    usual = sums_of(name, rank, world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CommContext, "on_cpu", False)
        found, again = (sums_of(name, rank, world) for _ in range(2))
    assert_sums(found, usual, 1e-5)
    assert_equal(again, found)


@NAMES
@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_what_gpus_do_makes_the_same_sums(world: ProcessWorlds, ranks: int, name: str) -> None:
    world.run(ranks, in_the_manner_of_gpus, name=name)


def with_what_is_held_back(rank: int, world: int, *, name: str, dtype: torch.dtype) -> tuple[Sums, list[Tensor]]:
    held_back: list[Tensor] = []
    return sums_of(name, rank, world, dtype=dtype, held_back=held_back), held_back


@pytest.mark.parametrize("name", HOLD_BACK)
@CASES
def test_what_the_sums_lack_is_held_back(world: ProcessWorlds, ranks: int, dtype: torch.dtype, name: str) -> None:
    rough = 5e-2 if dtype == torch.bfloat16 else 1e-5
    found = world.run_once(ranks, with_what_is_held_back, name=name, dtype=dtype)
    sums, alone = found[0][0], sums_of(name, 0, ranks, alone=True, dtype=dtype)
    for place in range(len(SHAPES)):
        held = sum(tensors[place].float() for _, tensors in found)
        arrived = sum(step[place].float() for step in sums)
        total = torch.stack([step[place].float() for step in alone]).sum(0)
        torch.testing.assert_close(arrived + held, total, rtol=rough, atol=rough * float(total.abs().max()))


@pytest.mark.parametrize("name", PLAIN)
@RANKS
def test_slots_are_summed_with_the_gradients(world: ProcessWorlds, ranks: int, name: str) -> None:
    for found in world.run_once(ranks, every_strategy, dtype=torch.float32):
        for step, tensors in enumerate(found[name][0]):
            assert tensors[-1].tolist() == [sum(10.0**rank for rank in range(ranks)), ranks * step]


def in_two_halves(rank: int, world: int) -> dict[str, Sums]:
    """Ranks 0 and 2, and 1 and 3, each among themselves at the same time."""
    groups = [dist.new_group([half, half + 2]) for half in range(2)]
    half, own = rank % 2, rank // 2
    return {name: sums_of(name, own, 2, group=groups[half], first=10 * half) for name in GRAD_SYNC_ALGORITHMS}


@NAMES
def test_a_group_that_is_a_part_of_the_world_sums_among_itself(world: ProcessWorlds, name: str) -> None:
    found = [results[name] for results in world.run_once(4, in_two_halves)]
    for half in range(2):
        assert_equal(found[half], found[half + 2])
        if name in WHOLE:
            assert_sums(found[half], sums_of(name, 0, 2, alone=True, first=10 * half), TOLERANCE.get(name, 1e-5))


DOOMED, SURVIVORS = 2, (0, 1, 3)
OPERATIONS = ("batch_isend_irecv", "all_reduce", "isend")


def fatal(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The operation is begun, and this process is no more, as if it had been killed."""

    def begun(*args: Any, **options: Any) -> None:
        operation(*args, **options)
        os._exit(1)

    return begun


def bereaved(rank: int, strategy: str, folder: Path, told: Connection) -> None:
    """A worker; the doomed one dies with its first bucket of the second step. Survivors tell what they meet. Then those
    whose strategy sends messages stay until the test ends them: nobody must learn only from a survivor's end."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=4)
    weights = [nn.Parameter(torch.ones(300)) for _ in range(6)]
    exchange = BucketedReducer(
        weights,
        rank=rank,
        world_size=4,
        micro_batches=4,
        is_elastic=False,
        bucket_bytes=1.0,
        algorithm=strategy,
    )
    try:
        for step in range(2):
            for weight in weights:
                weight.grad = None
            if step == 1 and rank == DOOMED:
                for name in OPERATIONS:
                    setattr(dist, name, fatal(getattr(dist, name)))
            exchange.begin_backward(rank)
            torch.stack([weight.sum() for weight in weights]).sum().backward()
            exchange.end_backward()
            exchange.reduce_gradients()
        told.send((2, False, "noticed nothing"))
    except RuntimeError as error:
        told.send((step, is_peer_failure(error), str(error)))
    if strategy not in ("all-reduce", "powersgd"):
        told.recv()
    os._exit(0)


@contextlib.contextmanager
def told_by(work: Callable[..., None], world: int, *arguments: Any) -> Iterator[list[Connection]]:
    """So many processes that do this work, `work(rank, *arguments, pipe)`, and what each of them tells; killed at the
    end."""
    context = start_forkserver()
    pipes = [context.Pipe() for _ in range(world)]
    workers = [
        context.Process(target=work, args=(rank, *arguments, pipes[rank][1]), daemon=True) for rank in range(world)
    ]
    for worker in workers:
        worker.start()
    try:
        yield [near for near, _ in pipes]
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
        for near, far in pipes:
            near.close()
            far.close()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("binomial-tree", "int8") else [pytest.mark.slow])
        for name in GRAD_SYNC_ALGORITHMS
    ],
)
def test_all_survivors_notice_a_worker_that_dies_in_an_exchange(name: str, tmp_path: Path) -> None:
    with told_by(bereaved, 4, name, tmp_path) as pipes:
        for rank in SURVIVORS:
            assert pipes[rank].poll(60), f"rank {rank} waits"  # torch's own patience is half an hour
            step, lost, message = pipes[rank].recv()
            assert (step, lost) == (1, True), message


def left_waiting(rank: int, folder: Path, told: Connection) -> None:
    """The last of three dies; the first learns of it before it has sent anything, the second waits for the first."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=3)
    direct = P2PScatterGather(CommContext(rank, 3, None, clone_group(None), torch.device("cpu")))
    dist.barrier()
    if rank == 2:
        os._exit(1)
    try:
        if rank == 0:
            with contextlib.suppress(RuntimeError):
                dist.recv(torch.empty(1), src=2)
        pending = direct.all_to_all(torch.zeros(3), torch.zeros(3), [1, 1, 1], [1, 1, 1])
        assert pending is not None
        pending.wait()
        told.send("noticed nothing")
    except RuntimeError as error:
        told.send(str(error))
    told.recv()


def test_who_waits_for_a_survivor_that_has_noticed_a_loss_notices_it_too(tmp_path: Path) -> None:
    with told_by(left_waiting, 3, tmp_path) as pipes:
        for rank in range(2):
            assert pipes[rank].poll(30), f"rank {rank} waits"
            assert pipes[rank].recv() != "noticed nothing"


def hung_up(rank: int, folder: Path, told: Connection) -> None:
    """The first waits for the second, and hangs up meanwhile, as another of its threads would."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    dist.barrier()
    if rank == 0:
        work = dist.irecv(torch.empty(1), src=1, tag=5)
        assert work is not None
        with contextlib.suppress(RuntimeError), abort_groups_on_error([None]):
            raise RuntimeError("a peer is gone")
        try:
            work.wait()
            told.send((False, "noticed nothing"))
        except RuntimeError as error:
            told.send((is_peer_failure(error), str(error)))
    told.recv()


def test_a_thread_for_which_another_has_hung_up_has_lost_a_peer_and_made_no_mistake(tmp_path: Path) -> None:
    with told_by(hung_up, 2, tmp_path) as pipes:
        assert pipes[0].poll(30)
        lost, message = pipes[0].recv()
        assert lost, message
