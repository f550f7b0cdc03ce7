"""Pipelines on 2 and 4 processes against one process: losses, gradients of every parameter, evaluation."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.models import transformer
from phalanx.train.distributed.pipeline.dataflow import Dataflow, trace_dataflow
from phalanx.train.distributed.pipeline.partition import (
    StageModule,
    StagePartition,
    balance_stage_bounds,
    extract_stages,
    partition_stages,
)
from phalanx.train.distributed.pipeline.schedule import Pipeline, assign_stage_owners
from process_worlds import ProcessWorlds

VOCAB, SEQUENCE = 31, 12
TOLERANCE = 1e-5


# Models: name -> (builder, names of the blocks)


class Perceptrons(nn.Module):
    """Blocks that compute in the dtype of autocast and hand that on, unlike a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(4))
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def build(kind: str, layers: int) -> tuple[nn.Module, list[str]]:
    torch.manual_seed(1)
    blocks = [f"blocks.{index}" for index in range(layers)]
    if kind == "perceptrons":
        return Perceptrons(), blocks
    return transformer(VOCAB, SEQUENCE, layers, 16, num_heads=2, tie_embeddings=kind == "tied"), blocks


def batches_of(count: int, documents: bool) -> list[dict[str, Tensor]]:
    """Micro-batches with different numbers of terms."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for index in range(count):
        tokens = torch.randint(0, VOCAB, (2, SEQUENCE + 1), generator=generator)
        batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
        batch["targets"][:, : index % 5] = -100
        if documents:
            batch["documents"] = (torch.rand(2, SEQUENCE, generator=generator) < 0.3).cumsum(1)
        made.append(batch)
    return made


def objective(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    if "documents" in batch:
        logits = model(batch["tokens"], documents=batch["documents"])
    else:
        logits = model(batch["tokens"])
    targets = batch["targets"]
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum", ignore_index=-100)
    return losses, (targets != -100).sum()


def in_bf16(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    with autocast():
        return objective(model, batch)


def freeze(model: nn.Module, prefixes: Sequence[str]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(prefixes)) if prefixes else True)


def reference(
    kind: str, layers: int, count: int, *, documents: bool = False, frozen: Sequence[str] = (), times: int = 1
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and sums of gradients of one process."""
    model, _ = build(kind, layers)
    freeze(model, frozen)
    losses = []
    for _ in range(times):
        for batch in batches_of(count, documents):
            loss, _ = objective(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@functools.cache
def surveyed(kind: str, layers: int) -> Dataflow:
    model, blocks = build(kind, layers)
    return trace_dataflow(model, blocks, objective, batches_of(1, documents=kind == "tied")[0])


def divided(kind: str, layers: int, stages: int) -> tuple[nn.Module, StagePartition]:
    model, blocks = build(kind, layers)
    bounds = balance_stage_bounds([1.0] * len(blocks), stages)
    return model, partition_stages(surveyed(kind, layers), bounds)


def autocast() -> contextlib.AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def train(
    rank: int,
    world: int,
    *,
    kind: str,
    schedule: str,
    stages: int,
    micro_batches: int,
    layers: int = 4,
    documents: bool = False,
    frozen: Sequence[str] = (),
    times: int = 1,
    scale: float | None = None,
    bf16: bool = False,
) -> dict[str, Any]:
    """Losses, gradients by name and stage, and evaluation of a rank."""
    model, division = divided(kind, layers, stages)
    freeze(model, frozen)
    own = [stage for stage, owner in enumerate(assign_stage_owners(schedule, stages, world)) if owner == rank]
    modules = {
        index: StageModule(made, division, index, in_bf16 if bf16 else objective)
        for index, made in extract_stages(model, division, own).items()
    }
    del model
    assert dist.group.WORLD is not None
    pipeline = Pipeline(
        modules,
        stages,
        schedule=schedule,
        group=dist.group.WORLD,
        device=torch.device("cpu"),
        get_loss_scale=None if scale is None else lambda: scale,
    )
    losses: list[float] = []
    for _ in range(times):
        results = pipeline.step(batches_of(micro_batches, documents))
        losses += [float(loss) for loss, _ in results or ()]
    for module in modules.values():
        module.eval()
    evaluated = [pipeline.evaluate(batch) for batch in batches_of(micro_batches + 1, documents)]
    grads = {
        (name.removeprefix("model."), index): parameter.grad
        for index, module in modules.items()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    sent = [flow.sent.dtype for flows in pipeline._stage_ios.values() for flow in flows.values() if flow.sent]
    return {"losses": losses, "grads": grads, "ties": division.tied_params, "evaluated": evaluated, "sent": sent}


def gathered(found: list[dict[str, Any]]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of the rank that has them, and gradients added over the stages of a tie."""
    losses = [one["losses"] for one in found if one["losses"]]
    assert len(losses) == 1
    sums: dict[str, Tensor] = {}
    held: dict[str, list[int]] = {}
    for one in found:
        for (name, stage), grad in one["grads"].items():
            sums[name] = sums[name] + grad if name in sums else grad
            held.setdefault(name, []).append(stage)
    ties = {name: list(stages) for name, stages in found[0]["ties"].items()}
    assert {name: sorted(stages) for name, stages in held.items() if len(stages) > 1}.items() <= ties.items()
    return losses[0], sums


def assert_equal_to_one_process(
    found: list[dict[str, Any]], alone: tuple[list[float], dict[str, Tensor]], factor: float = 1.0
) -> None:
    losses, grads = gathered(found)
    assert losses == pytest.approx(alone[0], rel=TOLERANCE)
    assert grads.keys() == alone[1].keys()
    for name, expected in alone[1].items():
        torch.testing.assert_close(
            grads[name], expected * factor, rtol=TOLERANCE, atol=TOLERANCE * factor * float(expected.abs().max())
        )


@pytest.mark.parametrize(
    ("ranks", "schedule", "stages", "micro_batches"),
    [
        (2, "gpipe", 2, 3),
        (2, "interleaved", 4, 4),
        (2, "zero-bubble", 4, 5),
        (2, "zero-bubble", 6, 4),
        (4, "1f1b", 4, 6),
        (4, "interleaved", 8, 6),
        (4, "zero-bubble", 4, 8),
        (4, "zero-bubble", 8, 5),
    ],
)
def test_every_schedule_trains_and_evaluates_as_one_process(
    world: ProcessWorlds, ranks: int, schedule: str, stages: int, micro_batches: int
) -> None:
    """With tied embeddings and documents that must not see each other."""
    options: dict[str, Any] = {"schedule": schedule, "stages": stages, "micro_batches": micro_batches}
    found = world.run_once(ranks, train, kind="tied", layers=max(4, stages), documents=True, **options)
    assert_equal_to_one_process(found, reference("tied", max(4, stages), micro_batches, documents=True))
    assert list(found[0]["ties"].values()) == [(0, stages - 1)]

    (results,) = [one["evaluated"] for one in found if one["evaluated"][0] is not None]
    alone, _ = reference("tied", max(4, stages), micro_batches + 1, documents=True)
    assert [float(loss) for loss, _ in results] == pytest.approx(alone, rel=TOLERANCE)
    batches = batches_of(micro_batches + 1, documents=True)
    assert [int(terms) for _, terms in results] == [int((b["targets"] != -100).sum()) for b in batches]


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("interleaved", 4), ("zero-bubble", 4)])
@pytest.mark.parametrize("frozen", [["embedding", "blocks.0", "blocks.1"], ["blocks.2", "blocks.3"]], ids=str)
def test_frozen_parameters_get_no_gradient_wherever_they_are(
    world: ProcessWorlds, schedule: str, stages: int, frozen: list[str]
) -> None:
    found = world.run_once(2, train, kind="untied", schedule=schedule, stages=stages, micro_batches=4, frozen=frozen)
    assert_equal_to_one_process(found, reference("untied", 4, 4, frozen=frozen))


@pytest.mark.parametrize(("schedule", "stages"), [("gpipe", 2), ("1f1b", 2), ("interleaved", 4), ("zero-bubble", 4)])
def test_a_second_step_adds_to_the_gradients(world: ProcessWorlds, schedule: str, stages: int) -> None:
    found = world.run_once(2, train, kind="tied", schedule=schedule, stages=stages, micro_batches=2, times=2)
    assert_equal_to_one_process(found, reference("tied", 4, 2, times=2))


def test_the_loss_scale_multiplies_gradients_and_leaves_losses(world: ProcessWorlds) -> None:
    found = world.run_once(2, train, kind="tied", schedule="1f1b", stages=2, micro_batches=2, scale=64.0)
    assert_equal_to_one_process(found, reference("tied", 4, 2), factor=64.0)


def test_activations_travel_in_the_dtype_that_autocast_gives_them(world: ProcessWorlds) -> None:
    found = world.run_once(2, train, kind="perceptrons", schedule="1f1b", stages=2, micro_batches=2, bf16=True)
    assert {dtype for one in found for dtype in one["sent"]} == {torch.bfloat16}
    model, _ = build("perceptrons", 4)
    for batch in batches_of(2, documents=False):
        with autocast():
            loss, _ = objective(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
    _, grads = gathered(found)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(grads[name], parameter.grad)
