"""What each worker has for itself goes unchanged to as many workers, and as its mean to any other number of them."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from phalanx.recipe.schema import OuterOptimizerConfig, Parallelism
from phalanx.train.checkpoint.format import CheckpointManifest
from phalanx.train.checkpoint.load_plan import LoadPlan, TensorBlocks
from phalanx.train.distributed.mesh import Mesh, rank_coordinates
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.local_sgd.local_sgd import AVERAGING_OUTER_OPTIMIZER, LocalSGD, SyncSchedule
from phalanx.train.local_sgd.step import LocalSGDState

MOMENT, STEP = "optimizer/weight/exp_avg", "optimizer/weight/step"
OUTER = OuterOptimizerConfig(lr=0.5, momentum=0.5)
BEGUN, FILL = 1.0, 3.0


def apart(
    rank: int, world: int, outer: OuterOptimizerConfig = AVERAGING_OUTER_OPTIMIZER
) -> tuple[nn.Parameter, LocalSGDState]:
    """A worker whose round begins with weights of 1, and whose outer momentum is 3."""
    layout = Parallelism(replicate=world)
    model = nn.Linear(3, 2, bias=False)
    nn.init.constant_(model.weight, BEGUN)
    rounds = LocalSGD([model.weight], rank=rank, world_size=world, schedule=SyncSchedule(4, 10), outer_optimizer=outer)
    for momentum in rounds.outer_momenta().values():
        momentum.fill_(FILL)
    return model.weight, LocalSGDState(ParallelModel(Mesh(layout, rank_coordinates(layout, rank)), (model,)), rounds)


def saved(
    world: int, outer: OuterOptimizerConfig = AVERAGING_OUTER_OPTIMIZER, together: bool = False
) -> dict[str, Tensor]:
    """The logical tensors of a checkpoint, written where worker i had come to weights of 10^i, and moments of i."""
    found: dict[str, Tensor] = {}
    for rank in range(world):
        weight, mine = apart(rank, world, outer)
        if not together:
            nn.init.constant_(weight, float(10**rank))
            mine.local_sgd.in_sync = False
        divided = mine.parallel_model
        state = {
            "weight": divided.local_tensor("weight", weight),
            MOMENT: divided.local_tensor("weight", weight, torch.full((2, 3), float(rank))),
            STEP: divided.replicated_tensor(torch.tensor(7.0)),
        }
        for name, held in mine.add_per_worker_rows(state).items():
            whole = found.setdefault(name, torch.full(held.global_blocks.global_shape, torch.nan))
            for block in held.global_blocks.blocks:
                whole[tuple(slice(at, at + n) for at, n in zip(block.global_offset, block.extent, strict=True))] = (
                    block.slice_local(held.tensor)
                )
    return found


def loaded(
    tensors: dict[str, Tensor], rank: int, world: int, outer: OuterOptimizerConfig = AVERAGING_OUTER_OPTIMIZER
) -> tuple[Tensor, LocalSGDState, Any]:
    """A worker that has read it: its weights, and the optimizer's states."""
    weight, mine = apart(rank, world, outer)

    def read(blocks: TensorBlocks) -> None:
        for name, offset, into in blocks:
            into.copy_(tensors[name][tuple(slice(at, at + n) for at, n in zip(offset, into.shape, strict=True))])

    records = {name: SimpleNamespace(shape=tuple(t.shape), torch_dtype=t.dtype) for name, t in tensors.items()}
    given = LoadPlan([("weight", (0, 0), weight.detach())], [], {})
    wanted = mine.extend_load_plan(given, cast(CheckpointManifest, SimpleNamespace(tensors=records, meta={"step": 6})))
    before = weight.detach().clone()
    read(wanted.new_blocks)
    assert weight.equal(before)
    read(wanted.live_blocks)
    for turn in wanted.sequential_blocks:
        read(turn)
        wanted.add_sequential()
    wanted.restore_state()
    return weight.detach(), mine, wanted.optimizer_tensors


def assert_filled(tensor: Tensor, value: float) -> None:
    torch.testing.assert_close(tensor, torch.full_like(tensor, value))


@pytest.mark.parametrize("outer", [AVERAGING_OUTER_OPTIMIZER, OUTER], ids=["local", "diloco"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_as_many_workers_go_on_in_the_middle_of_their_round(world: int, outer: OuterOptimizerConfig) -> None:
    tensors = saved(world, outer)
    assert_filled(tensors["weight"], BEGUN)
    for rank in range(world):
        weight, mine, states = loaded(tensors, rank, world, outer)
        assert_filled(weight, 10**rank)
        assert_filled(states[MOMENT], rank)
        assert not mine.local_sgd.in_sync
        (start,) = mine.local_sgd.global_params().values()
        assert_filled(start, BEGUN)
        for momentum in mine.local_sgd.outer_momenta().values():
            assert_filled(momentum, FILL)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (3, 2), (2, 3)])
def test_another_number_begins_a_round_with_the_mean(before: int, after: int) -> None:
    tensors = saved(before)
    for rank in range(after):
        weight, mine, states = loaded(tensors, rank, after)
        assert_filled(weight, sum(10**each for each in range(before)) / before)
        assert_filled(states[MOMENT], sum(range(before)) / before)
        assert states[STEP].item() == 7.0
        assert mine.local_sgd.in_sync


def test_another_number_takes_the_outer_step_that_was_due() -> None:
    """From 1 towards the mean of 1 and 10, with a momentum of 3 from before: as torch's SGD."""
    weight, mine, _ = loaded(saved(2, OUTER), 0, 1, OUTER)
    parameter = nn.Parameter(torch.full((2, 3), BEGUN))
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.5, nesterov=True)
    optimizer.state[parameter]["momentum_buffer"] = torch.full((2, 3), FILL)
    parameter.grad = torch.full((2, 3), BEGUN - 5.5)
    optimizer.step()
    torch.testing.assert_close(weight, parameter.detach())
    (start,) = mine.local_sgd.global_params().values()
    torch.testing.assert_close(start, parameter.detach())


def test_between_rounds_nothing_of_the_weights_is_anybodys_own() -> None:
    tensors = saved(2, together=True)
    assert set(tensors) == {"weight", f"local_sgd/worker/{MOMENT}", f"local_sgd/worker/{STEP}"}
    weight, mine, _ = loaded(tensors, 0, 3)
    assert_filled(weight, BEGUN)
    assert mine.local_sgd.in_sync


def test_a_checkpoint_of_workers_that_trained_together_begins_a_round() -> None:
    weight, mine, states = loaded({"weight": torch.full((2, 3), 5.0)}, 0, 2, OUTER)
    assert_filled(weight, 5.0)
    assert mine.local_sgd.in_sync
    assert states == {}
    for momentum in mine.local_sgd.outer_momenta().values():
        assert_filled(momentum, 0.0)


def test_what_falls_due_in_a_round_is_due_when_it_ends() -> None:
    """Rounds of four steps; the last step, 10, ends one besides."""
    _, mine = apart(0, 1)
    due = {step: list(mine.due_steps(step)) for step in range(1, 11)}
    ends = {4: [1, 2, 3, 4], 8: [5, 6, 7, 8], 10: [9, 10]}
    assert due == {step: ends.get(step, []) for step in range(1, 11)}


def test_a_score_is_that_of_the_weights_that_were_agreed_on_last() -> None:
    weight, other = nn.Parameter(torch.full((4,), 1.0)), nn.Parameter(torch.full((4,), 5.0))
    rounds = LocalSGD([weight, other], rank=0, world_size=1, schedule=SyncSchedule(4, 10, num_fragments=2))
    rounds.in_sync = False
    with torch.no_grad():
        weight.fill_(2.0)
        other.fill_(6.0)
    with rounds.use_global_params():
        assert (weight.tolist(), other.tolist()) == ([1.0] * 4, [5.0] * 4)
    assert (weight.tolist(), other.tolist()) == ([2.0] * 4, [6.0] * 4)


def test_weights_of_16_bits_are_averaged_in_32() -> None:
    weight = nn.Parameter(torch.full((4,), 256.0, dtype=torch.bfloat16))
    rounds = LocalSGD([weight], rank=0, world_size=1, schedule=SyncSchedule(1, 1))
    nn.init.constant_(weight, 258.0)
    rounds.after_step(1, updated=True)
    assert [bucket.buffer.flat.dtype for bucket in rounds.buckets] == [torch.float32]
    assert weight.tolist() == [258.0] * 4


def test_a_worker_that_is_left_alone_uses_up_what_was_held_back() -> None:
    weight = nn.Parameter(torch.full((4,), 1.0))
    rounds = LocalSGD([weight], rank=0, world_size=1, schedule=SyncSchedule(1, 2), sync_dtype="int8")
    rounds.residuals()[weight].fill_(0.5)  # of the way back
    for step, expected in ((1, 1.5), (2, 2.0)):
        nn.init.constant_(weight, 2.0)
        rounds.after_step(step, updated=True)
        assert weight.tolist() == [expected] * 4
