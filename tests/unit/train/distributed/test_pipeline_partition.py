"""Cutting models into pipeline stages, run one after the other in this process: no communication."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.errors import RecipeError
from phalanx.models import transformer
from phalanx.recipe.schema import Parallelism
from phalanx.recipe.work_division import fitting
from phalanx.train.distributed.mesh import Mesh
from phalanx.train.distributed.parallel_model import ParallelModel
from phalanx.train.distributed.pipeline.dataflow import ModelLossFn, trace_dataflow
from phalanx.train.distributed.pipeline.partition import (
    StageModule,
    StagePartition,
    assign_buffer_owners,
    balance_stage_bounds,
    extract_stages,
    partition_stages,
)
from phalanx.train.distributed.pipeline.schedule import assign_stage_owners
from phalanx.train.distributed.stubs import ShapeStub

WIDTH, VOCAB, LAYERS = 8, 11, 4
BLOCKS = [f"blocks.{index}" for index in range(LAYERS)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def tokens() -> dict[str, Tensor]:
    return {"tokens": torch.randint(0, VOCAB, (2, 5)), "targets": torch.randint(0, VOCAB, (2, 5))}


def objective(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum"), batch["tokens"].numel()


class Block(nn.Module):
    """A block with a residual connection; `give` makes something of its activation."""

    def __init__(self, give: Callable[[Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.linear, self.give = nn.Linear(WIDTH, WIDTH), give

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        for other in others:
            x = x + other
        return self.give(x + torch.tanh(self.linear(x)))


Body = Callable[[nn.ModuleList, Tensor], Tensor]


def in_turn(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


class Model(nn.Module):
    """Embedding, blocks, head; `body` says how the blocks are applied, and `give` what each returns."""

    def __init__(self, body: Body = in_turn, give: Callable[[Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(give) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.apply_blocks = body

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embedding(tokens)))
        return logits

    def body(self, x: Tensor) -> Tensor:
        return self.apply_blocks(self.blocks, x)


def twice(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """Every block also reads the embedding of the input."""
    first = x
    for block in blocks:
        x = block(x, first)
    return x


class RawParameters(Model):
    """A parameter of the model itself is added before the blocks, another after them."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(5, WIDTH))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def body(self, x: Tensor) -> Tensor:
        return super().body(x + self.position) * self.temperature


def tuples(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """Blocks return their activation with other things, of which nobody reads the tensors."""
    for block in blocks:
        x = block(x)[0]
    return x


class Pyramid(nn.Module):
    """Blocks of different widths on images: activations differ in shape from stage to stage."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4 * 2**i, 8 * 2**i, 3, stride=2, padding=1), nn.ReLU()) for i in range(LAYERS)
        )
        self.head = nn.Linear(4 * 2**LAYERS, VOCAB)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(in_turn(self.blocks, self.stem(images)).mean((2, 3)))
        return logits


def skip(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """The last block reads what the first returned."""
    first: Tensor = blocks[0](x)
    last: Tensor = blocks[-1](in_turn(blocks[1:-1], first), first)
    return last


def deep(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """The head reads what all blocks returned."""
    seen = []
    for block in blocks:
        x = block(x)
        seen.append(x)
    return torch.stack(seen).sum(0)


def between(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """Something happens between the blocks."""
    for block in blocks:
        x = block(x * 2)
    return x


def pairs(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """The second of what a block returns goes into the next."""
    others: tuple[Tensor, ...] = ()
    for block in blocks:
        x, *others = block(x, *others)
    return x


def dictionaries(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)["hidden"]
    return x


def backwards(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return in_turn(blocks[::-1], x)


def looking(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """The forward depends on values."""
    return in_turn(blocks, x if float(x.detach().sum()) < 1e6 else x + 1)


class Hidden(Model):
    """The embedding is used without autograd."""

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.embedding(tokens)
        logits: Tensor = self.head(self.body(x))
        return logits


def images() -> dict[str, Tensor]:
    return {"tokens": torch.randn(2, 3, 16, 16), "targets": torch.randint(0, VOCAB, (2,))}


def image_objective(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch["tokens"]), batch["targets"], reduction="sum"), len(batch["targets"])


def run(
    division: StagePartition, model: nn.Module, loss: ModelLossFn, batches: Sequence[Any]
) -> tuple[list[StageModule], Tensor]:
    """All stages in turn, forward and backward; the sum of losses."""
    stages = [
        StageModule(made, division, index, loss)
        for index, made in extract_stages(model, division, range(division.num_stages)).items()
    ]
    total = torch.zeros(())
    for stage in stages:
        stage.set_batches(batches)
    for turn in range(len(batches)):
        hidden: Tensor | None = None
        for stage in stages:
            stage.micro_batch_index = turn
            hidden = stage(hidden)
        assert hidden is not None
        hidden.backward()  # type: ignore[no-untyped-call]
        total += hidden.detach()
    return stages, total


def gradients(stages: Sequence[StageModule]) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                name = name.removeprefix("model.")
                sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad
    return sums


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize(
    "build",
    [Model, lambda: Model(twice), RawParameters, lambda: Model(tuples, lambda x: (x, None, x.mean(-1))), Pyramid],
    ids=["in turn", "twice", "raw parameters", "tuples", "pyramid"],
)
def test_stages_in_turn_give_the_gradients_of_the_whole(build: Callable[[], nn.Module], stages: int) -> None:
    model = build()
    loss, batch = (image_objective, images) if isinstance(model, Pyramid) else (objective, tokens)
    batches = [batch() for _ in range(2)]
    whole = copy.deepcopy(model)
    expected = torch.zeros(())
    for one in batches:
        value = loss(whole, one)[0]
        value.backward()
        expected += value.detach()
    division = partition_stages(trace_dataflow(model, BLOCKS, loss, batches[0]), even_bounds(stages))
    made, total = run(division, model, loss, batches)
    torch.testing.assert_close(total, expected)
    found = gradients(made)
    assert found.keys() == {name for name, _ in whole.named_parameters()}
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def even_bounds(stages: int) -> tuple[int, ...]:
    return balance_stage_bounds([1.0] * LAYERS, stages)


def division_of(model: nn.Module, stages: int) -> StagePartition:
    return partition_stages(trace_dataflow(model, BLOCKS, objective, tokens()), even_bounds(stages))


def test_each_parameter_is_where_it_is_needed() -> None:
    division = division_of(RawParameters(), 2)
    assert division.parameter_names(0) == {
        "embedding.weight",
        "position",
        *(f"blocks.{index}.linear.{kind}" for index in (0, 1) for kind in ("weight", "bias")),
    }
    assert division.parameter_names(1) == {
        "temperature",
        "head.weight",
        "head.bias",
        *(f"blocks.{index}.linear.{kind}" for index in (2, 3) for kind in ("weight", "bias")),
    }
    assert division.tied_params == {}


class Normed(Model):
    """With statistics before the blocks, in one of them and behind them, and a constant of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.BatchNorm1d(5) for _ in range(2))
        self.blocks[2].norm = nn.BatchNorm1d(5)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.last(self.body(self.first(self.embedding(tokens)))))
        return logits + self.seen


@pytest.mark.parametrize("stages", [2, 4])
def test_what_a_forward_changes_is_kept_by_one_stage_which_has_it(stages: int) -> None:
    model = Normed()
    division = division_of(model, stages)
    found = assign_buffer_owners(model, division)
    assert {name: found[f"{name}.running_mean"] for name in ("first", "blocks.2.norm", "last")} == {
        "first": 0,
        "blocks.2.norm": stages // 2,
        "last": stages - 1,
    }
    assert found["seen"] == stages - 1
    for name, _ in model.named_buffers():
        made = extract_stages(model, division, [found[name]])
        assert name in {other for part in made.values() for other, _ in part.model.named_buffers()}


class BothEnds(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        self.centre.add_(h.detach().mean((0, 1)))
        h = self.body(h)
        self.centre.add_(h.detach().mean((0, 1)))
        logits: Tensor = self.head(h)
        return logits


def test_a_changed_buffer_that_several_stages_have_is_refused_by_name() -> None:
    model = BothEnds()
    with pytest.raises(RecipeError, match=r"parallelism.pipeline: forwards change centre, of which several"):
        assign_buffer_owners(model, division_of(model, 2))


def test_copies_of_what_another_stage_saves_are_read_and_not_saved() -> None:
    model = Normed()
    divided = ParallelModel(Mesh(Parallelism(), {}), (model,), buffers_owned_elsewhere=frozenset({"seen"}))
    assert "seen" not in divided.owned_buffers()
    assert "seen" in dict(divided.all_buffers())


def test_the_model_is_not_changed_by_survey_and_cut() -> None:
    model = RawParameters()
    before, batch = copy.deepcopy(model), tokens()
    extract_stages(model, partition_stages(trace_dataflow(model, BLOCKS, objective, batch), (0, 2, 4)), [0, 1])
    assert [name for name, _ in model.named_modules()] == [name for name, _ in before.named_modules()]
    for name, value in before.state_dict().items():
        assert model.state_dict()[name].equal(value)
    assert objective(model, batch)[0].equal(objective(before, batch)[0])


def test_a_model_without_memory_can_be_surveyed_and_cut() -> None:
    with torch.device("meta"):
        model = Model()
    division = division_of(model, 2)
    made = extract_stages(model, division, [1])[1]
    assert all(parameter.is_meta for parameter in made.model.parameters())
    assert division.parameter_names(1) == {name for name, _ in made.model.named_parameters()}


def test_a_stub_gives_the_dtype_that_autocast_gives_the_module() -> None:
    stub = ShapeStub(nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)))
    indices = torch.zeros(2, 3, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        cast = stub(indices)
    assert (cast.shape, cast.dtype) == ((2, 3, 2 * WIDTH), torch.bfloat16)
    assert stub(indices).dtype == torch.float32


def test_tied_weights_are_on_both_ends_under_one_name() -> None:
    model = transformer(VOCAB, 5, layers=LAYERS, hidden_size=WIDTH, num_heads=2, tie_embeddings=True)
    division = division_of(model, 4)
    assert division.tied_params == {"embedding.weight": (0, 3)}
    stages = extract_stages(model, division, [0, 3])
    assert stages[3].model.head.weight is stages[3].model.embedding.weight
    # Both on one rank, as in a V: each has its own, to be added by whoever adds gradients of ties.
    assert stages[0].model.embedding.weight is not stages[3].model.embedding.weight


def test_parameters_that_nothing_uses_are_on_the_last_stage() -> None:
    model = Model()
    model.unused = nn.Linear(2, 2)
    assert {"unused.weight", "unused.bias"} <= division_of(model, 2).parameter_names(1)
    assert not {"unused.weight", "unused.bias"} & division_of(model, 2).parameter_names(0)


class Reusing(nn.Module):
    """A block whose layer is applied to two tensors, or to its own output."""

    def __init__(self, in_turn: bool):
        super().__init__()
        self.layer, self.in_turn = nn.Linear(WIDTH, WIDTH), in_turn

    def forward(self, x: Tensor) -> Tensor:
        once = self.layer(x)
        return self.layer(once) if self.in_turn else once + self.layer(2 * x)


@pytest.mark.parametrize(
    ("in_turn", "reused"), [(True, {"blocks.1.layer.weight", "blocks.1.layer.bias"}), (False, set())]
)
def test_a_parameter_that_is_applied_to_what_it_has_computed_is_named(in_turn: bool, reused: set[str]) -> None:
    model = Model()
    model.blocks[1] = Reusing(in_turn)
    found = trace_dataflow(model, BLOCKS, objective, tokens())
    assert found.reused_params == reused


def test_a_skip_connection_within_a_stage_is_no_obstacle() -> None:
    found = trace_dataflow(Model(skip), BLOCKS, objective, tokens())
    assert partition_stages(found, (0, 4)).num_stages == 1
    with pytest.raises(RecipeError, match="skip connection"):
        partition_stages(found, (0, 2, 4))
    assert partition_stages(found, (0, 1, 4)).num_stages == 2


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Model(skip), "cannot cut between blocks.1 and blocks.2: blocks.3 also uses the output of blocks.0 "),
        (
            lambda: Model(deep),
            "cannot cut between blocks.1 and blocks.2: the model's end also uses the output of blocks.0 ",
        ),
        (
            lambda: Model(between),
            "cannot cut between blocks.1 and blocks.2: the first argument of blocks.2 is not the output",
        ),
        (
            lambda: Model(pairs, lambda x: (x, x.mean(-1, keepdim=True))),
            "blocks.2 uses what blocks.1 returns besides its first output",
        ),
        (lambda: Model(dictionaries, lambda x: {"hidden": x}), "blocks.1 returns dict, not a tensor of floats"),
        (lambda: Model(backwards), "block blocks.3 runs out of order"),
        (lambda: Model(looking), "its forward without data fails"),
        (lambda: Hidden(), "parameter embedding.weight is used without autograd"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_with_the_reason(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        division_of(build(), 2)
    assert str(caught.value).startswith("parallelism.pipeline: ")
    assert message in str(caught.value)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(RecipeError, match="no repeated blocks"):
        trace_dataflow(Model(), [], objective, tokens())


def test_weights_make_the_dearest_stage_as_cheap_as_possible() -> None:
    assert balance_stage_bounds([1.0] * 8, 2, head_cost=4.0) == (0, 6, 8)
    assert balance_stage_bounds([5, 1, 1, 1, 1, 1], 3) == (0, 1, 3, 6)


def test_blocks_per_stage_can_be_given() -> None:
    assert balance_stage_bounds([1.0] * 8, 3, blocks_per_stage=[1, 5, 2]) == (0, 1, 6, 8)
    for wrong in ([4, 4], [0, 4, 4], [3, 3, 3]):
        with pytest.raises(RecipeError, match=r"parallelism.pipeline: blocks per stage .* must be 3 numbers"):
            balance_stage_bounds([1.0] * 8, 3, blocks_per_stage=wrong)


def test_schedules_place_stages_on_ranks() -> None:
    assert assign_stage_owners("1f1b", 4, 4) == (0, 1, 2, 3)
    assert assign_stage_owners("interleaved", 4, 2) == (0, 1, 0, 1)
    assert assign_stage_owners("zero-bubble", 4, 2) == (0, 1, 1, 0)
    assert assign_stage_owners("zero-bubble", 2, 2) == (0, 1)


def test_schedules_take_these_numbers_of_micro_batches() -> None:
    assert [n for n in range(1, 12) if fitting("interleaved", n, 8, 4)] == [1, 2, 3, 4, 5, 6, 7, 8, 10]
