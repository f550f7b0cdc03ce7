"""State that forwards change is the same on all workers after each step, and a run that goes on is the run it was."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from phalanx.errors import RecipeError
from phalanx.run.event_types import AttemptStarted, RunWarning
from phalanx.train.distributed import buffer_sync
from phalanx.train.distributed.buffer_sync import BufferSync
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.fsdp import apply_fsdp
from process_worlds import ProcessWorlds
from train_harness import TrainHarness, Values, plan_fault

STATEFUL: Values = {"model": {"build": "user_models:Stateful"}, "batch": {"micro_size": 2}}


def test_a_model_with_all_of_it_goes_on_in_the_same_bits_and_says_what_all_share(lab: TrainHarness) -> None:
    ended = lab.train(STATEFUL, 2, faults=[plan_fault(1, "slow", delay=0.05, attempt=None), plan_fault(7, ranks=[1])])
    assert ended.digest == lab.train_reference(STATEFUL, 2).digest
    assert [event.start_step > 0 for event in ended.events_of_kind(AttemptStarted)] == [False, True]
    said = [event.text for event in ended.events_of_kind(RunWarning) if "the forward changes" in event.text]
    assert said
    assert all(
        "the model's extra state, last, mean and 3 more: rank 0's values are sent to all workers" in text
        for text in said
    )


class Moving(nn.Module):
    """Changes its buffers, where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flag", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("constant", torch.ones(1000))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def change(self, by: int, *names: str) -> None:
        for name in names:
            getattr(self, name).copy_(torch.full_like(getattr(self, name), by))


class Extra(Moving):
    seen = ""

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def stepped(state: BufferSync, change: Any = None) -> list[str]:
    state.record_versions()
    if change is not None:
        change()
    found = torch.tensor(float(state.detect_changes()))
    dist.all_reduce(found)
    return state.sync_buffers(found > 0)


def settled(rank: int, world: int) -> dict[str, Any]:
    """Some steps in which workers change different things; what each has after them, and what was sent in each."""
    model = Extra()
    state = BufferSync([model], DistEnv(rank, world, rank), dist.group.WORLD, elastic=False)
    sent: list[int] = []
    plain = dist.broadcast

    def counting(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        sent.append(tensor.numel())
        return plain(tensor, *arguments, **options)

    found: dict[str, Any] = {"new": [], "sent": []}

    def step(change: Any = None) -> None:
        found["new"].append(stepped(state, change))
        found["sent"].append(list(sent))
        sent.clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffer_sync.dist, "broadcast", counting)
        step()
        step(lambda: model.change(rank + 1, "mean", "cache"))
        step(lambda: model.change(rank + 1, "count", "flag") if rank == 1 else None)
        found["late"] = (model.count.item(), model.flag.tolist())
        step(lambda: setattr(model, "mean", torch.full((3,), rank + 5.0)))
        found["mean"] = model.mean.tolist()
        step(lambda: setattr(model, "seen", "so much " * (rank + 1)))
    found["seen"] = model.seen
    return found


def test_all_have_what_the_first_has_and_only_what_changes_is_sent(world: ProcessWorlds) -> None:
    first, second = world.run(2, settled)
    assert first == second
    assert first["new"] == [[], ["mean"], ["count", "flag"], [], ["extra/"]]
    assert first["late"] == (0, [False] * 5)
    assert first["mean"] == [5.0] * 3
    assert first["seen"] == "so much "
    assert first["sent"][:4] == [[], [12], [12 + 8 + 5], [12 + 8 + 5]]
    assert first["sent"][4][:2] == [12 + 8 + 5, 1]


def elastic(rank: int, world: int) -> list[str]:
    model = nn.BatchNorm1d(2)
    state = BufferSync([model], DistEnv(rank, world, rank), dist.group.WORLD, elastic=True)
    assert stepped(state, lambda: model.eval()(torch.ones(2, 2))) == []
    with pytest.raises(RecipeError, match="change num_batches_tracked, running_mean, running_var, and each worker"):
        stepped(state, lambda: model.train()(torch.ones(2, 2)))
    return ["raised"]


def test_elastic_replicas_of_such_a_model_are_refused_on_all_workers(world: ProcessWorlds) -> None:
    assert world.run(2, elastic) == [["raised"]] * 2


def test_a_model_without_persistent_buffers_is_not_looked_at() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    state = BufferSync([model], DistEnv(0, 2, 0), None, elastic=True)
    assert state._modules == []


class Frozen(nn.Module):
    """Its teacher follows in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(2, 2).requires_grad_(False)


def follows(rank: int, world: int) -> list[float]:
    model = Frozen()
    state = BufferSync([model], DistEnv(rank, world, rank), dist.group.WORLD, elastic=False)
    assert stepped(state, lambda: model.teacher.bias.fill_(rank + 1.0)) == ["teacher.bias"]
    return model.teacher.bias.tolist()


def test_parameters_that_are_not_trained_and_change_are_shared_like_buffers(world: ProcessWorlds) -> None:
    assert world.run(2, follows) == [[1.0, 1.0]] * 2


def sharded(rank: int, world: int) -> list[str]:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 2)))
    apply_fsdp(model, [], init_device_mesh("cpu", (world,)), precision="bf16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(6, 4)).float().square().sum().backward()
    return sorted({str(parameter.grad.dtype) for parameter in model.parameters() if parameter.grad is not None})


def test_weights_beside_statistics_are_gathered_in_fp32_as_autocast_leaves_them(world: ProcessWorlds) -> None:
    assert world.run(2, sharded) == [["torch.float32"]] * 2
