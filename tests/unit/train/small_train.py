"""Small models, data in memory, a clock to be set by hand and a reporter that remembers: shared by the train room's
tests. Everything is seeded and needs no file and no process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.data import Batch, Facts
from phalanx.recipe import Recipe
from phalanx.recipe.schema import Optim
from phalanx.run import Run
from phalanx.train.callbacks import Callbacks, RunView
from phalanx.train.exchange import GradientExchange
from phalanx.train.loop import Parts, StopRequest
from phalanx.train.optimizers import Optimizer, trainable
from phalanx.train.place import Place
from phalanx.train.precision import LossScale
from phalanx.train.step import Stepper
from phalanx.train.tasks import LanguageModeling, Task
from phalanx.train.timing import HostStopwatch

VOCAB, SEQUENCE = 11, 6
GLOBAL, MICRO = 4, 2


class TinyLM(nn.Module):
    """Tokens [b, s] to logits [b, s, vocab]; `dropout` makes it draw random numbers."""

    def __init__(self, vocab: int = VOCAB, width: int = 8, dropout: float = 0.0):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.hidden = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(self.norm(x + self.dropout(torch.tanh(self.hidden(x)))))


def tiny_lm(seed: int = 0, **options: Any) -> TinyLM:
    torch.manual_seed(seed)
    return TinyLM(**options)


def token_batch(count: int, seed: int = 0, ignored: float = 0.0, sequence: int = SEQUENCE, vocab: int = VOCAB) -> Batch:
    """`count` samples of random tokens; about the share `ignored` of the targets does not count."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, vocab, (count, sequence + 1))
    targets = tokens[:, 1:].copy()
    targets[random.random(targets.shape) < ignored] = -100
    return {"tokens": tokens[:, :-1].copy(), "targets": targets}


def cut(batch: Batch, micro: int) -> list[Batch]:
    """The batch in micro-batches."""
    count = len(next(iter(batch.values())))
    return [{k: v[i : i + micro] for k, v in batch.items()} for i in range(0, count, micro)]


class Samples:
    """Data in memory, as the loop and the evaluation ask for them: training samples repeat without end."""

    def __init__(self, train: Batch, held_out: Batch | None = None):
        self._train, self._held_out = train, held_out or {}
        self.train_samples = len(next(iter(train.values())))
        self.held_out_samples = len(next(iter(self._held_out.values()))) if held_out else 0
        self.facts = Facts("tokens", VOCAB, None, SEQUENCE, None)
        self.fingerprint = "0" * 32
        self.asked: list[tuple[int, int]] = []

    def train(self, consumed: int, count: int) -> Batch:
        self.asked.append((consumed, count))
        rows = np.arange(consumed, consumed + count) % self.train_samples
        return {name: values[rows] for name, values in self._train.items()}

    def held_out(self, start: int, count: int) -> Batch:
        assert start + count <= self.held_out_samples
        return {name: values[start : start + count] for name, values in self._held_out.items()}


class Clock:
    """Tells the time that was set; `tick` lets it pass."""

    def __init__(self, now: float = 1000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now

    def tick(self, seconds: float) -> None:
        self.now += seconds


class Remembering:
    """A reporter that keeps everything in lists."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.errors: list[tuple[str, int]] = []
        self.results: list[dict[str, Any]] = []

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    def error(self, text: str, code: int) -> None:
        self.errors.append((text, code))

    def result(self, value: dict[str, Any]) -> None:
        self.results.append(value)

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        """Nothing to send."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]


def make_stepper(
    model: nn.Module,
    micro_batches: int,
    task: Task | None = None,
    *,
    replicas: bool = False,
    precision: str = "fp32",
    clip: float | None = None,
    seed: int = 0,
    optim: Optim | None = None,
    scale: LossScale | None = None,
) -> Stepper:
    """A stepper of one process, with an exchange when `replicas` asks for the tree."""
    optimizer = Optimizer(model, optim or Optim(clip=clip))
    exchange = None
    if replicas:
        parameters = list(trainable(model).values())
        exchange = GradientExchange(
            parameters, rank=0, world=1, micro_batches=micro_batches, replicas=True, capacity=256
        )
    return Stepper(
        model,
        task or LanguageModeling(),
        optimizer,
        scale or LossScale(),
        place=Place(),
        micro_batches=micro_batches,
        precision=precision,
        clip=clip,
        seed=seed,
        exchange=exchange,
    )


def mean_gradients(stepper: Stepper, batches: Sequence[Batch], step: int = 1) -> tuple[float, list[Tensor]]:
    """Loss and gradients (of the mean loss) of a step that does not change the model."""
    watch = HostStopwatch()
    watch.start()
    outcome, factor = stepper.settle(stepper.gradients(step, batches, lambda: (), watch))
    gradients = [p.grad.detach() * factor for p in stepper.parameters if p.grad is not None]
    return outcome.loss, gradients


def make_parts(
    path: Path, task: LanguageModeling | None = None, callbacks: tuple[Any, ...] = (), **changes: Any
) -> Parts:
    """What a loop needs to train a tiny model for 6 steps of two micro-batches; `changes` go into the recipe."""
    run = Run(path)
    run.create()
    values = {"steps": 6, "batch": {"global": GLOBAL, "micro": MICRO}, "precision": "fp32", "threads": 1}
    values |= {"evaluate": {"every": None}, "checkpoint": {"every": None}, "layout": {"replicate": 1}}
    recipe = Recipe.model_validate({**values, **changes})
    model = tiny_lm()
    task = task or LanguageModeling()
    scale = LossScale.for_precision(recipe.precision, GLOBAL)
    stepper = make_stepper(model, GLOBAL // MICRO, task, precision=recipe.precision, clip=1.0, scale=scale)
    return Parts(
        run,
        recipe,
        Place(),
        Samples(token_batch(20), token_batch(5, seed=1)),  # type: ignore[arg-type]
        model,
        task,
        stepper.optimizer,
        scale,
        stepper,
        Callbacks(callbacks, RunView(path, 0, 1, model)),
        Remembering(),
        StopRequest(),
        units_per_sample=6,
    )
