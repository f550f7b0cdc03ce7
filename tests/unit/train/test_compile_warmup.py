"""Compiling before the first step: what it reports, and that it leaves nothing else behind."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.models import transformer
from phalanx.run.event_types import Compiled, StepDone
from phalanx.train.distributed.parallelize import compile_blocks
from phalanx.train.ops.blocks import find_blocks
from phalanx.train.train_state import TrainState
from phalanx.train.trainer import Trainer
from phalanx.train.worker import warm_up_compile
from small_train import Clock, SmallParts, make_parts, steps_of

pytestmark = [
    # torch's compiler does of its own what it warns others of
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Compiled functions are traced, but no code is generated for them, which would take half a minute; the list tells
    of each."""
    torch.compiler.reset()
    made: list[Any] = []
    real = nn.Module.compile

    def traced(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        made.append(graph)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: real(self, backend=traced, **options))
    yield made
    torch.compiler.reset()


class Counting(nn.Module):
    """Counts its forwards in a buffer, as a router and BatchNorm do, and draws random numbers."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return F.dropout(x, 0.5)


def small(path: Path, counting: bool = False, **changes: Any) -> SmallParts:
    parts = make_parts(path, **{"compile": True, **changes})
    if counting:
        parts.model.dropout = Counting()
    compile_blocks(parts.model, [])
    return parts


def test_it_tells_how_long_and_how_much_was_compiled(tmp_path: Path) -> None:
    parts, clock = small(tmp_path), Clock()
    real = parts.objective.forward
    parts.objective.forward = lambda *args: (clock.tick(5.0), real(*args))[1]  # type: ignore[method-assign]
    warm_up_compile(parts, TrainState(), clock)
    (compiled,) = parts.events(Compiled)
    assert (compiled.duration_s, compiled.num_blocks, compiled.num_graph_breaks) == (5.0, 1, 0)


def test_nothing_is_compiled_after_it(tmp_path: Path, backend: list[Any]) -> None:
    parts = small(tmp_path)
    warm_up_compile(parts, TrainState())
    assert len(backend) == 1
    for _ in steps_of(Trainer(parts, TrainState(), {})):
        pass
    assert len(backend) == 1


def test_weights_buffers_gradients_and_random_numbers_are_as_before(tmp_path: Path) -> None:
    parts = small(tmp_path, counting=True)
    before = {name: value.clone() for name, value in parts.model.state_dict().items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    warm_up_compile(parts, TrainState())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in parts.model.state_dict().items())
    assert all(parameter.grad is None for parameter in parts.model.parameters())


def test_a_run_is_the_same_with_and_without_it(tmp_path: Path) -> None:
    losses = []
    for warm in (True, False):
        torch.compiler.reset()
        parts = small(tmp_path / str(warm), counting=True)
        if warm:
            warm_up_compile(parts, TrainState())
        for _ in steps_of(Trainer(parts, TrainState(), {})):
            pass
        losses.append([event.loss for event in parts.events(StepDone)])
    assert losses[0] == losses[1]


def learns(model: nn.Module) -> None:
    tokens = torch.arange(12).view(2, 6) % 11
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()


def test_blocks_that_are_alike_are_compiled_once(backend: list[Any]) -> None:
    model = transformer(vocab_size=11, seq_len=6, layers=12, hidden_size=16, num_heads=2)
    compile_blocks(model, [model.get_submodule(name) for name in find_blocks(model)])
    learns(model)
    assert len(backend) <= 2  # what enters the first may differ from what enters the others


def test_compiled_blocks_get_rotations_in_real_numbers(backend: list[Any]) -> None:
    model = transformer(vocab_size=11, seq_len=6, layers=2, hidden_size=16, num_heads=2)
    plain = transformer(vocab_size=11, seq_len=6, layers=2, hidden_size=16, num_heads=2)
    plain.load_state_dict(model.state_dict())
    compile_blocks(model, [model.get_submodule(name) for name in find_blocks(model)])
    tokens = torch.arange(12).view(2, 6) % 11
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=1e-5, atol=1e-6)
    inputs = [node.meta["example_value"] for graph in backend for node in graph.graph.nodes if node.op == "placeholder"]
    assert not any(value.is_complex() for value in inputs if isinstance(value, Tensor))


def test_for_graphs_gradients_are_added_up_in_memory_of_their_own(tmp_path: Path) -> None:
    parts = make_parts(tmp_path)
    parts.accumulator._persistent_grads = True
    parts.accumulator.zero_grad(1)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in parts.model.parameters())
    plain = make_parts(tmp_path / "plain")
    losses = []
    for each in (parts, plain):
        for _ in steps_of(Trainer(each, TrainState(), {})):
            pass
        losses.append([event.loss for event in each.events(StepDone)])
    assert losses[0] == losses[1]
