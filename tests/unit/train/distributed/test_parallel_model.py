"""A model as one worker holds it: who else holds the same, and that its parts make the whole again."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from checkpointers import StepSaver
from phalanx.errors import DataError
from phalanx.recipe.schema import OptimizerConfig, Parallelism
from phalanx.run import Run
from phalanx.train.checkpoint.format import read_manifest
from phalanx.train.checkpoint.load_plan import (
    execute_load_plan,
    get_local_state,
    make_load_plan,
)
from phalanx.train.checkpoint.save import OwnedTensors, SaveContext
from phalanx.train.distributed.environment import DistEnv
from phalanx.train.distributed.parallel_model import ParallelModel, TiedParam
from phalanx.train.distributed.shard_spec import DimShard, shard_evenly
from phalanx.train.optim.container import OptimizerContainer
from phalanx.train.precision import GradScaler
from phalanx.train.step_metrics import StepFlags
from phalanx.train.train_state import AppState
from small_train import mesh_of, tiny_lm

LAYOUT = {"replicate": 2, "shard": 2, "context": 2, "tensor": 2}


def rows_cut(axis: str, rank: int = 0, size: int = 2) -> tuple[DimShard, ...]:
    return (shard_evenly(0, 8, rank, size, axis),)


@pytest.mark.parametrize(
    ("cuts", "expected"),
    [
        ((), ("replicate", "shard", "context", "tensor")),
        (rows_cut("tensor"), ("replicate", "shard", "context")),
        (rows_cut("expert"), ("replicate", "tensor")),
        ((*rows_cut("expert"), shard_evenly(1, 8, 0, 2, "tensor")), ("replicate",)),
    ],
)
def test_ranks_hold_the_same_along_the_axes_that_do_not_cut(
    cuts: tuple[DimShard, ...], expected: tuple[str, ...]
) -> None:
    model = tiny_lm()
    divided = ParallelModel(mesh_of(**LAYOUT), (model,), {"hidden.weight": cuts})
    assert divided.replicated_axes("hidden.weight", model.hidden.weight) == expected


def test_what_is_held_says_where_it_belongs_and_shares_the_memory() -> None:
    model = tiny_lm()
    model.hidden.weight.data = model.hidden.weight.data[4:].clone()
    divided = ParallelModel(mesh_of(1, tensor=2), (model,), {"hidden.weight": rows_cut("tensor", rank=1)})
    held = divided.local_tensor("hidden.weight", model.hidden.weight)
    (block,) = held.global_blocks.blocks
    assert (held.global_blocks.global_shape, block.global_offset, block.extent) == ((8, 8), (4, 0), (4, 8))
    held.tensor.fill_(7.0)
    assert (model.hidden.weight == 7.0).all()


def test_a_frozen_parameter_is_held_and_not_trained() -> None:
    model = tiny_lm()
    model.norm.requires_grad_(False)
    divided = ParallelModel(mesh_of(), (model,))
    assert set(divided.parameters()) - set(divided.trainable_parameters()) == {"norm.weight", "norm.bias"}


def test_a_tied_gradient_counts_once_in_the_norm() -> None:
    model = tiny_lm()
    divided = ParallelModel(mesh_of(), (model,), tied_params={"head.weight": TiedParam(None, is_owner=False)})
    ones = {"head.weight": torch.ones(11, 8), "norm.bias": torch.ones(4)}
    assert float(divided.grad_norm(ones)) == 2.0


def trained() -> tuple[nn.Module, OptimizerContainer]:
    """A model with an optimizer state."""
    model = tiny_lm()
    optimizer = OptimizerContainer(model, OptimizerConfig())
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 + number)
    optimizer.step(1e-2)
    return model, optimizer


def tensor_rank(rank: int, size: int, seed: int | None = None) -> tuple[ParallelModel, OptimizerContainer]:
    """What rank of so many tensor ranks holds of the trained model: columns of `hidden`, rows of the embedding as far
    as they go; with `seed` other values of the same shapes."""
    whole, trained_optimizer = trained()
    state = trained_optimizer.state()
    model = tiny_lm()
    cuts = {
        "hidden.weight": shard_evenly(1, 8, rank, size, "tensor"),
        "head.weight": shard_evenly(1, 8, rank, size, "tensor"),
    }
    for name, cut in cuts.items():
        parameter = model.get_parameter(name)
        parameter.data = _own_part(parameter.data, cut).contiguous()
    optimizer = OptimizerContainer(model, OptimizerConfig())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(1e-2)  # so that it has state
    divided = ParallelModel(mesh_of(rank, tensor=size), (model,), {name: (cut,) for name, cut in cuts.items()})
    if seed is None:
        sources = {**dict(whole.named_parameters()), **state}
        with torch.no_grad():
            for name, held in get_local_state(AppState(divided, optimizer, GradScaler())).items():
                copy_part(sources[name], name, held.tensor, cuts)
    return divided, optimizer


def _own_part(source: Tensor, cut: DimShard) -> Tensor:
    ((start, end),) = cut.ranges
    return source.narrow(cut.dim, start, end - start)


def copy_part(source: Tensor, name: str, target: Tensor, cuts: dict[str, DimShard]) -> None:
    cut = next((cut for parameter, cut in cuts.items() if parameter in name and source.dim() == 2), None)
    target.copy_(source if cut is None else _own_part(source, cut))


def save(run: Run, ranks: list[tuple[ParallelModel, OptimizerContainer]]) -> Path:
    """Save as so many workers would, who here take turns."""
    world = len(ranks)
    savings = [
        StepSaver(
            SaveContext(run, DistEnv(rank, world), divided.mesh, {}, lambda *_: None),
            AppState(divided, optimizer, GradScaler()),
        )
        for rank, (divided, optimizer) in enumerate(ranks)
    ]
    for saving in savings:
        saving.start(3)
    for flags in (StepFlags(written=world), StepFlags(committed=1)):
        for saving in savings:
            assert saving.durable_in_flight is not None
            saving.durable_in_flight.saver.poll_when_idle()
        for saving in savings:
            saving.step_done(flags)
    for saving in savings:
        saving.close()
    return run.checkpoints / "step-000000003"


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (4, 2), (2, 4)])
def test_what_is_saved_under_one_layout_is_read_under_another(run: Run, before: int, after: int) -> None:
    path = save(run, [tensor_rank(rank, before) for rank in range(before)])
    for rank in range(after):
        divided, optimizer = tensor_rank(rank, after, seed=1)
        before = {
            name: each.tensor.clone()
            for name, each in get_local_state(AppState(divided, optimizer, GradScaler())).items()
        }
        manifest = read_manifest(path)
        load_plan = make_load_plan(divided, path, manifest)
        take_over = execute_load_plan(load_plan, AppState(divided, optimizer, GradScaler()), path, manifest)
        for name, held in get_local_state(AppState(divided, optimizer, GradScaler())).items():
            assert before[name].equal(held.tensor), name
        take_over()
        expected_divided, expected_optimizer = tensor_rank(rank, after)
        found = get_local_state(AppState(divided, optimizer, GradScaler()))
        for name, held in get_local_state(AppState(expected_divided, expected_optimizer, GradScaler())).items():
            assert found[name].tensor.equal(held.tensor), name


def test_a_checkpoint_with_a_weight_that_the_model_does_not_have_is_refused(run: Run) -> None:
    path = save(run, [tensor_rank(0, 1)])
    smaller = nn.ModuleDict({"hidden": tiny_lm().hidden})
    with pytest.raises(DataError, match=r"holds .embedding.weight., which the model does not have"):
        make_load_plan(ParallelModel(mesh_of(0), (smaller,)), path, read_manifest(path))


def test_every_worker_has_something_to_save_of_what_all_hold() -> None:
    layout = Parallelism(replicate=2, tensor=2)
    shares = []
    for rank in range(layout.world):
        mesh = mesh_of(rank, replicate=2, tensor=2)
        divided = ParallelModel(mesh, (tiny_lm(),), {"hidden.weight": rows_cut("tensor", rank % 2)})
        owned = OwnedTensors(mesh.index_along)
        owned.update({name: divided.local_tensor(name, p) for name, p in divided.parameters().items()})
        shares.append(owned.names)
    for name in tiny_lm().state_dict():
        owners = [rank for rank, share in enumerate(shares) if name in share]
        tensor_ranks = sorted(rank % 2 for rank in owners)
        assert tensor_ranks == [0, 1] if name == "hidden.weight" else len(owners) == 1
    assert all(shares)
